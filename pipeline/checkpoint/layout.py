"""The names of folders and files of checkpoints, and the manifest with sizes and SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint import storage
from pipeline.errors import CheckpointError, ConfigError, StorageError

# The name of a folder of checkpoints in the folder of a runner.
FOLDER = "checkpoints"

NEW = ".new"

# What stands behind a + tells it from others; behind an @, it was saved while nothing trained.
_NAMED = r"step-(\d{12,15})([+@][\w=.-]{1,100}?)?(\.new)?"

_STEP = re.compile(_NAMED, re.ASCII)

_LEFT = re.compile(rf"\.(tmp|del)-{_NAMED}-[0-9a-f]{{8}}", re.ASCII)

_BAD = re.compile(rf"\.bad-{_NAMED}-[0-9a-f]{{8}}", re.ASCII)


def checkpoint_name(iteration: int, suffix: str = "") -> str:
    """The name of the folder of a checkpoint; ``suffix``: a + or @ and what tells it from others of the same iteration.

    Raises:
        ConfigError: it cannot be a part of one.
    """
    folder = f"step-{iteration:012d}{suffix}"
    if not _STEP.fullmatch(folder) or folder.endswith(NEW):
        raise ConfigError(f"'{suffix[1:]}' cannot name a checkpoint; use at most 100 letters, digits and any of _=.-")
    return folder


def is_resumable(path: Path) -> bool:
    """Whether a training can go on from a checkpoint, by its name."""
    return "@" not in path.name


def step_of(path: Path) -> int | None:
    """The iteration that a folder is named after; None for anything else."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def temporary_name(path: Path, kind: str) -> Path:
    """A free name for a checkpoint with the mark ``tmp``, ``del`` or ``bad``."""
    return path.with_name(f".{kind}-{path.name}-{uuid.uuid4().hex[:8]}")


def committed_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step; a new one comes after the one that it will replace."""
    return sorted(_entries(folder, _STEP), key=lambda path: (step_of(path), path.name))


def leftovers(folder: Path) -> list[Path]:
    """What a killed process was writing or removing."""
    return _entries(folder, _LEFT)


def bad_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were found damaged."""
    return _entries(folder, _BAD)


def _entries(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """What in a folder has one of these names."""
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if names.fullmatch(name)]
    except FileNotFoundError:
        if folder.is_symlink():
            what = f"{folder}: leads to {os.readlink(folder)}, which is not there"
            raise StorageError(f"{what}; mount its disk or bring it back, or begin a new run") from None
        return []
    except OSError as error:
        raise StorageError(f"{folder}: cannot be listed: {error.strerror}; free or repair the storage") from error


MANIFEST = "manifest.json"

FORMAT = 1

# Bytes of a manifest; a file takes about 120.
MAX_SIZE = 2**20


_HASH = re.compile(r"[0-9a-f]{64}")


class FileEntry(NamedTuple):
    """The size and hash of a file, as it was written."""

    sha256: str
    size: int


def file_entry(content: bytes) -> FileEntry:
    """The manifest entry of a file."""
    return FileEntry(hashlib.sha256(content).hexdigest(), len(content))


def encode_manifest(files: Mapping[str, FileEntry]) -> bytes:
    """The manifest of some files, with a hash of itself.

    Raises:
        CheckpointError: there are more than can be read again.
    """
    written = {name: {"size": files[name].size, "sha256": files[name].sha256} for name in sorted(files)}
    own = file_entry(json.dumps(written).encode()).sha256
    content = json.dumps({"format": FORMAT, "files": written, "sha256": own}, indent=1).encode()
    if len(content) > MAX_SIZE:
        raise CheckpointError(f"a checkpoint of {len(files)} files is too large for its {MANIFEST}; use fewer phases")
    return content


def listed_files(folder: Path) -> dict[str, FileEntry]:
    """The files of a checkpoint; raise if one is missing or has another size. None is opened.

    Raises:
        CheckpointError: the manifest is damaged, or something is missing or of another kind or size.
    """
    files = read_manifest(folder)
    for name, entry in files.items():
        check_size(folder / name, entry)
    return files


def is_file_name(name: str) -> bool:
    """Whether a file of a checkpoint may have this name: none that leads elsewhere, on any system."""
    return name not in {"", ".", "..", MANIFEST} and not re.search(r"[\\/\0]", name)


def check_size(path: Path, entry: FileEntry) -> None:
    """Compare a file's kind and size with what was written.

    Raises:
        CheckpointError: they differ.
    """
    size = storage.size_of(path)
    if size is None:
        raise CheckpointError(f"{path}: is missing or no regular file, but {MANIFEST} lists it; use another checkpoint")
    if size != entry.size:
        raise CheckpointError(f"{path}: has {size} bytes, not the {entry.size} written; use another checkpoint")


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The entries of the manifest; the files need not exist.

    Raises:
        CheckpointError: the folder or the manifest is damaged.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a link; name the folder that it leads to")
    try:
        content = storage.read_small(folder / MANIFEST, MAX_SIZE)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: is no checkpoint: {error}; name a step-… folder or a weights file") from error
    try:
        manifest = json.loads(content)
        if manifest["format"] != FORMAT:
            what = f"{folder / MANIFEST}: format {manifest['format']!r} is not {FORMAT}"
            raise CheckpointError(f"{what}; use the version that wrote it")
        files = {name: _entry(name, entry) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: is damaged ({error}); use another checkpoint") from error
    # Whatever says the same in other words, such as one name twice, is not what was written.
    if content != encode_manifest(files):
        raise CheckpointError(f"{folder / MANIFEST}: is damaged (it is not as it was written); use another checkpoint")
    return files


def _entry(name: str, saved: Mapping[str, Any]) -> FileEntry:
    if not is_file_name(name):
        raise ValueError(f"{name[:60]!r} is no name of a file in it")
    size, sha256 = saved["size"], saved["sha256"]
    if type(size) is not int or not 0 <= size < 2**60:
        raise ValueError(f"the size of {name[:60]!r} is no count")
    if not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
        raise ValueError(f"the sha256 of {name[:60]!r} is none")
    return FileEntry(sha256, size)


# The counters and numbers.
STATE = "state.json"

# What a run needs to go on, beside the weights.
TRAINING = "training.safetensors"

# What the files of weights end with, after the name of their phase.
SUFFIX = ".safetensors"

# What each process but that of rank 0 has of its own, by rank.
_RANK = re.compile(r"rank-\d{5}-of-\d{5}\.safetensors")


def rank_file(rank: int, size: int) -> str:
    """The file of what one of several processes has of its own."""
    return f"rank-{rank:05d}-of-{size:05d}{SUFFIX}"


def rank_files(names: Iterable[str]) -> list[str]:
    """Those of rank 1, 2, …; none where one process has saved."""
    return sorted(name for name in names if _RANK.fullmatch(name))


def is_weights(name: str) -> bool:
    """Whether a file of a checkpoint has weights; its name is that of their phase."""
    return name.endswith(SUFFIX) and name != TRAINING and not _RANK.fullmatch(name)


# Bytes of a ``state.json``.
MAX_STATE = 16 * 2**20


def parse_state(content: bytes, path: Path) -> dict[str, Any]:
    """The counters and numbers of a ``state.json``.

    Raises:
        CheckpointError: it makes no sense.
    """
    try:
        state: dict[str, Any] = json.loads(content)
        counters, metrics = state["train_state"], state["metrics"]
        phases = [*metrics.values(), *state["iterations"].values(), state.get("meta", {})]
        whole = type(counters["iteration"]) is int and all(isinstance(numbers, dict) for numbers in phases)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: makes no sense ({error}); use another checkpoint") from error
    if not whole:
        raise CheckpointError(f"{path}: makes no sense; use another checkpoint")
    return state
