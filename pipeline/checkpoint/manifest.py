"""``manifest.json``: what a checkpoint consists of, so that a damaged one is noticed before it is used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint import regular
from pipeline.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1
MAX_SIZE = 2**20
"""Bytes of a manifest; a file takes about 120."""

_HASH = re.compile(r"[0-9a-f]{64}")


class Listed(NamedTuple):
    """A file as it was written."""

    sha256: str
    size: int


def of(content: bytes) -> Listed:
    """How a file of this content is listed."""
    return Listed(hashlib.sha256(content).hexdigest(), len(content))


def encode(files: Mapping[str, Listed]) -> bytes:
    """The manifest of some files, with a hash of itself: a hash that is damaged in it is not taken for a damaged file.

    Raises:
        CheckpointError: there are more than can be read again.
    """
    written = {name: {"size": files[name].size, "sha256": files[name].sha256} for name in sorted(files)}
    own = of(json.dumps(written).encode()).sha256
    content = json.dumps({"format": FORMAT, "files": written, "sha256": own}, indent=1).encode()
    if len(content) > MAX_SIZE:
        raise CheckpointError(f"a checkpoint of {len(files)} files is too large for its {NAME}; use fewer phases")
    return content


def listed(folder: Path) -> dict[str, Listed]:
    """The files of a checkpoint, which are there and have the sizes that were written; none of them is opened.

    Raises:
        CheckpointError: the manifest is damaged, or something is missing or of another kind or size.
    """
    files = entries(folder)
    for name, entry in files.items():
        check_size(folder / name, entry)
    return files


def may_be(name: str) -> bool:
    """Whether a file of a checkpoint may be called so: nothing that leads elsewhere, on any system."""
    return name not in {"", ".", "..", NAME} and not re.search(r"[\\/\0]", name)


def check_size(path: Path, entry: Listed) -> None:
    """Compare a file's kind and size with what was written.

    Raises:
        CheckpointError: they differ.
    """
    size = regular.size_of(path)
    if size is None:
        raise CheckpointError(f"{path}: is missing or no regular file, but {NAME} lists it; use another checkpoint")
    if size != entry.size:
        raise CheckpointError(
            f"{path}: has {size} bytes, not the {entry.size} that were written; use another checkpoint"
        )


def entries(folder: Path) -> dict[str, Listed]:
    """What the manifest lists, whether it is there or not.

    Raises:
        CheckpointError: the folder or the manifest is damaged.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a link; name the folder that it leads to")
    try:
        content = regular.content_of(folder / NAME, MAX_SIZE)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: is no checkpoint: {error}; name a step-… folder or a .safetensors file"
        ) from error
    try:
        manifest = json.loads(content)
        saved = manifest["files"]
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / NAME}: format {manifest['format']!r} is not {FORMAT}; use the version that wrote it"
            )
        files = {name: _entry(name, each) for name, each in saved.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / NAME}: is damaged ({error}); use another checkpoint") from error
    # Whatever says the same in other words, such as one name twice, is not what was written.
    if content != encode(files):
        raise CheckpointError(f"{folder / NAME}: is damaged (it is not as it was written); use another checkpoint")
    return files


def _entry(name: str, saved: Mapping[str, Any]) -> Listed:
    if not may_be(name):
        raise ValueError(f"{name[:60]!r} is no name of a file in it")
    size, sha256 = saved["size"], saved["sha256"]
    if type(size) is not int or not 0 <= size < 2**60:
        raise ValueError(f"the size of {name[:60]!r} is no count")
    if not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
        raise ValueError(f"the sha256 of {name[:60]!r} is none")
    return Listed(sha256, size)
