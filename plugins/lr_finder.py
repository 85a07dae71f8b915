"""Tries rising learning rates before the first step of a training, suggests one, and puts the run back as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loguru import logger
from torch import nn
from torch.nn.parameter import is_lazy

from pipeline import hookimpl, hookspecs
from pipeline.checkpoint.initial_models import InitialModels
from pipeline.checkpoint.random_state import restore_states, states_of
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.restore import restore_training
from pipeline.checkpoint.state import TrainingState
from pipeline.checkpoint.storage import finite, write_json
from pipeline.checkpoint.weights import unique_modules
from pipeline.compute.trainable import trainable_of
from pipeline.context import Context, Phase
from pipeline.data.generators import generators_of_phases
from pipeline.engine.client import Client
from pipeline.engine.phase import pass_loader, phase_errors, phase_of
from pipeline.engine.train_pass import TrainPass
from pipeline.errors import ConfigError, DivergedError, one_of
from pipeline.signals import SHUTDOWN

# How much of the smoothed loss stays with each further one.
SMOOTHING = 0.9

ALL = "all rates were tried"

BARS = "▁▂▃▄▅▆▇█"


class LrFinder:
    """Trains a phase for some steps, whose learning rates rise evenly in their logarithm, and suggests one of them.

    The suggestion is the rate around which the smoothed loss falls most. It is logged, with the curve; ``lr_finder.json``
    in the runner's folder has rates, losses and smoothed losses (under another name of the plugin, that one's). The
    search ends early where the loss is no number, or rises far above its best.

    It comes before the first epoch, or the first pass where a loop has no epochs, and never in a run that is resumed.
    Each step is an update of the phase's updater; all its optimizers get the rate, and no schedule is asked. Fewer
    batches than steps come again. Then everything is as it was: what a checkpoint keeps, the attributes of Brain,
    updater, optimizers and modules, the generators, and the counters. No hook of another plugin is called. (What a Brain
    of one's own changes in place in a list or dict of its own is not put back, nor what a dataset without workers counts.)

    Args:
        start: the first learning rate.
        end: the last one.
        steps: how many are tried.
        diverges: the search ends once the smoothed loss is so many times its best (below zero: as far above it).
        phase: which phase; the first that trains if it is left out.
        stop: whether the training ends with the search, before its first step.

    Raises:
        ConfigError: an argument is out of range.
    """

    # The steps are those of all processes.
    every_rank = True
    plugin_name = "lr_finder"

    def __init__(
        self,
        start: float = 1e-7,
        end: float = 10.0,
        steps: int = 100,
        diverges: float = 4.0,
        phase: str | None = None,
        stop: bool = False,
    ) -> None:
        if not 0 < start < end:
            raise ConfigError(f"lr_finder: start is {start} and end {end}; write 0 < start < end")
        if steps < 2:
            raise ConfigError(f"lr_finder: steps is {steps}; write 2 or more")
        if not diverges > 1:
            raise ConfigError(f"lr_finder: diverges is {diverges}; write a number above 1")
        self.rates = [start * (end / start) ** (step / (steps - 1)) for step in range(steps)]
        self.diverges, self.phase, self.stop, self.done = diverges, phase, stop, False

    @hookimpl
    def before_stage(self, name: str, context: Context) -> None:
        """Refuse a phase that the runner does not have.

        Raises:
            ConfigError: it has no such phase.
        """
        phases = [phase["name"] for phase in context["phases"]]
        if name == "runner" and self.phase not in (None, *phases):
            what = f"{self.plugin_name}: phase is '{self.phase}', and {context['runner_name']} has none such"
            raise ConfigError(f"{what}{one_of(str(self.phase), phases)}")

    @hookimpl
    def on_resume(self) -> None:
        """Leave out the search: the run is past its first step."""
        self.done = True

    @hookimpl(tryfirst=True)
    def before_epoch(self, context: Context) -> None:
        """Search before the first epoch."""
        if context["phases"]:
            self._search_once(context, self.phase or context["phases"][0]["name"])

    @hookimpl(tryfirst=True)
    def before_pass(self, context: Context, phase: str) -> None:
        """Search before the first pass, where a loop has no epochs."""
        if self.phase in (None, phase):
            self._search_once(context, phase)

    def _search_once(self, context: Context, name: str) -> None:
        if self.done:
            return
        self.done = True
        curve = search(context, phase_of(name, context), self.rates, self.diverges)
        rate = curve.suggestion()
        found = "no learning rate: the loss never falls" if rate is None else f"the learning rate {rate:.2g}"
        logger.info(f"{self.plugin_name} suggests {found} (phase '{name}', {curve.end})\n{curve}")
        if context["rank"] == 0:
            folder: Path = context["run_dir"] / context["runner_name"]
            numbers = {"phase": name, "suggestion": rate, "end": curve.end, "learning_rates": curve.rates}
            write_json(
                folder / f"{self.plugin_name}.json",
                finite({**numbers, "losses": curve.losses, "smoothed": curve.smoothed}),
            )
        if self.stop:
            context.stop(f"{self.plugin_name} has suggested {found}")


class Curve:
    """Learning rates, the losses of their steps, and these smoothed.

    Attributes:
        end: why there are no more.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self.end = ALL
        self._mean = 0.0

    def add(self, rate: float, loss: float) -> None:
        """Add a step."""
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        self.rates.append(rate)
        self.losses.append(loss)
        # The mean began with 0, which this takes out.
        self.smoothed.append(self._mean / (1 - SMOOTHING ** len(self.rates)))

    def suggestion(self) -> float | None:
        """The rate around which the smoothed loss falls most, over a fifth of the curve; None: around none."""
        reach = max(1, len(self.rates) // 10)
        places = range(reach, len(self.rates) - reach)
        falls = {place: self.smoothed[place - reach] - self.smoothed[place + reach] for place in places}
        best = max(falls, key=lambda place: falls[place], default=0)
        return self.rates[best] if falls.get(best, 0) > 0 else None

    def __str__(self) -> str:
        """A line of bars: the smoothed losses, from the lowest to that of the first rates."""
        if not self.rates:
            return "no step has a loss that is a number"
        low, high = min(self.smoothed), max(self.smoothed[: 1 + len(self.smoothed) // 2])
        heights = [min(1.0, (loss - low) / (high - low or 1)) for loss in self.smoothed]
        bars = "".join(BARS[round(height * (len(BARS) - 1))] for height in heights)
        return f"{self.rates[0]:.1e} {bars} {self.rates[-1]:.1e}, smoothed loss {low:.4g} to {high:.4g}"


class RangeTest:
    """The engine of one pass in which each update has another rate.

    Args:
        context: of the run; its counters are put back by whoever has called this.
        phase: what is trained.
        rates: the rates, in order.
        diverges: as in ``LrFinder``.
    """

    def __init__(self, context: Context, phase: Phase, rates: list[float], diverges: float) -> None:
        self.context = context
        self.counters: dict[str, int] = context["train_state"]
        self.active_passes: list[TrainPass] = []
        # Plugins do not listen.
        self.before_batch: Callable[..., Any] | None = None
        self.after_batch: Callable[..., Any] | None = None
        self.loader = loader_of(context, phase)
        self.rates = rates
        self.diverges = diverges
        self.curve = Curve()
        self.updated = False
        # Iterations since the last update, and how many make plain that none will come.
        self.waited = 0
        schedulers = phase.optim_schedulers.values()
        self.patience = 10 * max((own.accum_grad * own.step_per_update for own in schedulers), default=1)
        # After each iteration.
        self.next_check = 0
        for scheduler in schedulers:
            # Over those of the class and of the run: no schedule, and no hook of a plugin.
            vars(scheduler).update(constant=True, before_backward=None, after_backward=None, after_update=None)
            scheduler.before_update = self.set_rate

    def set_rate(self, optim_scheduler: Any) -> None:
        """Set the rate of an update."""
        optim_scheduler.set_rate(self.rates[len(self.curve.rates)])
        self.updated = True

    def generators(self) -> dict[str, Any]:
        """Return the random generators of the Brains, the updaters and the data, by name."""
        return Client(self.context).generators()

    def finish_inner_batches(self, training: TrainPass) -> None:
        """Do nothing: no other pass is started within a batch."""

    def open(self, training: TrainPass) -> Iterator[Any]:
        """Begin the pass."""
        return training.read(self.loader, interruptible=False)

    def start(self, training: TrainPass, batches: int) -> None:
        """Prepare the Brain, which is bound to the run, and call no plugin."""
        training.start(training.number, batches)

    def report_length(self, training: TrainPass, batches: int) -> None:
        """Leave it to the training to warn of a wrong length."""

    def next_round(self, training: TrainPass) -> Iterator[Any]:
        """The same batches again."""
        training.begin_round()
        return training.read(self.loader, interruptible=False)

    def run_scheduled(self, training: TrainPass) -> bool:
        """Take the loss of an update, and return whether the search continues.

        Raises:
            StoppedError, KeyboardInterrupt: a signal asks the run to end, which has not begun.
        """
        SHUTDOWN.raise_if_requested()
        if not self.updated:
            self.waited += 1
            self.curve.end = f"{self.waited} batches made no update through an OptimScheduler"
            return self.waited < self.patience
        self.updated, self.waited, self.curve.end = False, 0, ALL
        # All processes search, by the losses of all.
        training.trainable.gather()
        loss = training.trainable.numbers.loss.recent()
        if not math.isfinite(loss):
            self.curve.end = f"the loss is no number at {self.rates[len(self.curve.rates)]:.2g}"
            return False
        self.curve.add(self.rates[len(self.curve.rates)], loss)
        smoothed, best = self.curve.smoothed[-1], min(self.curve.smoothed)
        if smoothed - best > (self.diverges - 1) * abs(best):
            self.curve.end = f"the loss diverges at {self.curve.rates[-1]:.2g}"
            return False
        return len(self.curve.rates) < len(self.rates)

    def close(self, training: TrainPass) -> None:
        """Leave the pass as it is: its last window stays open."""


def search(context: Context, phase: Phase, rates: list[float], diverges: float) -> Curve:
    """Train a phase with one rate after the other, and put the run back.

    Raises:
        ConfigError: it has no updater, or a part of the model has no shape yet, to which it could not be put back.
    """
    if phase.get("updater") is None:
        what = f"phase '{phase.name}' has no updater, with which lr_finder trains; an Experiment has none"
        raise ConfigError(f"{what}; take lr_finder out, or train with a phase")
    for name, parameter in phase.brain.modules.named_parameters():
        if is_lazy(parameter):
            what = f"phase.{phase.name}: '{name}' has no shape before the first batch, and lr_finder puts all back"
            raise ConfigError(f"{what}; make it with a shape, or take lr_finder out")
    snapshot = Snapshot(context)
    observer, hookspecs.observer = hookspecs.observer, None
    try:
        test = RangeTest(context, phase, rates, diverges)
        training = TrainPass(test, phase.name, phase["brain"], phase["updater"], repeat=True)
        plain = training.updater.is_plain(training.brain)
        name = f"{type(phase.updater).__name__}.update"
        with phase_errors(phase.name), training.resources:
            training.run(training.trainable.fit_batch if plain else training.custom(phase.updater.update, name))
    except DivergedError:
        test.curve.end = f"the loss is no number at {rates[len(test.curve.rates)]:.2g}"
    finally:
        hookspecs.observer = observer
        snapshot.restore()
    return test.curve


def loader_of(context: Context, phase: Phase) -> Any:
    """The batches that a phase is trained on.

    Raises:
        ConfigError: they can be read only once.
    """
    runner = context["runner"]
    dataset = next(item["dataset_name"] for item in context["phases"] if item["name"] == phase.name)
    loader = pass_loader(dataset, runner, context)
    if isinstance(loader, Iterator):
        what = f"lr_finder: the {type(loader).__name__} of dataset '{dataset}' can be read only once"
        raise ConfigError(f"{what}, and the training would lack its batches; use a DataLoader, or take lr_finder out")
    return loader


class Snapshot:
    """A run as it is between two steps: what a checkpoint would keep, and what it would not.

    Args:
        context: of the run.
    """

    def __init__(self, context: Context) -> None:
        self.context, models = context, context["model"]
        self.initial = InitialModels(models)
        weights = {phase: module.state_dict() for phase, module in unique_modules(models).items()}
        training = TrainingState.capture(models, {}, self.initial).to_tree()
        counters, weights, training = copy.deepcopy((dict(context["train_state"]), weights, training))
        self.saved = LoadedCheckpoint(Path("before lr_finder"), counters, {}, weights, training)
        loaders = context["dataset"].values()
        self.generators = generators_of_phases(models, context["dataset"])
        self.generator_states = states_of(self.generators)
        self.brains = {id(entry["brain"]): entry["brain"] for entry in models.values()}.values()
        modules = {
            part
            for entry in models.values()
            for module in (entry["model"], *vars(entry["brain"]).values())
            if isinstance(module, nn.Module)
            for part in module.modules()
        }
        self.buffers = [(value, value.clone()) for part in modules for value in part.buffers(recurse=False)]
        updaters = [entry["updater"] for entry in models.values()]
        trained = [trainable_of(brain) for brain in self.brains]
        owners: list[Any] = [*self.brains, *trained, *modules, *updaters, *(updater.state for updater in updaters)]
        # These have slots in place of a dict.
        slotted: list[Any] = [trainable.record for trainable in trained]
        for entry in models.values():
            for scheduler in entry["optim_schedulers"].values():
                owners += [scheduler, scheduler.guard, scheduler.optimizer]
                slotted.append(scheduler.window)
        # A loader may keep its workers, who draw a seed when they begin.
        owners += [loader for loader in loaders if hasattr(loader, "__dict__")]
        dicts: list[dict[str, Any]] = [*(vars(owner) for owner in owners), *(part._buffers for part in modules)]
        self.attributes = [(own, dict(own)) for own in dicts]
        self.slots = [(own, {name: getattr(own, name) for name in own.__slots__}) for own in slotted]

    def restore(self) -> None:
        """Put it back."""
        for own, before in self.attributes:
            own.clear()
            own.update(before)
        for part, values in self.slots:
            for name, value in values.items():
                setattr(part, name, value)
        for buffer, value in self.buffers:
            buffer.data.copy_(value)
        for brain in self.brains:
            brain.modules.zero_grad()
        restore_states(self.generators, self.generator_states)
        restore_training(self.saved, self.context, {}, self.initial)
