"""Which keys stages read and write, as their source tells: what runs has no fault, however oddly it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from tests.user_code.unusual_stages import UNUSUAL

HEAD = "import torch\nfrom pipeline import InstanceBase, NetworkBase, RunnerBase, StartupBase, TerminalBase, stages\n"


def written(config: Path, text: str) -> list[str]:
    """Write the files of a workspace; the overrides that name their classes."""
    first, *others = re.split(r"^# (\w+\.py)\n", text, flags=re.MULTILINE)
    files = {"own.py": HEAD + first, **dict(zip(others[::2], others[1::2], strict=True))}
    for name, content in files.items():
        (config.parent / name).write_text(content, encoding="utf-8")
    stages = re.findall(r"^class (Instance|Network|Startup|Runner|Terminal)\b", first, flags=re.MULTILINE)
    paths = [f"runner.train_runner.{each.lower()}_class_path={{workspace}}/own.py" for each in stages]
    return [*paths, *(["plugins=['{workspace}/plugin.py']"] if "plugin.py" in files else [])]


# Each is a run; every fourth is quick.
SOME = [
    pytest.param(text, id=name, marks=() if number % 4 == 0 else pytest.mark.slow)
    for number, (name, text) in enumerate(UNUSUAL.items())
]


@pytest.mark.slow
@pytest.mark.parametrize("text", SOME)
def test_what_runs_has_no_fault(linear: Path, text: str) -> None:
    overrides = written(linear, text)
    assert check(linear, overrides) == []
    GeneralTrainer(linear, overrides).run()
