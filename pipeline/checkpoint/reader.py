"""A checkpoint, read and verified; which of several is the best."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint import layout, pytree, safetensors_io, storage
from pipeline.checkpoint.header import read_header
from pipeline.checkpoint.layout import MAX_STATE, STATE, SUFFIX, TRAINING
from pipeline.checkpoint.state import Counters, TrainingState
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, one_of

# Phase -> name -> the iteration that a number is of.
Iterations = Mapping[str, Mapping[str, int]]


def iterations_at(metrics: Mapping[str, Any], iteration: int) -> Iterations:
    """All numbers are of one iteration."""
    return {phase: dict.fromkeys(own, iteration) for phase, own in metrics.items() if isinstance(own, Mapping)}


def best_by_metric(paths: Iterable[Path], metric: str, mode: str) -> Path | None:
    """The checkpoint with the highest (``mode`` max) or lowest (min) number of a name; the newest of equals.

    Only numbers of a checkpoint's own iteration count: those of an earlier one judge other weights.

    Args:
        paths: the checkpoints, by step.
        metric: the name.
        mode: ``max`` or ``min``.

    Raises:
        CheckpointError: there are checkpoints, and none knows the number as its own.
    """
    known: dict[Path, float] = {}
    names: set[str] = set()
    path = None
    for path in paths:
        state = layout.parse_state(storage.read_small(path / STATE, MAX_STATE), path / STATE)
        metrics, iteration = state["metrics"], state["train_state"]["iteration"]
        iterations = state["iterations"]
        phases = [phase for phase in metrics if iterations.get(phase, {}).get(metric) == iteration]
        value = metrics[phases[-1]].get(metric) if phases else None
        names.update(name for numbers in metrics.values() for name in numbers)
        if isinstance(value, int | float):
            known[path] = value
    if path and not known:
        if metric in names:
            what = f"no checkpoint is of an iteration in which '{metric}' was reported"
            raise CheckpointError(f"{path.parent}: {what}; save where it is validated, as keep_best does")
        raise CheckpointError(f"{path.parent}: no checkpoint knows '{metric}'{one_of(metric, names)}")
    sign = 1 if mode == "max" else -1
    return max(known, key=lambda path: (sign * known[path], path.name), default=None)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The content of a checkpoint.

    Attributes:
        path: its folder.
        train_state: the counters.
        metrics: phase -> name -> number; null where it was not finite.
        iterations: phase -> name -> the iteration that a number is of.
        weights: phase -> name -> tensor.
        training: the tree of what else was saved to go on from; None where nothing was, or where it was not read.
        size: how many processes have saved it.
        own: what ranks other than 0 have of their own: of as many processes that of this rank, else of all.
        resized: phase -> the buffers whose shape or type is not that of a new model.
    """

    path: Path
    train_state: dict[str, int]
    metrics: dict[str, Any]
    weights: dict[str, dict[str, Tensor]] = field(repr=False)
    training: Any = field(repr=False)
    iterations: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)
    size: int = 1
    own: list[Any] = field(default_factory=list, repr=False)
    resized: dict[str, list[str]] = field(default_factory=dict, repr=False)

    @cached_property
    def state(self) -> TrainingState | None:
        """``training`` with its types, as this process goes on from it.

        Raises:
            FormatError: it has the format of another version.
            CheckpointError: it is not what a run could go on from.
        """
        if not self.training:
            return None
        world = current_world()
        where = str(self.path)
        state = TrainingState.from_tree(self.training, where)
        Counters.from_tree(self.train_state, f"{where}: counters")
        same = self.size == world.size
        return state.on_rank(world.rank, self.own, where, same=same) if self.own or not same else state


def read_checkpoint(path: Path, with_training: bool = True) -> LoadedCheckpoint:
    """Read a checkpoint, each file once its SHA-256 is the one that was written.

    Args:
        path: its folder.
        with_training: False reads and verifies the weights and numbers alone.

    Raises:
        CheckpointError: something in it is missing, or is not what was written.
        StorageError: the storage refuses for a reason that may pass.
    """
    files = layout.listed_files(path)
    state = _state(path, files)
    world, ranks = current_world(), layout.rank_files(files) if with_training else []
    own = ranks if len(ranks) + 1 != world.size else ranks[: world.rank][-1:]
    names = [name for name in files if layout.is_weights(name) or (with_training and name == TRAINING)] + own
    # Reading and hashing both let other threads run.
    with ThreadPoolExecutor(4) as pool:
        contents = pool.map(lambda name: _read_verified(path / name, files[name]), names)
        tensors = dict(zip(names, contents, strict=True))
        if world.is_main:
            # What only the others read.
            [*pool.map(lambda name: _verify(path / name, files[name]), {*ranks} - {*own})]
    weights, trees = {}, {}
    resized = {}
    for name, file in tensors.items():
        with storage.at_path(path / name):
            if layout.is_weights(name):
                phase = name.removesuffix(SUFFIX)
                weights[phase] = pytree.join(*file)
                resized[phase] = safetensors_io.resized_buffers(file.metadata)
            else:
                trees[name] = pytree.unflatten(*file)
    counters, metrics = state["train_state"], state["metrics"]
    parts = [trees[name] for name in own]
    return LoadedCheckpoint(
        path,
        counters,
        metrics,
        weights,
        trees.get(TRAINING),
        state["iterations"],
        len(ranks) + 1,
        parts,
        resized,
    )


def problems_of(path: Path) -> list[str]:
    """The problems of a checkpoint; it is read without keeping it in memory.

    Raises:
        StorageError: the storage refuses for a reason that may pass.
    """
    try:
        files = layout.read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name in {**files, STATE: None}:
        try:
            if name == STATE:
                _state(path, files)
            else:
                _verify(path / name, files[name])
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _verify(path: Path, entry: layout.FileEntry) -> None:
    """Raise unless a file is as it was written; its size and header are checked first, which is quick."""
    layout.check_size(path, entry)
    read_header(path)
    with storage.open_regular(path) as file:
        _compare_hash(path, hashlib.file_digest(file, "sha256").hexdigest(), entry)


def _compare_hash(path: Path, sha256: str, entry: layout.FileEntry) -> None:
    if sha256 != entry.sha256:
        raise CheckpointError(f"{path}: is damaged: its SHA-256 is not that of the manifest; use another checkpoint")


def _read_verified(path: Path, entry: layout.FileEntry) -> safetensors_io.TensorFile:
    # First, since nobody waits for the hash of what cannot be read.
    with storage.at_path(path):
        safetensors_io.check_memory(entry.size)
    _verify(path, entry)
    return safetensors_io.read_tensors(path)


def _state(path: Path, files: Mapping[str, layout.FileEntry]) -> Mapping[str, Any]:
    """The counters and numbers; they must be of the step in the folder's name."""
    file = path / STATE
    if STATE not in files:
        raise CheckpointError(f"{path / layout.MANIFEST}: is damaged (it lists no {STATE}); use another checkpoint")
    layout.check_size(file, files[STATE])
    content = storage.read_small(file, MAX_STATE)
    _compare_hash(file, hashlib.sha256(content).hexdigest(), files[STATE])
    state = layout.parse_state(content, file)
    iteration, step = state["train_state"]["iteration"], layout.step_of(path)
    if step is not None and iteration != step:
        raise CheckpointError(f"{file}: is of iteration {iteration}, and not of {path.name}; use another checkpoint")
    return state
