"""The loop of a run: epochs, phases, and what is due after an iteration: numbers, validation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.checkpoint import layout
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.reader import Iterations
from pipeline.checkpoint.state import random_state, restore_random_state, snapshot
from pipeline.checkpoint.storage import as_number
from pipeline.config.schema import WARN, PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.data.loader import order_drawn_by
from pipeline.errors import ConfigError, DataError, PipelineError, StorageError
from pipeline.signals import SHUTDOWN, ExitError, StoppedError, exit_requested
from pipeline.training.brain import Brain
from pipeline.training.export import WeightExporter
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.phase import pass_loader, phase_of, refuse_short_schedules
from pipeline.training.train_pass import train_epoch
from pipeline.training.triggers import Schedule
from pipeline.training.updater import is_plain
from pipeline.training.validation import BestTracker, Validation
from pipeline.user_code.plugins import hook_or_none


def attach_optimizer_hooks(optim_schedulers: Mapping[str, OptimScheduler], context: Context) -> None:
    """Let the plugins know of each backward and update of these schedulers; a hook that nobody implements costs nothing."""
    hooks = context["hooks"]
    backward = hook_or_none(hooks, "after_backward")
    before, after = hook_or_none(hooks, "before_update"), hook_or_none(hooks, "after_update")
    for name, scheduler in optim_schedulers.items():
        scheduler.after_backward = partial(backward, context=context) if backward else None
        scheduler.before_update = partial(before, context=context, name=name) if before else None
        scheduler.after_update = partial(after, context=context, name=name) if after else None


class IntervalReport:
    """Tells the plugins how training goes.

    Args:
        context: the run's.
        phase: the phase that is trained.
        brain: its Brain, which gathers the numbers.
    """

    def __init__(self, context: Context, phase: str, brain: Brain) -> None:
        self.context, self.phase, self.brain = context, phase, brain
        self.state: dict[str, int] = context["train_state"]
        self.since, self.samples = time.perf_counter(), self.state["samples"]

    def print(self) -> None:
        """Read the numbers since the last time: on a GPU this waits for the work so far."""
        numbers = {"loss": self.brain._pass_loss.recent(), **self.brain._pass_numbers.recent()}
        now, samples = time.perf_counter(), self.state["samples"]
        numbers["samples_per_second"] = (samples - self.samples) / (now - self.since)
        self.since, self.samples = now, samples
        self.context["hooks"].on_print_interval(context=self.context, phase=self.phase, metrics=numbers)


class Checkpoints:
    """Saves, and answers for what it has saved.

    Args:
        checkpointer: writes; asynchronously or not.
        context: whose plugins are told.
        best: which of them are the best; None: nobody asks.
        on_error: ``warn`` goes on where the storage refuses, and tries again with the next one.
    """

    def __init__(self, checkpointer: Checkpointer, context: Context, best: BestTracker | None, on_error: str) -> None:
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
                self.best.saved(layout.step_of(path) or 0)
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


class Training:
    """The training of one runner.

    Args:
        context: after network and startup.

    Attributes:
        metrics: phase -> name -> number of the running epoch; ``context["metrics"]``.
        iterations: phase -> name -> the iteration that a number of these is of.
        validation: of its phases.
        checkpoints: what is saved.
        inference: the weights alone, saved for whoever uses the models.
        training: the Brain whose pass is running; None between two passes.
        trained: whether the phase that is up has been trained in this epoch, and may still have to be validated.
        undivided: whether the pass that runs has no place at which it could be gone on with; it is saved at its end.
        postponed, ending: whether in such a pass a checkpoint was due, and it was told that it ends the training.
        begun: what a pass in whose middle the run was interrupted needs to go on; None once it does.
    """

    def __init__(self, context: Context) -> None:
        config = context["config"]
        self.context = context
        self.hooks = context["hooks"]
        self.models: dict[str, dict[str, Any]] = context["model"]
        self.state: dict[str, int] = context["train_state"]
        self.runner: RunnerSchema = config.runner(context["runner_name"])
        self.phases: list[PhaseSchema] = config.phases(self.runner)
        self.agenda = Schedule(self.runner, self.state["iteration"])
        self.validation = Validation(context, self.runner, self.phases)
        self.best = self.validation.best
        self.checkpoints = Checkpoints(context["checkpointer"], context, self.best, self.runner.on_save_error)
        self.metrics: dict[str, dict[str, float]] = {}
        self.iterations: dict[str, dict[str, int]] = {}
        self.training: Brain | None = None
        self.trained = self.undivided = self.postponed = self.ending = False
        for phase in self.phases:
            attach_optimizer_hooks(
                phase_of(phase.name, context, "brain", "optim_schedulers", "updater")["optim_schedulers"], context
            )
        self.inference = WeightExporter(self.runner, context)
        self.begun = self.resume()

    def resume(self) -> Mapping[str, Any] | None:
        """Go on from the checkpoint that the trainer has restored; where it was in the middle of a pass, that state."""
        saved = self.context["checkpointer"].resumed
        if saved is None:
            return None
        state = saved.training["loop"]
        self.context["metrics"] = self.metrics = saved.training["metrics"]
        # A checkpoint of before has them beside its numbers alone.
        self.iterations = state.get("iterations", saved.iterations)
        self.trained = state["trained"]
        self.validation.load_state_dict(state["validation"])
        random = saved.training["random"]
        restore_random_state(random)
        return {"pass": state["pass"], "random": random} if state["pass"] else None

    def run(self) -> None:
        """All epochs, and a checkpoint at the end; what ends it before is heeded where the state can be saved, not elsewhere."""
        self.context["metrics"] = self.metrics
        with SHUTDOWN.defer(_between_steps), suppress(ExitError):
            self.tell_undivided()
            refuse_short_schedules(self.runner, self.phases, self.agenda.epochs, self.context)
            # That of the last one, in case there is none left.
            self.context["current_epoch"] = max(0, self.state["epoch"] - 1)
            self.inference.begin()
            # One that was interrupted in the middle is brought to its end, though a limit may be reached.
            over = self.agenda.over(self.state) and not (self.begun or self.trained)
            while not over:
                epoch = self.context["current_epoch"] = self.state["epoch"]
                self.hooks.before_epoch(context=self.context)
                if exit_requested(self.context) and not self.begun:
                    self.save_if(False)
                self.epoch(epoch)
                self.hooks.after_epoch(context=self.context)
                self.checkpoints.tell()
                if self.agenda.exporting.fires_after(epoch + 1):
                    self.inference.save()
                self.save_if(self.agenda.saving.fires_after(epoch + 1))
                over = self.agenda.over(self.state)
            self.save()
            self.checkpoints.finish()
            self.inference.finish()

    @property
    def is_best_now(self) -> bool:
        """Whether this iteration is one of the best, and not saved yet."""
        return self.best is not None and self.best.deserves_checkpoint(self.state["iteration"])

    def entry(self, phase: PhaseSchema) -> dict[str, Any]:
        """What the network stage built for a phase, its Brain bound to it: phases may share one."""
        entry = self.models[phase.name]
        brain, updater = entry["brain"], entry["updater"]
        patience = self.runner.nonfinite_patience
        type(brain).bind(brain, phase.name, entry["optim_schedulers"], self.context, patience)
        brain._counts_batches = is_plain(brain, updater)
        return entry

    def epoch(self, epoch: int) -> None:
        """Train every phase on its data, evaluating each after it; in the last one also those whose weights were not yet."""
        # In an epoch that was begun before, some phases have been trained already.
        first = self.state["phase_index"]
        if not (first or self.begun or self.trained):
            self.metrics, self.iterations = {}, {}
        self.context["metrics"] = self.metrics
        over = False
        for index, phase in list(enumerate(self.phases))[first:]:
            self.state["phase_index"] = index
            with in_phase(phase.name):
                over = self.train(phase, epoch)
                if self.agenda.validating.fires_after(epoch + 1):
                    self.validate(phase, epoch)
            if over:
                break
            if phase is not self.phases[-1]:
                self.trained = False
                self.state["phase_index"] = index + 1
                self.save_if(False)
        if self.runner.valid_intervals and (over or epoch + 1 >= self.agenda.epochs):
            for phase in self.phases:
                with in_phase(phase.name):
                    self.validate(phase, epoch, last=True)
        self.trained = False
        self.state.update(epoch=epoch + 1, phase_index=0)

    def train(self, phase: PhaseSchema, epoch: int) -> bool:
        """One pass over a phase's data; True when training has reached one of its limits."""
        entry = self.entry(phase)
        if self.trained:
            # The run was interrupted in the validation that follows, which is made again if it is still due.
            self.validation.running = False
            return self.agenda.over(self.state)
        brain, updater = entry["brain"], entry["updater"]
        on_due = partial(self.on_due, phase, IntervalReport(self.context, phase.name, brain))
        updater.state.epoch = epoch
        begun, self.begun = self.begun, None
        loader = self.loader(phase.dataset_name)
        self.training, self.undivided = brain, bool(order_drawn_by(loader))
        numbers = train_epoch(
            brain,
            updater,
            loader,
            epoch,
            self.agenda.next_look(self.state),
            on_due,
            context=self.context,
            name=f"'{phase.dataset_name}'",
            begun=begun,
        )
        self.training, self.trained = None, True
        self.validation.outdate(brain)
        updater.state.epoch = epoch + 1
        self.metrics[phase.name] = {**numbers, **self.metrics.get(phase.name, {})}
        own = dict.fromkeys(numbers, self.state["iteration"])
        self.iterations[phase.name] = {**own, **self.iterations.get(phase.name, {})}
        return self.agenda.over(self.state)

    def on_due(self, phase: PhaseSchema, report: IntervalReport, iteration: int) -> int:
        """Print, validate, save or end where it is time to; the next iteration to look at, 0 at the end.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked for it; what was due is done, and a checkpoint saved.
            ExitError: ``is_exit`` has, likewise.
        """
        agenda = self.agenda
        self.checkpoints.tell()
        printing, validating, saving, exporting = agenda.due(iteration)
        # One that a signal has interrupted, and what would have been saved after it.
        validating, saving = validating or self.validation.running, saving or self.validation.running
        if printing or validating or saving or exporting:
            # On a GPU this waits for the work so far, as what follows does anyway.
            report.brain._refuse_divergence()
        if printing:
            report.print()
        if exporting:
            self.inference.save()
        if validating:
            self.validate(phase, self.context["current_epoch"])
        if agenda.over(self.state):
            return 0
        self.save_if(saving)
        return agenda.next_look(self.state)

    def validate(self, phase: PhaseSchema, epoch: int, *, last: bool = False) -> None:
        """Evaluate a phase, once in an iteration; the last time, where its weights have not been."""
        if not self.validation.comes(phase, last=last):
            return
        random = random_state()
        try:
            numbers = self.validation.of(phase, epoch, last=last)
        except (StoppedError, KeyboardInterrupt):
            # As it was before: a resumed run validates from the beginning.
            restore_random_state(random)
            if not (self.training and self.undivided):
                self.save()
            self.checkpoints.finish()
            raise
        if last:
            # At no interval: a run that goes on with higher limits draws what it would have drawn.
            restore_random_state(random)
        self.metrics[phase.name] = {**self.metrics.get(phase.name, {}), **numbers}
        own = dict.fromkeys(numbers, self.state["iteration"])
        self.iterations[phase.name] = {**self.iterations.get(phase.name, {}), **own}

    def tell_undivided(self) -> None:
        """Warn of data with which no run could go on in the middle of an epoch."""
        for name in dict.fromkeys(phase.dataset_name or "" for phase in self.phases):
            loader = self.loader(name)
            if sampler := order_drawn_by(loader):
                drawn = f"dataset.{name}: its order is drawn anew in each epoch, by a {sampler}, and no place in it is known"
                when = "checkpoints, a signal's too, are saved at the ends of epochs alone"
                best = ", so none is the best that was validated within one" if self.runner.keep_best else ""
                # torch draws a number where a loader begins, which one that stays does but once.
                stays = getattr(loader, "persistent_workers", False)
                other = "; with its persistent_workers a resumed run has another order nevertheless" if stays else ""
                remedy = (
                    "make the loader with pipeline.data.loader.make_loader, or give it state_dict and load_state_dict"
                )
                logger.warning(f"{drawn}: {when}{best}{other}; {remedy}")

    def loader(self, dataset: str | None) -> Any:
        """The batches of one pass over a dataset."""
        return pass_loader(dataset or "", self.runner, self.context)

    def save(self) -> None:
        """Save a checkpoint of this moment, while training goes on."""
        # First: what is saved now says which of those before are the best.
        self.checkpoints.settle()
        loop = {
            "pass": self.training._pass_state() if self.training else None,
            "trained": self.trained,
            "validation": self.validation.state_dict(),
            "iterations": self.iterations,
        }
        for phase, numbers in self.metrics.items():
            # A plugin may have put some there.
            numbers.update({name: as_number(each, f"metrics['{phase}']['{name}']") for name, each in numbers.items()})
        training = snapshot(self.models, loop=loop, metrics=self.metrics)
        self.checkpoints.save(self.state, self.metrics, training, self.judged_iterations())

    def judged_iterations(self) -> Iterations:
        """The same, but this iteration for what a validation has said of weights that were not trained since."""
        current = {name for name in self.validation.validated if self.models[name]["brain"] is not self.training}
        return {
            phase: {
                name: self.state["iteration"] if phase in current and name.startswith("valid_") else iteration
                for name, iteration in each.items()
            }
            for phase, each in self.iterations.items()
        }

    def save_if(self, due: bool) -> None:
        """Save where it is due or one of the best, or where the training is asked to end, which it then does.

        In an undivided pass all of that comes at its end.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked for it.
            ExitError: ``is_exit`` has.
        """
        if self.training and self.undivided:
            if exit_requested(self.context) and not self.ending:
                logger.info("asked to end: the epoch is finished first, for no run could go on in the middle of it")
                self.ending = True
            self.postponed |= due or self.is_best_now
            return
        due, self.postponed = due or self.postponed, False
        asked = exit_requested(self.context)
        if due or asked or self.is_best_now:
            self.save()
            # A plugin may have asked for it when it was told of a checkpoint; then this moment is saved already.
            asked = exit_requested(self.context)
        if asked:
            self.checkpoints.finish()
            SHUTDOWN.raise_if_requested()
            raise ExitError


def _between_steps() -> None:
    """Let a signal wait: the loop looks itself whether one has come."""


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """What is wrong with data or losses is told with the phase in which it was found."""
    try:
        yield
    except (DataError, ConfigError) as error:
        place = f"phase.{name}: "
        raise error if str(error).startswith("phase.") else type(error)(f"{place}{error}") from error
    except Exception as error:
        if not isinstance(error, PipelineError):
            error.add_note(f"phase.{name}")
        raise
