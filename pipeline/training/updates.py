"""How one batch trains: by the Brain alone, or by an updater of the user's own with the same reports around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipeline.context import Context
from pipeline.data.batch import shape_of, uncountable
from pipeline.discovery import plain_callable
from pipeline.errors import DataError
from pipeline.training.average import MOST
from pipeline.training.batch_brain import BatchBrain
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.updater import Updater, UpdaterBase

if TYPE_CHECKING:
    from pipeline.training.brain import Brain


def is_plain(brain: Brain, updater: UpdaterBase) -> bool:
    """Whether an update is what ``Brain.fit_batch`` does, and nothing else."""
    return type(updater) is Updater and updater.brain is brain and type(brain).fit_batch is BatchBrain.fit_batch


def update_of(brain: Brain, updater: UpdaterBase, context: Context | None) -> Callable[[Any], Any]:
    """What trains on one batch; for the plain case nothing stands between it and the Brain."""
    return brain.fit_batch if is_plain(brain, updater) else OwnUpdate(brain, updater, context)


class OwnUpdate:
    """An update of the user's own; its loss is gathered, its updates are counted, and the plugins are told.

    Args:
        brain: of the phase.
        updater: its ``update`` returns a loss, several by name, or None.
        context: the run's; None: there are no plugins.
    """

    def __init__(self, brain: Brain, updater: UpdaterBase, context: Context | None) -> None:
        self.brain, self.updater, self.context = brain, updater, context
        hooks = context["hooks"] if context is not None else None
        self.before = plain_callable(hooks, "before_batch") if hooks else None
        self.after = plain_callable(hooks, "after_batch") if hooks else None

    def __call__(self, batch: Any) -> None:
        """Train on a batch."""
        brain = self.brain
        samples = brain.logged.samples = brain.count_samples(batch) or uncountable(batch)
        if self.before:
            self.before(context=self.context, batch=batch)
        self.updater.logged = brain.logged
        step, windows = brain.step, self._windows()
        returned = self.updater.update(batch)
        losses = self._named(returned)
        if brain.step == step:
            # The Brain has not seen the batch, so nobody has counted it.
            self._count(losses, samples, windows)
        if self.after:
            self.after(context=self.context, batch=batch, predictions=None, losses=losses)

    def _count(self, losses: dict[str, Tensor], samples: int, windows: list[int]) -> None:
        brain = self.brain
        brain.step += 1
        if losses:
            brain.train_loss.add(brain.total(losses), samples)
        schedulers, now = brain.optim_schedulers, self._windows()
        closed = any(_acted(each, before) for each, before in zip(schedulers, windows, strict=True))
        # How often an updater without schedulers has updated, it alone knows.
        brain.train_state["update"] += closed if schedulers and sum(now) else 1
        if brain.step % MOST == 0:
            brain.look()

    def _windows(self) -> list[int]:
        return [each.real_step for each in self.brain.optim_schedulers]

    def _named(self, returned: Any) -> dict[str, Tensor]:
        """What the updater returned, as losses by name, detached."""
        named = {"loss": returned} if isinstance(returned, Tensor) else {} if returned is None else returned
        if not isinstance(named, dict) or not all(
            isinstance(each, Tensor) and not each.ndim for each in named.values()
        ):
            raise DataError(
                f"{type(self.updater).__name__}.update returned {shape_of(returned)}; return a scalar tensor, a dict of "
                "them, or None"
            )
        return {name: each.detach() for name, each in named.items()}


def _acted(scheduler: OptimScheduler, before: int) -> bool:
    """Whether a window was closed since, in which the scheduler acted."""
    return any(each % scheduler.step_per_update == 0 for each in range(before + 1, scheduler.real_step + 1))
