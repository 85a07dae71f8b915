"""The training loop of a run: epochs, phases, and what is due after an iteration: reports, validation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from loguru import logger

from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.checkpoint.reader import Iterations
from pipeline.checkpoint.state import LoopState1
from pipeline.checkpoint.storage import as_number
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.data.loader import random_sampler_of
from pipeline.errors import CheckpointError
from pipeline.signals import SHUTDOWN, ExitError, StoppedError, exit_requested
from pipeline.training.brain import Brain
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.evaluation import Validation
from pipeline.training.export import WeightExporter
from pipeline.training.optim_scheduler import attach_optimizer_hooks
from pipeline.training.phase import (
    pass_loader,
    phase_errors,
    phase_of,
    refuse_short_schedules,
    warn_of_unresumable_orders,
)
from pipeline.training.train_pass import train_epoch
from pipeline.training.triggers import Schedule
from pipeline.training.updater import is_plain


class TrainLoop:
    """Trains the phases of a runner.

    Args:
        context: after network and startup.

    Attributes:
        counters: ``context["train_state"]``.
        schedule: what is due when, and the limits.
        metrics: phase -> name -> number of the running epoch; ``context["metrics"]``.
        iterations: phase -> name -> the iteration of which that number is.
        exporter: saves the weights alone.
        brain: the Brain whose pass is running; None between two passes.
        pass_state: the state of the pass in which the run was interrupted; None once that pass goes on.
        phase_trained: whether the current phase has been trained in this epoch; its validation may still be due.
        resumable: whether a run could go on from here; during a pass whose order is not reproducible it could not.
        save_postponed, exit_announced: whether in such a pass a save was due, and the end of training requested.
    """

    def __init__(self, context: Context) -> None:
        config = context["config"]
        self.context = context
        self.hooks = context["hooks"]
        self.models: dict[str, dict[str, Any]] = context["model"]
        self.counters: dict[str, int] = context["train_state"]
        self.runner: RunnerSchema = config.runner(context["runner_name"])
        self.phases: list[PhaseSchema] = config.phases(self.runner)
        self.schedule = Schedule(self.runner, self.counters["iteration"])
        self.validation = Validation(context, self.runner, self.phases)
        best, on_save_error = self.validation.best, self.runner.on_save_error
        self.checkpoints = Checkpoints(context["checkpointer"], context, best, on_save_error)
        self.metrics: dict[str, dict[str, float]] = {}
        self.iterations: dict[str, dict[str, int]] = {}
        self.brain: Brain | None = None
        self.resumable = True
        self.phase_trained = self.save_postponed = self.exit_announced = False
        for phase in self.phases:
            entry = phase_of(phase.name, context, "brain", "optim_schedulers", "updater")
            attach_optimizer_hooks(entry["optim_schedulers"], context)
        self.exporter = WeightExporter(self.runner, context)
        self.pass_state = self.resume()

    def resume(self) -> Mapping[str, Any] | None:
        """Go on from the checkpoint that the trainer has restored; the state of its pass, if it was saved in one."""
        checkpoint = self.context["checkpointer"].resumed
        if checkpoint is None:
            return None
        state = checkpoint.state
        if state is None or state.loop is None:
            what = f"{checkpoint.path}: is of another runner stage than the default one, which could not go on from it"
            raise CheckpointError(f"{what}; resume with that one, or begin a new run with init_model_path")
        loop, random = state.loop, dict(state.random)
        self.context["metrics"] = self.metrics = state.metrics
        self.iterations = loop.iterations
        last = loop.inner[-1] if loop.inner else None
        self.phase_trained = last is not None and last.over and not last.validated
        self.validation.load_state_dict(loop.validation.to_tree())
        restore_random_state(random)
        return {"pass": last.state.to_tree(), "random": random} if last and last.state else None

    def run(self) -> None:
        """Train all epochs, then save; a signal or ``is_exit`` ends it earlier, where the state can be saved."""
        self.context["metrics"] = self.metrics
        with SHUTDOWN.defer(_let_wait), suppress(ExitError):
            warn_of_unresumable_orders(self.runner, self.phases, self.context)
            refuse_short_schedules(self.runner, self.phases, self.schedule.epochs, self.context)
            # That of the last epoch, in case none is left.
            self.context["current_epoch"] = max(0, self.counters["epoch"] - 1)
            self.exporter.begin()
            # An interrupted pass or phase is finished even where a limit is reached.
            over = self.schedule.over(self.counters) and not (self.pass_state or self.phase_trained)
            while not over:
                self.train_epoch()
                over = self.schedule.over(self.counters)
            self.save()
            self.checkpoints.finish()
            self.exporter.finish()

    def train_epoch(self) -> None:
        """Train one epoch, and save what is due after it."""
        epoch = self.context["current_epoch"] = self.counters["epoch"]
        self.hooks.before_epoch(context=self.context)
        if exit_requested(self.context) and not self.pass_state:
            self.save_if(False)
        self.train_phases(epoch)
        self.hooks.after_epoch(context=self.context)
        self.checkpoints.notify_saved()
        if self.schedule.exporting.fires_after(epoch + 1):
            self.exporter.save()
        self.save_if(self.schedule.saving.fires_after(epoch + 1))

    def train_phases(self, epoch: int) -> None:
        """Train and validate every phase; at the end of training, validate also what was not since its last update."""
        # A resumed epoch goes on with the phase in which it was interrupted.
        first = self.counters["phase_index"]
        if not (first or self.pass_state or self.phase_trained):
            self.metrics, self.iterations = {}, {}
        self.context["metrics"] = self.metrics
        over = False
        for index, phase in list(enumerate(self.phases))[first:]:
            self.counters["phase_index"] = index
            with phase_errors(phase.name):
                self.train_phase(phase, epoch)
                if self.schedule.validating.fires_after(epoch + 1):
                    self.validate(phase, epoch)
            over = self.schedule.over(self.counters)
            if over:
                break
            if phase is not self.phases[-1]:
                self.phase_trained = False
                self.counters["phase_index"] = index + 1
                self.save_if(False)
        if self.runner.valid_intervals and (over or epoch + 1 >= self.schedule.epochs):
            for phase in self.phases:
                with phase_errors(phase.name):
                    self.validate(phase, epoch, last=True)
        self.phase_trained = False
        self.counters.update(epoch=epoch + 1, phase_index=0)

    def train_phase(self, phase: PhaseSchema, epoch: int) -> None:
        """One pass over the data of a phase, unless the run was interrupted in the validation after it."""
        entry = self.models[phase.name]
        brain, updater = entry["brain"], entry["updater"]
        # Phases may share a Brain.
        type(brain).bind(brain, phase.name, entry["optim_schedulers"], self.context, self.runner.nonfinite_patience)
        brain._counts_batches = is_plain(brain, updater)
        if self.phase_trained:
            self.validation.running = False
            return
        report = IntervalReport(self.context, phase.name, brain)
        updater.state.epoch = epoch
        pass_state, self.pass_state = self.pass_state, None
        loader = pass_loader(phase.dataset_name or "", self.runner, self.context)
        self.brain, self.resumable = brain, not random_sampler_of(loader)
        numbers = train_epoch(
            brain,
            updater,
            loader,
            epoch,
            self.schedule.next_check(self.counters),
            partial(self.on_due, phase, report),
            context=self.context,
            dataset=f"'{phase.dataset_name}'",
            pass_state=pass_state,
        )
        self.brain, self.resumable, self.phase_trained = None, True, True
        self.validation.outdate(brain)
        updater.state.epoch = epoch + 1
        self.metrics[phase.name] = {**numbers, **self.metrics.get(phase.name, {})}
        current = dict.fromkeys(numbers, self.counters["iteration"])
        self.iterations[phase.name] = {**current, **self.iterations.get(phase.name, {})}

    def on_due(self, phase: PhaseSchema, report: IntervalReport, iteration: int) -> int:
        """Report, validate, save and end where it is time to; the next iteration to check, 0 at the end.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested it; what was due is done, and a checkpoint saved.
            ExitError: ``is_exit`` has, likewise.
        """
        self.checkpoints.notify_saved()
        printing, validating, saving, exporting = self.schedule.due(iteration)
        # A validation that a signal has interrupted is made again, and then saved what was to be saved after it.
        validating, saving = validating or self.validation.running, saving or self.validation.running
        if printing or validating or saving or exporting:
            # On a GPU this waits for the work so far, as what follows does anyway.
            report.brain._check_divergence()
        if printing:
            report.print()
        if exporting:
            self.exporter.save()
        if validating:
            self.validate(phase, self.context["current_epoch"])
        if self.schedule.over(self.counters):
            return 0
        self.save_if(saving)
        return self.schedule.next_check(self.counters)

    def validate(self, phase: PhaseSchema, epoch: int, *, last: bool = False) -> None:
        """Validate a phase, once in an iteration; ``last``: once since its last update, at the end of training."""
        if not self.validation.is_needed(phase, last=last):
            return
        dataset = phase.dataset_name if self.runner.overfit_batches else phase.valid_dataset_name
        random = random_state()
        try:
            loader = pass_loader(dataset or "", self.runner, self.context)
            numbers = self.validation.run(phase, loader, epoch, last=last)
        except (StoppedError, KeyboardInterrupt):
            # A resumed run makes the whole validation again.
            restore_random_state(random)
            if self.resumable:
                self.save()
            self.checkpoints.finish()
            raise
        if last:
            # At no interval: a run that goes on with higher limits draws what it would have drawn.
            restore_random_state(random)
        self.metrics[phase.name] = {**self.metrics.get(phase.name, {}), **numbers}
        current = dict.fromkeys(numbers, self.counters["iteration"])
        self.iterations[phase.name] = {**self.iterations.get(phase.name, {}), **current}

    def save_if(self, due: bool) -> None:
        """Save if it is due, after one of the best validations, or if the run is to end; then end it.

        Where no run could go on from here, all of that is postponed to the end of the pass.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end.
            ExitError: ``is_exit`` has.
        """
        best = self.validation.best
        due = due or (best is not None and best.deserves_checkpoint(self.counters["iteration"]))
        if not self.resumable:
            if exit_requested(self.context) and not self.exit_announced:
                logger.info("asked to end: the epoch is finished first, for no run could go on in the middle of it")
                self.exit_announced = True
            self.save_postponed |= due
            return
        due, self.save_postponed = due or self.save_postponed, False
        ending = exit_requested(self.context)
        if due or ending:
            self.save()
            # A plugin that is notified of a checkpoint may request the end; this moment is saved then.
            ending = exit_requested(self.context)
        if ending:
            self.checkpoints.finish()
            SHUTDOWN.raise_if_requested()
            raise ExitError

    def save(self) -> None:
        """Save a checkpoint, while training continues."""
        # First, since this checkpoint keeps which of the earlier ones are the best.
        self.checkpoints.wait_for_save()
        for phase, numbers in self.metrics.items():
            # A plugin may have added some.
            for name, number in numbers.items():
                numbers[name] = as_number(number, f"metrics['{phase}']['{name}']")
        loop = {
            "pass": self.brain._pass_state() if self.brain else None,
            "trained": self.phase_trained,
            "validation": self.validation.state_dict(),
            "iterations": self.iterations,
        }
        names = [phase.name for phase in self.phases]
        epoch, index = self.counters["epoch"], self.counters["phase_index"]
        upgraded = LoopState1.from_tree(loop, "the loop").upgrade(epoch, index, names, self.metrics)
        training = self.context["checkpointer"].capture(self.models, loop=upgraded, metrics=self.metrics).to_tree()
        self.checkpoints.save(self.counters, self.metrics, training, self.iterations_of_weights())

    def iterations_of_weights(self) -> Iterations:
        """``iterations``, but the current one for validations of weights that have not been trained since."""
        unchanged = {name for name in self.validation.validated if self.models[name]["brain"] is not self.brain}
        current = self.counters["iteration"]
        return {
            phase: {
                name: current if phase in unchanged and name.startswith("valid_") else iteration
                for name, iteration in iterations.items()
            }
            for phase, iterations in self.iterations.items()
        }


def _let_wait() -> None:
    """A signal waits until the loop checks for it."""


class IntervalReport:
    """Tells the plugins how training goes, every ``print_interval``.

    Args:
        context: the run's.
        phase: the phase that is trained.
        brain: its Brain, which collects the numbers.
    """

    def __init__(self, context: Context, phase: str, brain: Brain) -> None:
        self.context, self.phase, self.brain = context, phase, brain
        self.counters: dict[str, int] = context["train_state"]
        self.started, self.samples = time.perf_counter(), self.counters["samples"]

    def print(self) -> None:
        """Read the numbers since the last time: on a GPU this waits for the work so far."""
        numbers = {"loss": self.brain._pass_loss.recent(), **self.brain._pass_numbers.recent()}
        now, samples = time.perf_counter(), self.counters["samples"]
        numbers["samples_per_second"] = (samples - self.samples) / (now - self.started)
        self.started, self.samples = now, samples
        self.context["hooks"].on_print_interval(context=self.context, phase=self.phase, metrics=numbers)
