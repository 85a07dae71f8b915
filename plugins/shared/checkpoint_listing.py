"""What checkpoints say of themselves, read without torch."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint import layout, storage
from pipeline.checkpoint.header import read_header
from pipeline.checkpoint.layout import FOLDER, MAX_STATE, STATE, TRAINING, parse_state
from pipeline.errors import CheckpointError, ConfigError

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
        iterations: phase -> name -> the iteration that a number is of.
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
    return path if is_checkpoint(path) else only_checkpoints(path)[-1]


def only_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints by step of the only folder in a path that has some.

    Raises:
        ConfigError: there is none, or several runners have some.
    """
    checkpoints = map(layout.committed_checkpoints, checkpoint_folders(path))
    folders = [paths for paths in checkpoints if paths]
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise ConfigError(f"{path}: there is no checkpoint in it; {_WHAT}")
    names = ", ".join(str(paths[0].parent) for paths in folders)
    raise ConfigError(f"{path}: several runners have checkpoints: {names}; name one of them")


def best_checkpoint(checkpoints: list[Path]) -> Path | None:
    """Return the best of the checkpoints of a folder, as the newest one records it."""
    by_step = {layout.step_of(path): path for path in checkpoints}
    best = (by_step[step] for step in _best_steps(checkpoints) if step in by_step)
    return next(best, None)


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
    return Checkpoint(path, counters["iteration"], counters, size, state["metrics"], iterations=state["iterations"])


def _has_checkpoints(path: Path) -> bool:
    """Whether a folder has checkpoints, or what was one."""
    kinds = (layout.committed_checkpoints, layout.bad_checkpoints, layout.leftovers)
    return path.is_dir() and any(kind(path) for kind in kinds)


def _best_steps(paths: list[Path]) -> list[int]:
    """The iterations of the best checkpoints, the best one first, from the newest checkpoint."""
    if not paths:
        return []
    try:
        state: Any = json.loads(read_header(paths[-1] / TRAINING).metadata["state"])
        # A mapping stands there as the list of its items.
        for key in ("engine", "validation", "best", "kept"):
            state = next(value for name, value in state["dict"] if name == key)
        return [entry["tuple"][1] for entry in state]
    except (CheckpointError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        # It was saved without, by an experiment of the user's own or where no best is kept.
        return []


def _size(path: Path) -> int:
    """The bytes of the files in a folder, some of which may vanish meanwhile."""
    with suppress(OSError):
        return sum(storage.size_of(path / name) or 0 for name in os.listdir(path))
    return 0
