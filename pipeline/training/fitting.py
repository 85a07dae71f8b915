"""The training of a Brain by itself, over epochs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.config.values import Interval
from pipeline.data.batch import on_device
from pipeline.data.limits import limited
from pipeline.training.epoch import train_epoch
from pipeline.training.evaluation import evaluate
from pipeline.training.pass_progress import PassProgress, pass_progress
from pipeline.training.passes import Stage, length
from pipeline.training.triggers import NEVER, Triggers
from pipeline.training.updater import Updater
from pipeline.training.updates import is_plain

if TYPE_CHECKING:
    from pipeline.training.brain import Brain

NAME = "brain"
"""The phase under which a Brain that runs by itself saves and reports."""


class Fit:
    """A Brain trained by itself, over some epochs.

    Args:
        brain: what is trained; its ``on_fit_start`` has been called.
        train: the training batches.
        valid: those that it is validated on after each epoch; None: it is not.
        shown: whether progress is; None: where stderr is a terminal.
    """

    def __init__(self, brain: Brain, train: Iterable[Any], valid: Iterable[Any] | None, shown: bool | None) -> None:
        options = brain.options
        self.brain, self.options, self.shown = brain, options, shown
        most = options.debug_batches if options.debug else None
        self.train = limited(train, most) if most else train
        self.valid = limited(valid, most) if most and valid is not None else valid
        intervals = [Interval(options.ckpt_interval_steps, "iteration")] if options.ckpt_interval_steps > 0 else []
        seconds = round(options.ckpt_interval_minutes * 60)
        intervals += [Interval(seconds, "second")] if seconds > 0 else []
        self.saving = Triggers(intervals if brain.checkpointer else [], brain.train_state["iteration"])
        self.updater = Updater(brain)
        brain.counts_batches = is_plain(brain, self.updater)
        self.updater.state.iteration = brain.train_state["iteration"]
        self.metrics: dict[str, float] = {}

    def run(self, epoch_counter: Iterable[int]) -> None:
        """All epochs."""
        most = self.options.debug_epochs if self.options.debug else 0
        for done, epoch in enumerate(epoch_counter, 1):
            over = self.epoch(epoch)
            self.brain.train_state["epoch"] += 1
            self.save()
            if over or done == most:
                break

    def epoch(self, epoch: int) -> bool:
        """Train on everything, then validate; True when ``optimizer_step_limit`` is reached."""
        brain, iteration = self.brain, self.brain.train_state["iteration"]
        with pass_progress(f"epoch {epoch}", length(self.train), self.shown) as progress:
            on_due = partial(self.on_due, progress)
            self.metrics = train_epoch(
                brain, self.updater, self.train, epoch, self._next_look(iteration, progress), on_due
            )
        if self.valid is not None:
            numbers = evaluate(brain, on_device(self.valid, brain.device), Stage.VALID, {}, epoch=epoch)
            self.metrics |= {f"valid_{name}": value for name, value in numbers.items()}
        return self._over()

    def on_due(self, progress: PassProgress, iteration: int) -> int:
        """Show, save, or end where it is time to; the next iteration to look at, 0 at the end."""
        if progress.every and self.brain.step % progress.every == 0:
            progress.show(self.brain.step, self.brain.train_loss.mean())
        if self.saving.fires(iteration):
            self.brain.look()
            self.save()
        return 0 if self._over() else self._next_look(iteration, progress)

    def _over(self) -> bool:
        limit = self.options.optimizer_step_limit
        return limit is not None and self.brain.train_state["update"] >= limit

    def _next_look(self, iteration: int, progress: PassProgress) -> int:
        # An iteration makes one update at most.
        left = (self.options.optimizer_step_limit or NEVER) - self.brain.train_state["update"]
        shown = progress.every - self.brain.step % progress.every if progress.every else NEVER
        return min(self.saving.next_look(), iteration + max(1, min(left, shown)))

    def save(self) -> None:
        """Save a checkpoint of this moment, if there is where to."""
        if self.brain.checkpointer:
            models = {NAME: {"model": self.brain, "brain": self.brain}}
            self.brain.checkpointer.save(models, self.brain.train_state, {NAME: self.metrics})
