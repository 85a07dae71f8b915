"""Checkpoints described and exported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint import layout, pytree, reader, safetensors_io, storage
from pipeline.checkpoint.header import Entry, Header, read_header
from pipeline.checkpoint.layout import SUFFIX, TRAINING, is_weights
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.errors import CheckpointError, ConfigError, one_of

from ..shared.checkpoint_listing import describe_checkpoint


def describe(path: Path) -> dict[str, Any]:
    """Describe a checkpoint: counters, numbers, files, weights with types and shapes, and its training state.

    Raises:
        CheckpointError: the manifest, a size or a header is damaged; nothing else is verified.
        StorageError: the storage refuses for a reason that may pass.
    """
    files = layout.listed_files(path)
    described = describe_checkpoint(path)
    if described.problem:
        raise CheckpointError(described.problem)
    headers = {name: read_header(path / name) for name in files if name.endswith(SUFFIX)}
    weights = {name.removesuffix(SUFFIX): _tensors(path / name, headers[name]) for name in filter(is_weights, headers)}
    return {
        "checkpoint": str(path),
        "counters": described.counters,
        "metrics": described.metrics,
        "iterations": described.iterations,
        "bytes": {name: entry.size for name, entry in files.items()},
        "weights": weights,
        "training": _training(path / TRAINING, headers[TRAINING]) if TRAINING in headers else None,
    }


def _tensors(path: Path, header: Header) -> dict[str, str]:
    """Name -> ``F32 [64, 3]``."""
    with storage.at_path(path):
        pairs = safetensors_io.complex_names(header.metadata)
    return {
        name: f"C128 {list(entry.shape[:-1])}" if name in pairs else f"{entry.dtype} {list(entry.shape)}"
        for name, entry in sorted(header.entries.items())
    }


def _training(path: Path, header: Header) -> dict[str, Any]:
    """The parts of the training state, with their amounts."""
    # Where the tensors would be, there are the entries of the header.
    entries: dict[str, Any] = dict(header.entries)
    with storage.at_path(path):
        state = pytree.unflatten(entries, header.metadata)
    try:
        schedulers = {
            phase: {name: f"{one['class']}, {_amount(one['state'])}" for name, one in some.items()}
            for phase, some in state.get("optim_schedulers", {}).items()
        }
        return {**{name: _part(part) for name, part in state.items()}, "optim_schedulers": schedulers}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is no training state ({error}); use another checkpoint") from error


def _part(value: Any) -> Any:
    return {str(name): _amount(item) for name, item in value.items()} if isinstance(value, Mapping) else _amount(value)


def _amount(value: Any) -> str:
    """``2 tensors, 14 values``."""
    leaves = list(_leaves(value))
    tensors = sum(isinstance(leaf, Entry) for leaf in leaves)
    counts = {"tensor": tensors, "value": len(leaves) - tensors}
    return ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count) or "nothing"


def _leaves(value: Any) -> Iterator[Any]:
    """The values of a nested state."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple) and not isinstance(value, Entry):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def export(checkpoint: Path, target: Path, phase: str | None = None, *, force: bool = False) -> list[str]:
    """Verify a checkpoint and write its weights, durably.

    Args:
        checkpoint: its folder.
        target: the file, ``….safetensors``; the folders above it are made.
        phase: whose weights; None: of every phase, by the names ``phase.name`` where there are several.
        force: whether a file that is there is replaced.

    Returns:
        The names of the tensors.

    Raises:
        ConfigError: the target is there, or is called otherwise.
        CheckpointError: the checkpoint is damaged, or has no such phase.
        StorageError: the storage refuses; what was there is there still.
    """
    if target.suffix != SUFFIX:
        what = "the weights are written as safetensors alone"
        raise ConfigError(f"{target}: {what}; name a file that ends with {SUFFIX}")
    if os.path.lexists(target) and not force:
        raise ConfigError(f"{target}: is there already; name another file, or replace it with --force")
    loaded = reader.read_checkpoint(checkpoint, with_training=False)
    tensors = _tensors_of(loaded, phase)
    # "format" is what others ask for; the step tells whence the weights are.
    metadata = {"format": "pt", "step": str(loaded.train_state["iteration"])}
    joined = phase is None and len(loaded.weights) > 1
    phases = loaded.weights if phase is None else [phase]
    resized = [f"{each}.{name}" if joined else name for each in phases for name in loaded.resized.get(each, ())]
    if resized:
        metadata[safetensors_io.RESIZED] = json.dumps(resized)
    content = safetensors_io.encode_tensors(*pytree.split(tensors, metadata))
    storage.replace_durably(target, content, "use another path")
    return list(tensors)


def _tensors_of(loaded: LoadedCheckpoint, phase: str | None) -> dict[str, Tensor]:
    """The tensors by their names in the exported file."""
    if phase is not None and phase not in loaded.weights:
        raise CheckpointError(f"{loaded.path}: has no weights of phase '{phase}'{one_of(phase, loaded.weights)}")
    if phase is None and len(loaded.weights) > 1:
        return {f"{name}.{key}": value for name, some in loaded.weights.items() for key, value in some.items()}
    return loaded.weights[phase] if phase is not None else next(iter(loaded.weights.values()), {})
