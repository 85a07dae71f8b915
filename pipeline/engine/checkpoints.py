"""Checkpoints: saves checkpoints while training continues."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Protocol

from loguru import logger

from pipeline.checkpoint import layout
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.gradients import gradients_of_training
from pipeline.checkpoint.reader import Iterations
from pipeline.checkpoint.weights import Models
from pipeline.compute.best_tracker import BestTracker
from pipeline.compute.trainable import trainables
from pipeline.config.schema import WARN
from pipeline.context import Context
from pipeline.distributed.strategy import broadcast_tensors, require_equal_weights
from pipeline.errors import StorageError
from pipeline.signals import SHUTDOWN, ExitError


class SaveSession(Protocol):
    """Answers the requests for checkpoints of a Brain that trains without a config."""

    @property
    def requests(self) -> Collection[object] | None:
        """The requests since the last save; None if they are answered at once."""

    def saving(self, *, end_of_epoch: bool) -> AbstractContextManager[None]:
        """Return a context manager in which a checkpoint is captured and saved.

        Args:
            end_of_epoch: whether no epoch is running.
        """

    def save(self, models: Models, train_state: Mapping[str, int], metrics: Mapping[str, Any], *rest: Any) -> Path:
        """Write a checkpoint as ``CheckpointStore.save`` does, and answer the requests with it."""

    def end_fit(self) -> None:
        """Answer requests at once from now on."""


class Checkpoints:
    """Saves checkpoints while training continues, and notifies the plugins once they are on disk.

    Args:
        store: writes the checkpoints, asynchronously or not. None if nothing is saved.
        context: the context of the run, for its plugins.
        best: tracks which checkpoints are the best; None without ``keep_best``.
        on_error: with ``warn``, training continues if a save fails, and the next save tries again.
        session: the session of a Brain that trains without a config; it writes the checkpoints,
            with what calls have requested. None in a run.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        context: Context,
        best: BestTracker | None,
        on_error: str,
        session: SaveSession | None = None,
    ) -> None:
        self.store = store
        self.context = context
        self.best = best
        self.on_error = on_error
        self._session = session
        # The error of the last save; only with `warn`.
        self._error: StorageError | None = None
        # Whether the plugins are still to be notified that the last checkpoint is on disk.
        self._pending = False

    def save(
        self,
        counters: Mapping[str, int],
        metrics: Mapping[str, Any],
        iterations: Iterations,
        /,
        *,
        end_of_epoch: bool = True,
        **more: Any,
    ) -> None:
        """Save a checkpoint of this moment.

        Args:
            counters: the counters of the training; ``iteration`` names the checkpoint.
            metrics: the newest numbers.
            iterations: phase -> name -> the iteration that a number is of.
            end_of_epoch: whether no epoch is running.
            more: the state of the training itself, as ``more`` of ``TrainingState.capture``. It
                takes precedence over ``stopped`` and ``requested`` of the context.
        """
        store = self.store
        session = self._session
        if store is None:
            return
        self.wait_for_save()
        models = self.context["model"]
        for name, trainable in trainables(models):
            if trainable.strategy:
                broadcast_tensors(trainable.modules.buffers(), trainable.strategy.world)
                require_equal_weights({name: trainable.modules}, trainable.strategy.world)
        of_context = {"stopped": self.context.stop_reason, "requested": sorted(self.context.requests)}
        with session.saving(end_of_epoch=end_of_epoch) if session else nullcontext():
            with gradients_of_training():
                training = store.capture(models, **{**of_context, **more}).to_tree()
            if self.best:
                # Protect the checkpoints that are the best once this one is saved. If the save
                # fails, nothing is removed either.
                best = self.best.kept_with(counters["iteration"])
                store.protect(store.path_of(entry.iteration) for entry in best)
            self._pending = True
            write = session.save if session else store.save
            try:
                with self._errors(), gradients_of_training():
                    write(models, counters, metrics, training, iterations)
            finally:
                self.context["hooks"].after_checkpoint_captured(context=self.context)
        self.notify_saved()

    def are_requested(self) -> bool:
        """Return whether calls of SpeechBrain's ``save_checkpoint`` have requested a checkpoint."""
        return self._session is not None and bool(self._session.requests)

    def end(self) -> None:
        """Have requests answered at once from now on.

        Training continues from the last checkpoint.
        """
        if self._session:
            self._session.end_fit()

    def wait_for_save(self) -> None:
        """Wait for the last save, and notify the plugins of it."""
        if self.store is None:
            return
        with self._errors():
            self.store.wait()
        self.notify_saved()
        self._pending = False

    def notify_saved(self) -> None:
        """Notify the plugins of the checkpoints that have come to disk since the last call.

        This does not wait for a save.
        """
        if not self._pending or self.store is None:
            return
        paths: list[Path] = []
        with self._errors():
            paths = self.store.poll()
        # Outside of the block above, because a StorageError of a plugin is not one of the save.
        for path in paths:
            self._error = None
            self._pending = False
            if self.best:
                self.best.mark_saved(layout.step_of(path) or 0)
            self.context["hooks"].after_checkpoint_saved(context=self.context, path=path)

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            StorageError: it could not be saved, and no later save follows that could succeed.
        """
        self.wait_for_save()
        if self._error:
            raise self._error

    def end_run(self) -> NoReturn:
        """End the run as requested, once the last checkpoint is on disk.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end.
            ExitError: ``is_exit`` has requested it.
        """
        self.finish()
        SHUTDOWN.raise_if_requested()
        raise ExitError

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise a StorageError of the block; with ``warn``, log and remember it instead."""
        try:
            yield
        except StorageError as error:
            if self.on_error != WARN:
                raise
            logger.warning(f"{error}; on_save_error is '{WARN}', so training continues, and the next save tries again")
            self._error = error
