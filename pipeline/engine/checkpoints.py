"""Saves checkpoints while training continues."""

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
from pipeline.config.schema import WARN
from pipeline.context import Context
from pipeline.distributed.strategy import broadcast_tensors, require_equal_weights
from pipeline.engine.best_tracker import BestTracker
from pipeline.engine.trainable import trainables
from pipeline.errors import StorageError
from pipeline.signals import SHUTDOWN, ExitError


class SaveSession(Protocol):
    """Answers the requests for checkpoints of a Brain that trains alone."""

    @property
    def requests(self) -> Collection[object] | None:
        """The requests since the last save; None if they are answered at once."""

    def saving(self, *, end_of_epoch: bool) -> AbstractContextManager[None]:
        """Return a block in which a checkpoint is captured and saved; ``end_of_epoch``: no epoch is running."""

    def save(self, models: Models, train_state: Mapping[str, int], metrics: Mapping[str, Any], *rest: Any) -> Path:
        """Write a checkpoint, as ``CheckpointStore.save`` does, and answer the requests with it."""

    def end_fit(self) -> None:
        """Answer requests at once from now on."""


class Checkpoints:
    """Saves checkpoints while training continues, and notifies the plugins once they are on disk.

    Args:
        store: writes them; asynchronously or not. None if nothing is saved.
        context: the run's, for its plugins.
        best: which of them are the best; None: nothing asks for it.
        on_error: with ``warn``, training continues if a save fails, and the next save tries again.
        session: of a Brain that trains alone; it writes the checkpoints, with what calls have requested. None in a run.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        context: Context,
        best: BestTracker | None,
        on_error: str,
        session: SaveSession | None = None,
    ) -> None:
        self.store, self.context, self.best, self.on_error = store, context, best, on_error
        self._session = session
        self._error: StorageError | None = None
        self._pending = False

    def save(
        self,
        counters: Mapping[str, int],
        metrics: Mapping[str, Any],
        iterations: Iterations,
        /,
        *,
        end_of_epoch: bool = True,
        **own: Any,
    ) -> None:
        """Save a checkpoint of this moment.

        Args:
            counters: ``iteration`` names it.
            metrics: the newest numbers.
            iterations: phase -> name -> the iteration that a number is of.
            end_of_epoch: whether no epoch is running.
            own: the state of the training itself: as ``more`` of ``TrainingState.capture``, over what the context says.
        """
        store, session = self.store, self._session
        if store is None:
            return
        self.wait_for_save()
        models = self.context["model"]
        for name, trainable in trainables(models):
            if trainable.strategy:
                broadcast_tensors(trainable.modules.buffers(), trainable.strategy.world)
                require_equal_weights({name: trainable.modules}, trainable.strategy.world)
        steering = {"stopped": self.context.stop_reason, "requested": sorted(self.context.requests)}
        with session.saving(end_of_epoch=end_of_epoch) if session else nullcontext():
            with gradients_of_training():
                training = store.capture(models, **{**steering, **own}).to_tree()
            if self.best:
                # The best once this one is saved; if the save fails, nothing is removed either.
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
        """Save what is requested from now on at once: training continues from the last checkpoint."""
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
        """Notify the plugins of what came to disk since the last time, without waiting."""
        if not self._pending or self.store is None:
            return
        paths: list[Path] = []
        with self._errors():
            paths = self.store.poll()
        # Outside of the block: a plugin's StorageError is not the save's.
        for path in paths:
            self._error, self._pending = None, False
            if self.best:
                self.best.mark_saved(layout.step_of(path) or 0)
            self.context["hooks"].after_checkpoint_saved(context=self.context, path=path)

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            StorageError: it could not be saved: no later save comes that could succeed.
        """
        self.wait_for_save()
        if self._error:
            raise self._error

    def end_run(self) -> NoReturn:
        """End the run, as was requested, once the last checkpoint is on disk.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested it.
            ExitError: ``is_exit`` has.
        """
        self.finish()
        SHUTDOWN.raise_if_requested()
        raise ExitError

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise a StorageError, or with ``warn`` remember it."""
        try:
            yield
        except StorageError as error:
            if self.on_error != WARN:
                raise
            logger.warning(f"{error}; on_save_error is '{WARN}', so training continues, and the next save tries again")
            self._error = error
