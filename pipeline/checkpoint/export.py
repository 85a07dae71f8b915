"""The weights of a checkpoint alone, as one safetensors file that any program reads."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from pipeline.checkpoint import files, saved, state_tree, tensors
from pipeline.checkpoint.layout import SUFFIX
from pipeline.checkpoint.saved import Saved
from pipeline.errors import CheckpointError, ConfigError, StorageError, one_of


def export(checkpoint: Path, target: Path, phase: str | None = None, *, force: bool = False) -> list[str]:
    """Verify a checkpoint and write its weights, and wait until the disk has them.

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
        raise ConfigError(
            f"{target}: the weights are written as safetensors alone; name a file that ends with {SUFFIX}"
        )
    if os.path.lexists(target) and not force:
        raise ConfigError(f"{target}: is there already; name another file, or replace it with --force")
    found = saved.read(checkpoint, with_training=False)
    chosen = _chosen(found, phase)
    # "format" is what others ask for; the step tells whence the weights are.
    metadata = {"format": "pt", "step": str(found.train_state["iteration"])}
    try:
        files.replace(target, b"".join(tensors.pack(*state_tree.split(chosen, metadata)).parts()))
    except OSError as error:
        raise StorageError(
            f"{target}: cannot be saved: {error.strerror}; free or repair the storage, or use another path"
        ) from error
    return list(chosen)


def _chosen(found: Saved, phase: str | None) -> dict[str, Tensor]:
    """The tensors by the names that they get."""
    if phase is not None and phase not in found.weights:
        raise CheckpointError(f"{found.path}: has no weights of phase '{phase}'{one_of(phase, found.weights)}")
    if phase is None and len(found.weights) > 1:
        return {f"{name}.{each}": value for name, some in found.weights.items() for each, value in some.items()}
    return found.weights[phase] if phase is not None else next(iter(found.weights.values()), {})
