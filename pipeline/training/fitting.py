"""The training of a Brain by itself, over epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pipeline.config.values import Interval
from pipeline.data.batch import on_device
from pipeline.data.limits import limited
from pipeline.data.loader import set_epoch
from pipeline.errors import DataError
from pipeline.training.average import MOST
from pipeline.training.evaluation import evaluate
from pipeline.training.pass_progress import PassProgress, pass_progress
from pipeline.training.passes import Stage, train_pass
from pipeline.training.triggers import NEVER, Triggers
from pipeline.training.updater import Updater
from pipeline.training.updates import update_of

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
        brain, before = self.brain, self.brain.train_state["iteration"]
        set_epoch(self.train, epoch)
        batches = length(self.train)
        brain.on_stage_start(Stage.TRAIN, epoch)
        brain.begin_pass(batches or 0)
        with pass_progress(f"epoch {epoch}", batches, self.shown) as progress:
            due = train_pass(
                on_device(self.train, brain.device),
                update_of(brain, self.updater, None),
                self.updater.state,
                brain.train_state,
                self._next_look(before, progress),
                lambda iteration: self.on_due(iteration, progress),
            )
        if brain.train_state["iteration"] == before:
            raise DataError(f"the training set gave no batch in epoch {epoch}; check it")
        brain.end_pass()
        loss = brain.train_loss.mean()
        self.metrics = {"loss": loss, **brain.logged.means()}
        brain.on_stage_end(Stage.TRAIN, loss, epoch)
        if self.valid is not None:
            numbers = evaluate(brain, on_device(self.valid, brain.device), Stage.VALID, {}, epoch=epoch)
            self.metrics |= {f"valid_{name}": value for name, value in numbers.items()}
        return not due

    def on_due(self, iteration: int, progress: PassProgress) -> int:
        """Show, save, or end where it is time to; the next iteration to look at, 0 at the end."""
        self.brain.look()
        progress.show(self.brain.step, self.brain.train_loss.mean())
        if self.saving.fires(iteration):
            self.save()
        limit = self.options.optimizer_step_limit
        if limit and self.brain.train_state["update"] >= limit:
            return 0
        return self._next_look(iteration, progress)

    def _next_look(self, iteration: int, progress: PassProgress) -> int:
        limit = self.options.optimizer_step_limit
        updates = max(1, limit - self.brain.train_state["update"]) if limit else NEVER
        return min(self.saving.next_look(), iteration + min(MOST, progress.every or MOST, updates))

    def save(self) -> None:
        """Save a checkpoint of this moment, if there is where to."""
        if self.brain.checkpointer:
            models = {NAME: {"model": self.brain, "brain": self.brain}}
            self.brain.checkpointer.save(models, self.brain.train_state, {NAME: self.metrics})


def length(loader: Any) -> int | None:
    """How many batches a loader gives; None where it does not know."""
    try:
        return len(loader)
    except TypeError:
        return None
