"""The checkpoints of a training: saved while it goes on, told of once they are on disk, and the best of them kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.checkpoint import names
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.numbers import Iterations
from pipeline.context import Context
from pipeline.errors import StorageError
from pipeline.training.best import Best

WARN = "warn"


class Checkpoints:
    """Saves, and answers for what it has saved.

    Args:
        checkpointer: writes; asynchronously or not.
        context: whose plugins are told.
        best: which of them are the best; None: nobody asks.
        on_error: ``warn`` goes on where the storage refuses, and tries again with the next one.
    """

    def __init__(self, checkpointer: Checkpointer, context: Context, best: Best | None, on_error: str) -> None:
        self.checkpointer = checkpointer
        self.context = context
        self.best = best
        self.on_error = on_error
        self._refused: StorageError | None = None
        self._untold = False

    def save(
        self,
        counters: Mapping[str, int],
        metrics: Mapping[str, Any],
        training: Mapping[str, Any],
        iterations: Iterations,
    ) -> None:
        """Save a checkpoint of this moment; ``settle`` first."""
        if self.best:
            # What is the best once it is saved: if it is not, nothing is removed either.
            best = self.best.kept_with(counters["iteration"])
            self.checkpointer.protect(self.checkpointer.path_of(each.iteration) for each in best)
        self._untold = True
        with self._tolerant():
            self.checkpointer.save(self.context["model"], counters, metrics, training, iterations=iterations)
        self.tell()

    def settle(self) -> None:
        """Wait for the one before, and tell of it."""
        with self._tolerant():
            self.checkpointer.wait()
        self.tell()
        self._untold = False

    def tell(self) -> None:
        """Tell the plugins of what is on disk since the last time, without waiting for it."""
        if not self._untold:
            return
        committed: list[Path] = []
        with self._tolerant():
            committed = self.checkpointer.poll()
        # Outside: what a plugin is refused is not the save's.
        for path in committed:
            self._refused, self._untold = None, False
            if self.best:
                self.best.saved(names.step_of(path) or 0)
            self.context["hooks"].after_checkpoint_saved(context=self.context, path=path)

    def finish(self) -> None:
        """Wait until the last one is on disk.

        Raises:
            StorageError: it is not: where nothing comes after it, a warning would not do.
        """
        self.settle()
        if self._refused:
            raise self._refused

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Take it that the storage refuses, if that is wanted."""
        try:
            yield
        except StorageError as error:
            if self.on_error != WARN:
                raise
            logger.warning(f"{error}; on_save_error is '{WARN}', so training goes on, and the next save tries again")
            self._refused = error
