"""``Brain.fit`` and ``evaluate``: a Brain by itself, over epochs, with a bar for each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.checkpoint import reader, store
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.restore import restore_training
from pipeline.checkpoint.state import FitState
from pipeline.config.schema import Interval
from pipeline.context import Context
from pipeline.data.batch import on_device
from pipeline.data.loader import LimitedLoader, length, set_epoch, without_state
from pipeline.errors import CheckpointError, DataError
from pipeline.run.log import on_terminal
from pipeline.signals import SHUTDOWN
from pipeline.training.brain import NAME, Brain, Stage
from pipeline.training.evaluation import evaluate
from pipeline.training.train_pass import NextDue, TrainPass
from pipeline.training.triggers import NEVER, Trigger
from pipeline.training.updater import Updater, is_plain

# Batches between two movements of the bar.
EVERY = 50


@contextmanager
def pass_progress(title: str, batches: int | None, show: bool | None) -> Iterator[Progress]:
    """A progress bar on stderr until the block ends; ``disable`` says that it is not show.

    Args:
        title: what stands before it.
        batches: how many there will be; None: that isn't known.
        show: whether it is; None: where stderr is a terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    hidden = not (on_terminal() if show is None else show)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        bar.add_task(title, total=batches, loss="")
        yield bar


def test(brain: Brain, loader: Any, show: bool | None) -> float:
    """The mean loss over the samples of a test set; ``show``: as in ``pass_progress``."""
    with pass_progress("test", length(loader), show) as bar:
        batches: Iterable[Any] = on_device(without_state(loader), brain.device)
        if not bar.disable:
            batches = bar.track(batches, task_id=bar.task_ids[0])
        return evaluate(brain, batches, Stage.TEST, {})["loss"]


class Fit:
    """The training of one ``Brain.fit``; with a checkpointer it continues after the last finished epoch.

    Args:
        brain: what is trained; its ``on_fit_start`` has been called.
        train: the training batches.
        valid: those that it is validated on after each epoch; None: it is not.
        show: whether progress is; None: where stderr is a terminal.

    Attributes:
        epochs: the numbers of the epochs that are done, those of earlier fits first.
        last_end: the checkpoint of the last end of an epoch; None where there is none.
        metrics: the numbers of the last epoch.
        measured: the iteration that they are of.

    Raises:
        CheckpointError: the checkpoints are not of this Brain.
    """

    def __init__(self, brain: Brain, train: Iterable[Any], valid: Iterable[Any] | None, show: bool | None) -> None:
        options = brain._run_options
        self.brain, self.options, self.show = brain, options, show
        max_batches = options.debug_batches if options.debug else None
        self.train = LimitedLoader(train, max_batches) if max_batches else train
        self.valid = LimitedLoader(valid, max_batches) if max_batches and valid is not None else valid
        intervals = [Interval(options.ckpt_interval_steps, "iteration")] if options.ckpt_interval_steps > 0 else []
        seconds = round(options.ckpt_interval_minutes * 60)
        intervals += [Interval(seconds, "second")] if seconds > 0 else []
        self.updater, self.counters = Updater(brain), brain._train_state
        # No plugin listens, and no other pass is open.
        self.context = Context()
        self.before_batch: Callable[..., Any] | None = None
        self.after_batch: Callable[..., Any] | None = None
        self.next_due, self.work = NextDue(NEVER, None), list[TrainPass]()
        self.bar: Progress
        schedulers = {str(number): scheduler for number, scheduler in enumerate(brain._optim_schedulers)}
        entry = {"model": brain, "brain": brain, "optim_schedulers": schedulers, "updater": self.updater}
        self.models = {NAME: entry}
        self.metrics: dict[str, float] = {}
        self.measured = 0
        self.epochs: list[int] = []
        self.last_end: Path | None = None
        # Those of a window that an earlier fit was interrupted in.
        brain.modules.zero_grad()
        self.restore()
        self.saving = Trigger(intervals if brain.checkpointer else [], brain._train_state["iteration"])
        self.updater.state.iteration = brain._train_state["iteration"]

    def restore(self) -> None:
        """Restore the checkpoint of the last finished epoch; newer ones are set aside."""
        checkpointer = self.brain.checkpointer
        if checkpointer:
            checkpointer.begin(self.models)
        while checkpointer and (checkpoint := checkpointer.newest_valid()):
            if checkpoint.weights.keys() != {NAME} or (checkpoint.state and not checkpoint.state.fit):
                what = f"{checkpoint.path}: was saved by a run, or by something else that is no fit of a Brain"
                raise CheckpointError(f"{what}; give the Brain a Checkpointer with a folder of its own")
            fit = checkpoint.state.fit if checkpoint.state else None
            if fit is None or fit.over:
                context = Context(model=self.models, train_state=self.brain._train_state)
                restore_training(checkpoint, context, checkpointer.recoverables, checkpointer.initial)
                self._go_on(checkpoint, fit)
                return
            moved = store.quarantine(checkpoint.path)
            message = f"{checkpoint.path}: was saved within an epoch, and training goes on from the last end of one"
            logger.info(f"{message}; it is now {moved.name}")

    def _go_on(self, checkpoint: LoadedCheckpoint, fit: FitState | None) -> None:
        self.last_end = checkpoint.path
        if fit is None:
            what = f"{checkpoint.path}: an earlier version saved weights and counters alone"
            logger.warning(f"{what}; the optimizers begin anew, and no epoch of the counter is skipped")
            return
        self.epochs, self.metrics, self.measured = fit.epochs, fit.metrics, checkpoint.train_state["iteration"]
        logger.info(f"going on after {len(self.epochs)} epochs, from {checkpoint.path}")

    def run(self, epoch_counter: Iterable[int]) -> None:
        """Train the epochs that are not done yet."""
        done, epochs_before = Counter(self.epochs), len(self.epochs)
        for epoch in map(int, () if self._over() else epoch_counter):
            if done[epoch]:
                done[epoch] -= 1
                continue
            self.epoch(epoch)
            self.epochs.append(epoch)
            self.brain._train_state["epoch"] += 1
            self.last_end = self.save()
            if self._over():
                break
        if len(self.epochs) == epochs_before:
            updates = self.brain._train_state["update"]
            logger.info(f"fit: nothing is left to train; {epochs_before} epochs and {updates} updates are done")
        if self.brain.checkpointer:
            self.brain.checkpointer.wait()

    def epoch(self, epoch: int) -> None:
        """Train on everything, then validate."""
        brain, training = self.brain, TrainPass(self, NAME, self.brain, self.updater)
        training.number = epoch
        update = brain.fit_batch if is_plain(brain, self.updater) else training.custom(brain.fit_batch, "fit_batch")
        progress = pass_progress(f"epoch {epoch}", length(self.train), self.show)
        with progress as self.bar, SHUTDOWN.defer(self.next_due.wake), training.resources:
            training.run(update)
        self.metrics = training.numbers
        if self.valid is not None:
            numbers = evaluate(brain, on_device(without_state(self.valid), brain.device), Stage.VALID, {}, epoch=epoch)
            self.metrics |= {f"valid_{name}": value for name, value in numbers.items()}
        self.measured = brain._train_state["iteration"]

    def open(self, training: TrainPass) -> Iterator[Any]:
        """Begin the pass of an epoch."""
        set_epoch(self.train, training.number)
        training.start(training.number, length(self.train) or 0)
        self.work[:] = [training]
        self.next_due.set(self._next_check())
        return training.read(self.train, interruptible=True)

    def next_round(self, training: TrainPass) -> NoReturn:
        """An epoch is one round."""
        raise AssertionError("a fit does not repeat a pass")

    def unwind(self, training: TrainPass) -> None:
        """No other pass is open."""

    def close(self, training: TrainPass) -> None:
        """The pass of an epoch is over."""
        if not training.done:
            what = f"the training set gave no batch in epoch {training.number}"
            raise DataError(f"{what}; check the dataset, or drop_last with few samples")
        training.end(training.number)

    def on_due(self, training: TrainPass) -> bool:
        """Show progress, save or end, whatever is due; whether training goes on."""
        batches, bar, iteration = self.brain._batches_taken, self.bar, self.counters["iteration"]
        if not bar.disable and batches % EVERY == 0:
            bar.update(bar.task_ids[0], completed=batches, loss=f"loss {self.brain._pass_loss.mean():.4f}")
        if self.saving.fires(iteration):
            self.brain._check_divergence()
            self.save(within_epoch=True)
        self.next_due.set(self._next_check())
        return not self._over()

    def _over(self) -> bool:
        """Whether ``optimizer_step_limit`` or ``debug_epochs`` is reached."""
        limit, max_epochs = self.options.optimizer_step_limit, self.options.debug_epochs if self.options.debug else 0
        return (limit is not None and self.brain._train_state["update"] >= limit) or 0 < max_epochs <= len(self.epochs)

    def _next_check(self) -> int:
        # An iteration makes one update at most.
        updates_left = (self.options.optimizer_step_limit or NEVER) - self.brain._train_state["update"]
        until_shown = NEVER if self.bar.disable else EVERY - self.brain._batches_taken % EVERY
        return min(self.saving.next_check(), self.counters["iteration"] + max(1, min(updates_left, until_shown)))

    def save(self, *, within_epoch: bool = False) -> Path | None:
        """Save a checkpoint, if there is a checkpointer; within an epoch, only the weights."""
        brain = self.brain
        if brain.checkpointer is None:
            return None
        fit = FitState(epochs=self.epochs, metrics=self.metrics, over=not within_epoch)
        training = brain.checkpointer.capture({} if within_epoch else self.models, fit=fit).to_tree()
        keep = [self.last_end] if self.last_end else []
        metrics = {NAME: self.metrics}
        iterations = reader.iterations_at(metrics, self.measured)
        return brain.checkpointer.save(self.models, brain._train_state, metrics, training, keep, iterations)
