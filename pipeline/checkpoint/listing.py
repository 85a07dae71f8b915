"""Which checkpoints there are, and what they say of themselves: nothing is verified or changed, and no tensor is read.

Another process may be saving and removing meanwhile. torch, whose import takes a second, is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint import header, manifest, names, regular
from pipeline.checkpoint.layout import MAX_STATE, STATE, TRAINING
from pipeline.errors import CheckpointError, ConfigError

FOLDER = "checkpoints"
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


def folders(path: Path) -> list[Path]:
    """The folders of checkpoints in a run directory or in a runner's folder, or the path itself if it is one.

    Raises:
        ConfigError: it is none of these.
        StorageError: it cannot be listed.
    """
    # Of os.path, which says of a name too long that nothing is there.
    if not os.path.exists(path):
        raise ConfigError(f"{path}: does not exist; {_WHAT}")
    if path.name == FOLDER or _all(path):
        return [path]
    if (path / FOLDER).is_dir():
        return [path / FOLDER]
    children = sorted(each for each in path.glob("*") if each.is_dir() and not each.is_symlink())
    found = [each / FOLDER if (each / FOLDER).is_dir() else each for each in children]
    # Where the checkpoints of a run go elsewhere, each runner has a folder of them there.
    found = [each for each in found if each.name == FOLDER or _all(each)]
    if not found and not (path / "lock").is_file():
        what = "has no checkpoints" if path.is_dir() else "is no folder"
        raise ConfigError(f"{path}: {what}; {_WHAT}")
    return found


def is_one(path: Path) -> bool:
    """Whether a path names a checkpoint, and not a folder of them."""
    return os.path.isfile(path / manifest.NAME) or (names.step_of(path) is not None and path.is_dir())


def chosen(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest in it.

    Raises:
        ConfigError: there is none, or several runners have some.
    """
    if is_one(path):
        return path
    newest = [each[-1] for each in map(names.committed, folders(path)) if each]
    if len(newest) == 1:
        return newest[0]
    several = f"several runners have checkpoints: {', '.join(str(each.parent) for each in newest)}; name one of them"
    raise ConfigError(f"{path}: {several if newest else f'there is no checkpoint in it; {_WHAT}'}")


def listed(path: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, by step, then what is no checkpoint any more or not yet.

    Raises:
        StorageError: the storage refuses for a reason that may pass.
    """
    found = list(_described(names.committed(path)))
    if found:
        found[-1] = replace(found[-1], newest=True)
    best = _best_steps([each.path for each in found if not each.problem])
    found = [replace(each, best=each.step in best) for each in found]
    apart = {SET_ASIDE: names.bad(path), LEFT_BEHIND: names.left_behind(path)}
    return found + [Checkpoint(each, size=_size(each), apart=kind) for kind, some in apart.items() for each in some]


def described(path: Path) -> Checkpoint:
    """What one checkpoint says of itself.

    Raises:
        StorageError: the storage refuses for a reason that may pass.
    """
    try:
        size = sum(entry.size for entry in manifest.listed(path).values())
        state = _state(path / STATE)
    except CheckpointError as error:
        return Checkpoint(path, names.step_of(path), size=_size(path), problem=str(error))
    counters = state["train_state"]
    iterations = state.get("iterations", {})
    return Checkpoint(path, counters["iteration"], counters, size, state["metrics"], iterations=iterations)


def read_header(path: Path) -> header.Header:
    """What a safetensors file holds, by its header alone.

    Raises:
        CheckpointError: it is missing or damaged.
        StorageError: the storage refuses for a reason that may pass.
    """
    size = regular.size_of(path) or 0
    with regular.opened(path) as file:
        length = int.from_bytes(file.read(8) or b"", "little")
        if length > min(header.MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: is no safetensors file (its header would have {length} bytes); use another")
        content = file.read(length) or b""
    try:
        return header.parse(content, size - 8 - length)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _all(path: Path) -> list[Path]:
    return names.committed(path) + names.bad(path) + names.left_behind(path) if path.is_dir() else []


def _described(paths: Iterable[Path]) -> Iterator[Checkpoint]:
    """Those that are still there when they are looked at: a run removes the oldest whenever it has saved a new one."""
    for path in paths:
        found = described(path)
        if not found.problem or os.path.lexists(path):
            yield found


def _state(path: Path) -> dict[str, Any]:
    """The counters and numbers."""
    try:
        state: dict[str, Any] = json.loads(regular.content_of(path, MAX_STATE))
        counters, metrics = state["train_state"], state["metrics"]
        phases = [*metrics.values(), *state.get("iterations", {}).values()]
        whole = type(counters["iteration"]) is int and all(isinstance(each, dict) for each in phases)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: makes no sense ({error}); use another checkpoint") from error
    if not whole:
        raise CheckpointError(f"{path}: makes no sense; use another checkpoint")
    return state


def _best_steps(paths: list[Path]) -> set[int | None]:
    """The iterations that are kept as the best, as the newest checkpoint knows them."""
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
    """Bytes of the files in a folder, which may be vanishing."""
    with suppress(OSError):
        return sum(regular.size_of(path / name) or 0 for name in os.listdir(path))
    return 0
