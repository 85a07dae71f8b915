"""How one batch trains: by the Brain alone, or by an updater of the user's own with the same reports around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from pipeline.context import Context
from pipeline.discovery import plain_callable
from pipeline.training.average import MOST
from pipeline.training.batch_brain import BatchBrain
from pipeline.training.losses import Losses, named
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.precision import autocast
from pipeline.training.updater import Updater, UpdaterBase


def is_plain(brain: BatchBrain, updater: UpdaterBase) -> bool:
    """Whether an update is what ``Brain.fit_batch`` does, and nothing else."""
    return type(updater) is Updater and updater.brain is brain and type(brain).fit_batch is BatchBrain.fit_batch


def update_of(brain: BatchBrain, updater: UpdaterBase, context: Context | None) -> Callable[[Any], Any]:
    """What trains on one batch; for the plain case nothing stands between it and the Brain."""
    return brain.fit_batch if is_plain(brain, updater) else OwnUpdate(brain, updater, context)


class OwnUpdate:
    """An update of the user's own; its batches, losses and updates are counted, and the plugins are told.

    Args:
        brain: of the phase.
        updater: its ``update`` returns a loss, several by name, or None.
        context: the run's; None: there are no plugins.
    """

    def __init__(self, brain: BatchBrain, updater: UpdaterBase, context: Context | None) -> None:
        self.brain, self.updater, self.context = brain, updater, context
        hooks = context["hooks"] if context is not None else None
        self.before = plain_callable(hooks, "before_batch") if hooks else None
        self.after = plain_callable(hooks, "after_batch") if hooks else None
        self.scheduled = False
        # One of its own: an updater may call the Brain's fit_batch, and the Brain's cannot be entered twice.
        around = autocast(brain._run_options.precision, brain.device, steps=True)
        for each in brain._optim_schedulers:
            each.under_autocast = bool(around)
        self.autocast = around or nullcontext()

    def __call__(self, batch: Any) -> None:
        """Train on a batch."""
        brain = self.brain
        samples = brain._pass_numbers.samples = brain._samples_in(batch)
        brain.step += 1
        brain._batches_taken += 1
        if self.before:
            self.before(context=self.context, batch=batch)
        self.updater.logged = brain._pass_numbers
        gathered, windows = _gathered(brain), _windows(brain)
        for each in brain._optim_schedulers:
            each.epoch, each.batch_samples = brain._train_state["epoch"], samples
        with self.autocast:
            losses = self._losses(self.updater.update(batch))
        if _gathered(brain) == gathered:
            self._count(losses, samples, windows)
        if brain._batches_taken % MOST == 0:
            brain._refuse_divergence()
        brain._train_state["iteration"] += 1
        if self.after:
            self.after(context=self.context, batch=batch, predictions=None, losses=losses)

    def _count(self, losses: Losses, samples: int, windows: list[tuple[int, int]]) -> None:
        """Count a batch that did not go through the Brain's own ``fit_batch``."""
        brain, now = self.brain, _windows(self.brain)
        if losses:
            brain._pass_loss.add(brain._reported_loss(losses), samples)
        self.scheduled |= now != windows
        acted = any(map(_acted, brain._optim_schedulers, windows))
        brain._train_state["samples"] += samples
        # How often an updater without schedulers has updated, it alone knows.
        brain._train_state["update"] += acted if self.scheduled else 1

    def _losses(self, returned: Any) -> Losses:
        """What the updater returned, as losses by name, detached."""
        losses = {} if returned is None else named(returned, f"{type(self.updater).__name__}.update")
        return {name: each.detach() for name, each in losses.items()}


def _gathered(brain: BatchBrain) -> int:
    """How many losses of the pass the Brain has."""
    return brain._pass_loss.batches + len(brain._pass_loss.waiting)


def _windows(brain: BatchBrain) -> list[tuple[int, int]]:
    """Of each scheduler, how many windows are closed, and how many batches are in the open one."""
    return [(each.real_step, each.batches) for each in brain._optim_schedulers]


def _acted(scheduler: OptimScheduler, before: tuple[int, int]) -> bool:
    """Whether a window was closed since, in which the scheduler acted."""
    return any(each % scheduler.step_per_update == 0 for each in range(before[0] + 1, scheduler.real_step + 1))
