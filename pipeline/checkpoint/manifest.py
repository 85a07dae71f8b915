"""``manifest.json``: what a checkpoint consists of, so that a damaged one is noticed before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1


def encode(hashes: Mapping[str, str], sizes: Mapping[str, int]) -> bytes:
    """The manifest of files whose SHA-256 and sizes in bytes are given."""
    files = {name: {"size": sizes[name], "sha256": hashes[name]} for name in sorted(hashes)}
    return json.dumps({"format": FORMAT, "files": files}, indent=1).encode()


def read_verified(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, each as the manifest says.

    Raises:
        CheckpointError: something is missing, or is not what was written.
    """
    files = _entries(folder)
    contents = {}
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file() or path.is_symlink():
            raise CheckpointError(f"{path}: is missing or no regular file, but {NAME} lists it; use another checkpoint")
        if path.stat().st_size != entry["size"]:
            raise CheckpointError(
                f"{path}: has {path.stat().st_size} bytes, not the {entry['size']} that were written; use another checkpoint"
            )
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise CheckpointError(
                f"{path}: is damaged: its SHA-256 is not the one that was written; use another checkpoint"
            )
        contents[name] = content
    return contents


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = json.loads((folder / NAME).read_bytes())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / NAME}: format {manifest['format']!r} is not {FORMAT}; use the version that wrote it"
            )
        if not all({"size", "sha256"} <= set(entry) for entry in files.values()):
            raise CheckpointError(
                f"{folder / NAME}: is damaged (a file without size or sha256); use another checkpoint"
            )
    except OSError as error:
        raise CheckpointError(
            f"{folder}: is no checkpoint: its {NAME} cannot be read ({error.strerror}); name a step-… folder or a .safetensors file"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / NAME}: is damaged ({error}); use another checkpoint") from error
    return files
