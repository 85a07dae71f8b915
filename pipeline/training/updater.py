"""How one batch trains the model, with counters. Names are PaddleSpeech's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint.pytree import load_state, save_state
from pipeline.context import Context
from pipeline.errors import CheckpointError
from pipeline.training.batch_brain import BatchBrain
from pipeline.training.meters import MOST, Meters
from pipeline.training.optim_scheduler import Losses, autocast, losses_by_name
from pipeline.user_code.plugins import hook_or_none


def is_plain(brain: BatchBrain, updater: UpdaterBase) -> bool:
    """Whether an update is what ``Brain.fit_batch`` does, and nothing else."""
    return type(updater) is Updater and updater.brain is brain and type(brain).fit_batch is BatchBrain.fit_batch


def make_update(brain: BatchBrain, updater: UpdaterBase, context: Context | None) -> Callable[[Any], Any]:
    """The function that trains on one batch; in the plain case a method of the Brain itself."""
    return brain.fit_batch if is_plain(brain, updater) else CustomUpdate(brain, updater, context)


class CustomUpdate:
    """An update by the user's updater; it counts batches, losses and updates, and calls the plugins.

    Args:
        brain: of the phase.
        updater: its ``update`` returns a loss, several by name, or None.
        context: the run's; None: there are no plugins.
    """

    def __init__(self, brain: BatchBrain, updater: UpdaterBase, context: Context | None) -> None:
        self.brain, self.updater, self.context = brain, updater, context
        self.before = hook_or_none(context["hooks"], "before_batch") if context is not None else None
        self.after = hook_or_none(context["hooks"], "after_batch") if context is not None else None
        self.scheduled = False
        # Not the Brain's autocast: the updater may call fit_batch, which enters that one, and it cannot be entered twice.
        around = autocast(brain._run_options.precision, brain.device, steps=True)
        for scheduler in brain._optim_schedulers:
            scheduler.under_autocast = bool(around)
        self.autocast = around or nullcontext()

    def __call__(self, batch: Any) -> None:
        """Train on a batch."""
        brain = self.brain
        samples = brain._pass_numbers.samples = brain._samples_of_batch(batch)
        brain.step += 1
        brain._batches_taken += 1
        if self.before:
            self.before(context=self.context, batch=batch)
        self.updater.logged = brain._pass_numbers
        gathered, windows = _losses_so_far(brain), _windows(brain)
        for scheduler in brain._optim_schedulers:
            scheduler.epoch, scheduler.batch_samples = brain._train_state["epoch"], samples
        with self.autocast:
            returned = self.updater.update(batch)
        losses = {} if returned is None else losses_by_name(returned, f"{type(self.updater).__name__}.update")
        losses = {name: loss.detach() for name, loss in losses.items()}
        if _losses_so_far(brain) == gathered:
            self._count(losses, samples, windows)
        if brain._batches_taken % MOST == 0:
            brain._check_divergence()
        brain._train_state["iteration"] += 1
        if self.after:
            self.after(context=self.context, batch=batch, predictions=None, losses=losses)

    def _count(self, losses: Losses, samples: int, windows: list[tuple[int, int]]) -> None:
        """Count a batch that did not go through the Brain's own ``fit_batch``."""
        brain, now = self.brain, _windows(self.brain)
        if losses:
            brain._pass_loss.add(brain._reported_loss(losses), samples)
        self.scheduled |= now != windows
        acted = any(
            window % scheduler.step_per_update == 0
            for scheduler, (closed, _) in zip(brain._optim_schedulers, windows, strict=True)
            for window in range(closed + 1, scheduler.real_step + 1)
        )
        brain._train_state["samples"] += samples
        # Of an updater without schedulers, each batch counts as one update.
        brain._train_state["update"] += acted if self.scheduled else 1


def _losses_so_far(brain: BatchBrain) -> int:
    """How many losses of the pass the Brain has."""
    return brain._pass_loss.batches + len(brain._pass_loss.waiting)


def _windows(brain: BatchBrain) -> list[tuple[int, int]]:
    """Of each scheduler, how many windows are closed, and how many batches are in the open one."""
    return [(scheduler.real_step, scheduler.batches) for scheduler in brain._optim_schedulers]


@dataclass
class UpdaterState:
    """How many iterations and epochs are done."""

    iteration: int = 0
    epoch: int = 0


class UpdaterBase:
    """Trains a model on one batch at a time; a subclass defines ``update``.

    The loop assigns ``state`` after each update, so an updater that counts itself is not counted twice.

    Attributes:
        state: the counters.
        logged: what ``log`` gathered in this pass; in a run, together with what the Brain logs.
    """

    def __init__(self, init_state: UpdaterState | None = None) -> None:
        self.state = init_state or UpdaterState()
        self.logged = Meters()

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Report a number with those of the pass, as ``Brain.log`` does."""
        self.logged.log(name, value, batch_size)

    def update(self, batch: Any) -> Any:
        """Train on one batch.

        Returns:
            Its loss, a scalar; or several by name, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update(batch)")

    def state_dict(self) -> dict[str, Any]:
        """The counters; a subclass adds what else it needs, such as the states of models and optimizers."""
        return {"epoch": self.state.epoch, "iteration": self.state.iteration}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counters; a subclass restores what it has added.

        Raises:
            CheckpointError: a counter is missing, or no whole number.
        """
        kind = type(self).__name__
        for name in ("epoch", "iteration"):
            value = state_dict.get(name)
            if type(value) is not int or value < 0:
                what = f"'{name}' is {value!r}" if name in state_dict else f"there is no '{name}'"
                raise CheckpointError(f"{kind}.set_state_dict: {what}; give it what state_dict() of a {kind} returned")
        self.state.epoch = state_dict["epoch"]
        self.state.iteration = state_dict["iteration"]

    def save(self, path: str | Path) -> None:
        """Write ``state_dict()`` to a file, without pickle.

        Raises:
            CheckpointError: it holds something that such a file cannot.
            StorageError: the storage refuses.
        """
        save_state(path, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Restore the state that ``save`` wrote.

        Raises:
            CheckpointError: there is no such file, it is damaged or something else, or it is no state of this updater.
        """
        state = load_state(path)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {type(state).__name__}, not the state of an updater; use another")
        self.set_state_dict(state)


class Updater(UpdaterBase):
    """The default: what the Brain does with a batch."""

    def __init__(self, brain: BatchBrain) -> None:
        super().__init__()
        self.brain = brain

    def update(self, batch: Any) -> Tensor:
        """Train on one batch, and return its loss, detached."""
        return self.brain.fit_batch(batch)
