"""Thirty stages as strangers write them, six of each kind: ``tests/check/thirty_swaps``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

FOLDER = Path(__file__).parents[1] / "check" / "thirty_swaps"
INSTALLED = FOLDER / "installed"
"""Goes on ``sys.path``: has a package that others have written."""
SWAPS: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "swaps.yaml").read_text(encoding="utf-8"))
CONFIG = (FOLDER / "config.yaml").read_text(encoding="utf-8")


def config_with(settings: dict[str, Any]) -> str:
    """The text of the config with these keys of its runner."""
    lines = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in settings.items())
    return CONFIG.replace("    # swap\n", lines)


def write(name: str, folder: Path) -> Path:
    """The workspace of a swap, in a new folder; its config."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("installed", "swaps.yaml", "__pycache__"))
    torch.save({"users.weight": torch.zeros(6, 8), "films.weight": torch.ones(12, 8)}, folder / "old.pt")
    config = folder / "config.yaml"
    config.write_text(config_with(SWAPS[name]), encoding="utf-8")
    return config
