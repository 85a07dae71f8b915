"""RunCheckpointer: what stages and plugins see of the checkpoints of their runner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.state import Recoverable
from pipeline.checkpoint.weights import Models


class RunCheckpointer:
    """The checkpoints of one runner: ``context["checkpointer"]``.

    Stages and plugins save with ``context.save()``, which adds what a resume needs.

    Args:
        store: saves and restores them.

    Attributes:
        store: the same, for the code that trains.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store

    @property
    def recoverables(self) -> dict[str, Any]:
        """Name -> object whose state each checkpoint keeps."""
        return self.store.recoverables

    def add_recoverable(self, name: str, recoverable: Recoverable) -> None:
        """Keep the state of an object in each checkpoint, and restore it when the run is resumed.

        Raises:
            ConfigError: another has the name.
        """
        self.store.add_recoverable(name, recoverable)

    def all(self) -> list[Path]:
        """The checkpoints, by step; waits for one that is being saved."""
        return self.store.all()

    def newest(self) -> Path | None:
        """The checkpoint of the highest step; None if there is none."""
        return self.store.newest()

    def best(self, metric: str, mode: str) -> Path | None:
        """The checkpoint with the highest (``mode`` max) or lowest (min) number of a name; the newest of equals.

        Only numbers of its own iteration count, and not those that a later checkpoint shows beside its weights.

        Raises:
            CheckpointError: there are checkpoints, and none knows the number as its own.
        """
        return self.store.best(metric, mode)

    def load_weights(self, path: str | Path, models: Models) -> None:
        """Load the weights of a checkpoint into every phase, or those of a file into the only phase.

        A phase takes the weights saved under its name; where both sides have just one, the names may differ.

        Args:
            path: a checkpoint, a ``.safetensors`` file, or a ``.pt``, ``.pth`` or ``.bin`` file that ``torch.save`` wrote.
            models: phase -> what the network stage built for it.

        Raises:
            CheckpointError: it is missing or damaged, or does not fit the models.
        """
        self.store.load_weights(path, models)

    def save(self, models: Models, train_state: Mapping[str, int], *rest: Any, **told: Any) -> Path:
        """Write a checkpoint and return its path, as ``CheckpointStore.save``."""
        return self.store.save(models, train_state, *rest, **told)
