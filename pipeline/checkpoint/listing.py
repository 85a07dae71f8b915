"""What a checkpoint is, read without torch."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint import layout, storage
from pipeline.checkpoint.layout import FOLDER, MAX_STATE, STATE, TRAINING
from pipeline.errors import CheckpointError, ConfigError

METADATA = "__metadata__"

# Bytes of a header.
MAX_HEADER = 16 * 2**20

MAX_TENSORS = 100_000

# The bytes of one number of each type.
WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


# Values in a header; more are lists in lists, which would take a multiple of its size.
MAX_VALUES = 3_000_000


class Entry(NamedTuple):
    """The type, shape and place of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """The header of a file: its entries, in the order of their places, and its texts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def _parse_header(content: bytes, size: int) -> Header:
    """Read a header.

    Args:
        content: its JSON.
        size: how many bytes of numbers follow it.

    Raises:
        ValueError, RecursionError: it is not what the format says.
    """
    if sum(map(content.count, b"[{,")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    header = json.loads(content.decode(), object_pairs_hook=_unique)
    metadata = header.pop(METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("it is no object, or its metadata is none of texts")
    if len(header) > MAX_TENSORS:
        raise ValueError(f"more than {MAX_TENSORS} tensors")
    entries = sorted(((name, _entry(name, value)) for name, value in header.items()), key=lambda item: item[1][2:])
    _check_places(entries, size)
    return Header(dict(entries), metadata)


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a header with these members; ``json`` takes the last of two of one name."""
    members = dict(items)
    if len(members) < len(items):
        [(name, _)] = Counter(name for name, _ in items).most_common(1)
        raise ValueError(f"'{name}' twice")
    return members


def _entry(name: str, saved: Any) -> Entry:
    if not isinstance(saved, dict) or saved.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"'{name}' is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = saved["dtype"], saved["shape"], saved["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise ValueError(f"'{name}' has the unknown dtype {str(dtype)[:20]!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"'{name}' has a shape or offsets that are no counts")
    # Sizes that no memory has would overflow, also beside a 0.
    if len(shape) > 64 or math.prod(size or 1 for size in shape) >= 2**60:
        raise ValueError(f"'{name}' has an impossible shape")
    start, end = offsets
    if end - start != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(f"'{name}' has {end - start} bytes, which is not what its shape needs")
    return Entry(dtype, tuple(shape), start, end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int and 0 <= count < 2**60 for count in value)


def _check_places(entries: Iterable[tuple[str, Entry]], size: int) -> None:
    """Raise unless the tensors fill the data without gap or overlap."""
    end = 0
    for name, entry in entries:
        if entry.start != end:
            raise ValueError(f"'{name}' begins at {entry.start}, not where the one before it ends, {end}")
        end = entry.end
    if end != size:
        raise ValueError(f"its tensors take {end} bytes, and there are {size}")


SET_ASIDE, LEFT_BEHIND = "set aside as damaged", "being saved or removed, or left behind"

_WHAT = "name a run directory, the folder of one of its runners, a folder of checkpoints, or a checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it describes itself.

    Attributes:
        path: its folder.
        step: the iteration after which it was saved; None where that cannot be read.
        counters: the counters of the run, ``epoch`` and others.
        size: bytes of all of its files.
        metrics: phase -> name -> number.
        iterations: phase -> name -> the iteration that a number is of; empty where an earlier version saved it.
        apart: what it is if it is not one that a run would go on from; ``""``.
        problem: what is wrong with it as far as that shows without reading all of it.
        newest: whether no other is of a higher step.
        best: whether it is kept as one of the best, by ``keep_best``.
    """

    path: Path
    step: int | None = None
    counters: dict[str, int] = field(default_factory=dict)
    size: int = 0
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    apart: str = ""
    problem: str = ""
    newest: bool = False
    best: bool = False
    iterations: dict[str, dict[str, int]] = field(default_factory=dict)


def checkpoint_folders(path: Path) -> list[Path]:
    """The folders of checkpoints in a run directory or in a runner's folder, or the path itself if it is one.

    Raises:
        ConfigError: it is none of these.
        StorageError: it cannot be listed.
    """
    # Of os.path, which says of a name too long that nothing is there.
    if not os.path.exists(path):
        raise ConfigError(f"{path}: does not exist; {_WHAT}")
    if path.name == FOLDER or _has_checkpoints(path):
        return [path]
    if (path / FOLDER).is_dir():
        return [path / FOLDER]
    runners = sorted(child for child in path.glob("*") if child.is_dir() and not child.is_symlink())
    folders = [runner / FOLDER if (runner / FOLDER).is_dir() else runner for runner in runners]
    # Where the checkpoints of a run go elsewhere, each runner has a folder of them there.
    folders = [folder for folder in folders if folder.name == FOLDER or _has_checkpoints(folder)]
    if not folders and not (path / "lock").is_file():
        what = "has no checkpoints" if path.is_dir() else "is no folder"
        raise ConfigError(f"{path}: {what}; {_WHAT}")
    return folders


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint, and not a folder of them."""
    return os.path.isfile(path / layout.MANIFEST) or (layout.step_of(path) is not None and path.is_dir())


def choose_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest in it.

    Raises:
        ConfigError: there is none, or several runners have some.
    """
    if is_checkpoint(path):
        return path
    newest = [paths[-1] for paths in map(layout.committed_checkpoints, checkpoint_folders(path)) if paths]
    if len(newest) == 1:
        return newest[0]
    several = f"several runners have checkpoints: {', '.join(str(checkpoint.parent) for checkpoint in newest)}; name one of them"
    raise ConfigError(f"{path}: {several if newest else f'there is no checkpoint in it; {_WHAT}'}")


def list_checkpoints(path: Path) -> list[Checkpoint]:
    """The checkpoints in a folder by step, then those that are damaged or incomplete.

    Raises:
        StorageError: the storage refuses for a reason that may pass.
    """
    described = map(describe_checkpoint, layout.committed_checkpoints(path))
    # A run may remove old ones meanwhile.
    checkpoints = [checkpoint for checkpoint in described if not checkpoint.problem or os.path.lexists(checkpoint.path)]
    if checkpoints:
        checkpoints[-1] = replace(checkpoints[-1], newest=True)
    best = _best_steps([checkpoint.path for checkpoint in checkpoints if not checkpoint.problem])
    checkpoints = [replace(checkpoint, best=checkpoint.step in best) for checkpoint in checkpoints]
    apart = {SET_ASIDE: layout.bad_checkpoints(path), LEFT_BEHIND: layout.leftovers(path)}
    return checkpoints + [Checkpoint(path, size=_size(path), apart=kind) for kind in apart for path in apart[kind]]


def describe_checkpoint(path: Path) -> Checkpoint:
    """Describe one checkpoint.

    Raises:
        StorageError: the storage refuses for a reason that may pass.
    """
    try:
        size = sum(entry.size for entry in layout.listed_files(path).values())
        state = parse_state(storage.read_small(path / STATE, MAX_STATE), path / STATE)
    except CheckpointError as error:
        return Checkpoint(path, layout.step_of(path), size=_size(path), problem=str(error))
    counters = state["train_state"]
    iterations = state.get("iterations", {})
    return Checkpoint(path, counters["iteration"], counters, size, state["metrics"], iterations=iterations)


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: it is missing or damaged.
        StorageError: the storage refuses for a reason that may pass.
    """
    size = storage.size_of(path) or 0
    with storage.open_regular(path) as file:
        length = int.from_bytes(file.read(8) or b"", "little")
        if length > min(MAX_HEADER, size - 8):
            what = f"a header of {length} bytes in a file of {size}"
            raise CheckpointError(f"{path}: is no safetensors data ({what}); use another")
        content = file.read(length) or b""
    try:
        return _parse_header(content, size - 8 - length)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged: its header makes no sense ({error}); use another") from error


def _has_checkpoints(path: Path) -> bool:
    """Whether a folder has checkpoints, or what was one."""
    kinds = (layout.committed_checkpoints, layout.bad_checkpoints, layout.leftovers)
    return path.is_dir() and any(kind(path) for kind in kinds)


def parse_state(content: bytes, path: Path) -> dict[str, Any]:
    """The counters and numbers of a ``state.json``.

    Raises:
        CheckpointError: it makes no sense.
    """
    try:
        state: dict[str, Any] = json.loads(content)
        counters, metrics = state["train_state"], state["metrics"]
        phases = [*metrics.values(), *state.get("iterations", {}).values()]
        whole = type(counters["iteration"]) is int and all(isinstance(numbers, dict) for numbers in phases)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: makes no sense ({error}); use another checkpoint") from error
    if not whole:
        raise CheckpointError(f"{path}: makes no sense; use another checkpoint")
    return state


def _best_steps(paths: list[Path]) -> set[int | None]:
    """The iterations of the best checkpoints, from the newest checkpoint."""
    if not paths:
        return set()
    try:
        state: Any = json.loads(read_header(paths[-1] / TRAINING).metadata["state"])
        # A mapping stands there as the list of its items.
        for key in ("loop", "validation", "best", "kept"):
            state = next(value for name, value in state["dict"] if name == key)
        return {iteration for _, iteration in state}
    except (CheckpointError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        # It was saved without, by an experiment of the user's own or where no best is kept.
        return set()


def _size(path: Path) -> int:
    """The bytes of the files in a folder, some of which may vanish meanwhile."""
    with suppress(OSError):
        return sum(storage.size_of(path / name) or 0 for name in os.listdir(path))
    return 0
