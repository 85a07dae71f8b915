"""A checkpoint read from disk, verified."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pipeline.checkpoint import manifest, names, numbers, regular, state_tree, tensor_file
from pipeline.checkpoint.files import CHUNK
from pipeline.checkpoint.layout import MAX_STATE, STATE, SUFFIX, TRAINING
from pipeline.checkpoint.tensor_file import Source, TensorFile
from pipeline.errors import CheckpointError

_READERS = 4

Read = TypeVar("Read")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds.

    Attributes:
        path: its folder.
        train_state: the counters.
        metrics: phase -> name -> number; null where it was not finite.
        iterations: phase -> name -> the iteration that a number is of; its own where an earlier version saved it.
        weights: phase -> name -> tensor.
        training: what else was saved to go on from; None where nothing was, or where it was not read.
    """

    path: Path
    train_state: dict[str, int]
    metrics: dict[str, Any]
    weights: dict[str, dict[str, Tensor]] = field(repr=False)
    training: dict[str, Any] | None = field(repr=False)
    iterations: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)


def read(path: Path, with_training: bool = True) -> Saved:
    """Read a checkpoint; what is returned is what was hashed, whatever happens to the files meanwhile.

    Args:
        path: its folder.
        with_training: False reads and verifies the weights and numbers alone.

    Raises:
        CheckpointError: something in it is missing, or is not what was written.
        StorageError: the storage refuses for a reason that may pass.
    """
    files = manifest.listed(path)
    if STATE not in files:
        raise CheckpointError(f"{path / manifest.NAME}: is damaged (it lists no {STATE}); use another checkpoint")
    state = _state(path, files[STATE])
    chosen = [name for name in files if name.endswith(SUFFIX) and (with_training or name != TRAINING)]
    # Reading and hashing both let other threads run.
    with ThreadPoolExecutor(_READERS) as pool:
        contents = pool.map(lambda name: _verified(path / name, files[name], tensor_file.read), chosen)
        tensors = dict(zip(chosen, contents, strict=True))
    training = tensors.pop(TRAINING, None)
    weights = {
        name.removesuffix(SUFFIX): _located(path / name, partial(state_tree.join, each.tensors, each.metadata))
        for name, each in tensors.items()
    }
    restored = (
        _located(path / TRAINING, lambda: state_tree.restore(training.tensors, training.metadata)) if training else None
    )
    counters, metrics = state["train_state"], state["metrics"]
    iterations = state.get("iterations", numbers.of_one(metrics, counters["iteration"]))
    return Saved(path, counters, metrics, weights, restored, iterations)


def problems(path: Path) -> list[str]:
    """All that is wrong with a checkpoint; nothing of it is kept in memory.

    Raises:
        StorageError: the storage refuses for a reason that may pass.
    """
    try:
        files = manifest.entries(path)
    except CheckpointError as error:
        return [str(error)]
    found = (
        [] if STATE in files else [f"{path / manifest.NAME}: is damaged (it lists no {STATE}); use another checkpoint"]
    )
    for name, entry in files.items():
        try:
            manifest.check_size(path / name, entry)
            if name == STATE:
                _state(path, entry)
            else:
                _verified(path / name, entry, _hash)
        except CheckpointError as error:
            found.append(str(error))
    return found


def _verified(path: Path, entry: manifest.Listed, reader: Callable[[Any, int], TensorFile]) -> TensorFile:
    """What a reader makes of a file that is as it was written."""
    with regular.opened(path) as file:
        content = _located(path, lambda: reader(file, entry.size))
    if content.sha256 != entry.sha256:
        raise CheckpointError(
            f"{path}: is damaged: its SHA-256 is not the one that was written; use another checkpoint"
        )
    return content


def _hash(file: Any, size: int) -> TensorFile:
    """A file's hash alone, and a look at its header."""
    source = Source(file, size)
    tensor_file.read_header(source)
    chunk = memoryview(bytearray(CHUNK))
    while source.left:
        source.fill(chunk[: min(CHUNK, source.left)])
    return TensorFile({}, {}, source.digest.hexdigest())


def _state(path: Path, entry: manifest.Listed) -> Mapping[str, Any]:
    """The counters and numbers, which must be those of the step that the folder is named after."""
    file = path / STATE
    content = regular.content_of(file, MAX_STATE)
    if manifest.of(content) != entry:
        raise CheckpointError(
            f"{file}: is damaged: its SHA-256 is not the one that was written; use another checkpoint"
        )
    try:
        state: Mapping[str, Any] = json.loads(content)
        iteration, step = state["train_state"]["iteration"], names.step_of(path)
        state["metrics"].keys()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: makes no sense ({error}); use another checkpoint") from error
    if step is not None and iteration != step:
        raise CheckpointError(f"{file}: is of iteration {iteration}, and not of {path.name}; use another checkpoint")
    return state


def _located(path: Path, make: Callable[[], Read]) -> Read:
    """Say of what is wrong where it is."""
    try:
        return make()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
