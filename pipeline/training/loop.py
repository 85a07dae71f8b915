"""The loop over epochs, phases and batches. This is what happens when a model is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.config.values import Interval
from pipeline.context import Context
from pipeline.data.batch import on_device
from pipeline.data.loader import set_epoch
from pipeline.errors import DataError
from pipeline.training.brain import Brain, Stage
from pipeline.training.entry import entry_of, loader_of
from pipeline.training.evaluation import watched
from pipeline.training.metrics import Mean, build_metrics
from pipeline.training.triggers import NEVER, Triggers
from pipeline.training.updater import Updater, UpdaterBase


def train_pass(
    loader: Iterable[Any], updater: UpdaterBase, state: dict[str, int], due: int, on_due: Callable[[int], int]
) -> int:
    """Train on every batch of a loader. The hot loop.

    Args:
        loader: the batches, on their device.
        updater: trains on one of them; its ``state.iteration`` is assigned, so that one that counts itself does not count twice.
        state: the counters; ``iteration`` is kept up to date.
        due: the next iteration after which something has to be done.
        on_due: does it, and returns the next one; 0 ends the pass.

    Returns:
        The next iteration at which something is due; 0 where the training is over.
    """
    update, iteration = updater.update, state["iteration"]
    others = iteration - updater.state.iteration
    for batch in loader:
        update(batch)
        iteration += 1
        state["iteration"] = iteration
        updater.state.iteration = iteration - others
        if iteration >= due:
            due = on_due(iteration)
            if not due:
                break
    return due


class Training:
    """The training of one runner.

    Args:
        context: after network and startup.

    Attributes:
        judges: phase -> name -> the metric that judges its validation passes.
        metrics: phase -> name -> number of the running epoch; ``context["metrics"]``.
        saved: the newest checkpoint that the plugins were told of.
    """

    def __init__(self, context: Context) -> None:
        config = context["config"]
        self.context = context
        self.hooks = context["hooks"]
        self.device: torch.device = context["device"]
        self.models: dict[str, dict[str, Any]] = context["model"]
        self.state: dict[str, int] = context["train_state"]
        self.runner: RunnerSchema = next(each for each in config.runners if each.name == context["runner_name"])
        self.phases: list[PhaseSchema] = config.phases(self.runner)
        for phase in self.phases:
            entry = entry_of(phase.name, context, "brain", "optim_schedulers", "updater")
            entry["brain"].bind(phase.name, entry["optim_schedulers"], context, self.runner.nonfinite_patience)
        start = self.state["iteration"]
        print_interval = self.runner.print_interval
        self.printing = Triggers([Interval(print_interval, "iteration")] if print_interval else [], start)
        self.saving = Triggers(self.runner.intervals, start)
        self.judges = {phase.name: build_metrics(phase.metrics, config.workspace) for phase in self.phases}
        self.metrics: dict[str, dict[str, float]] = {}
        self.saved: Path | None = None

    def run(self) -> None:
        """All epochs, and a checkpoint at the end."""
        for epoch in range(self.state["epoch"], self.runner.epochs or NEVER):
            self.context["current_epoch"] = epoch
            self.hooks.before_epoch(context=self.context)
            over = self.epoch(epoch)
            self.hooks.after_epoch(context=self.context)
            if self.saving.fires_after(epoch + 1):
                self.save()
            if over:
                break
        self.save()

    def epoch(self, epoch: int) -> bool:
        """Train every phase on its data, evaluating each after it; True when the training is over."""
        self.context["metrics"] = self.metrics = {}
        over = False
        for index, phase in enumerate(self.phases):
            self.state["phase_index"] = index
            over = self.train(phase, epoch)
            if phase.valid_dataset_name:
                self.metrics[phase.name] |= self.validate(phase)
            if over:
                break
        self.state.update(epoch=epoch + 1, phase_index=0)
        return over

    def validate(self, phase: PhaseSchema) -> dict[str, float]:
        """Evaluate a phase between two epochs; its numbers come with ``valid_`` before their names."""
        loader, brain = loader_of(phase.valid_dataset_name or "", self.context), self.models[phase.name]["brain"]
        numbers = watched(self.context, phase.name, brain, loader, Stage.VALID, self.judges[phase.name])
        named = {f"valid_{name}": value for name, value in numbers.items()}
        for scheduler in self.models[phase.name]["optim_schedulers"].values():
            scheduler.take_metrics(named)
        return named

    def train(self, phase: PhaseSchema, epoch: int) -> bool:
        """One pass over a phase's data; True when the last iteration is done."""
        entry = self.models[phase.name]
        loader = loader_of(phase.dataset_name or "", self.context)
        brain, updater = entry["brain"], entry["updater"]
        set_epoch(loader, epoch)
        brain.begin_pass()
        report = _Report(self.context, phase.name, brain)
        before = self.state["iteration"]
        updater.state.epoch = epoch
        due = train_pass(
            on_device(loader, self.device), updater, self.state, self._next_look(), partial(self.on_due, report)
        )
        if self.state["iteration"] == before:
            nothing = f"'{phase.dataset_name}' gave no batch in epoch {epoch}"
            raise DataError(f"phase.{phase.name}: {nothing}; check the dataset, or drop_last with few samples")
        brain.end_pass()
        if not isinstance(updater, Updater):
            # How often another updater has updated, it alone knows.
            self.state["update"] += self.state["iteration"] - before
        updater.state.epoch = epoch + 1
        self.metrics[phase.name] = report.epoch_numbers()
        return not due

    def on_due(self, report: _Report, iteration: int) -> int:
        """Print or save where it is time to; the next iteration to look at, 0 at the end."""
        if self.printing.fires(iteration):
            report.print()
        if self.runner.max_steps and iteration >= self.runner.max_steps:
            return 0
        if self.saving.fires(iteration):
            self.save()
        return self._next_look()

    def _next_look(self) -> int:
        return min(self.printing.next_look(), self.saving.next_look(), self.runner.max_steps or NEVER)

    def save(self) -> None:
        """Save a checkpoint of this moment."""
        path = self.context["checkpointer"].save(self.models, self.state, self.metrics)
        if path != self.saved:
            self.saved = path
            self.hooks.after_checkpoint_saved(context=self.context, path=path)


class _Report:
    """The training numbers of one pass: since the last print, and over the whole of it."""

    def __init__(self, context: Context, phase: str, brain: Brain) -> None:
        self.context, self.phase, self.brain = context, phase, brain
        self.epoch_loss = Mean()
        self.since, self.samples = time.perf_counter(), 0

    def _close(self) -> float:
        """Read the loss since the last time: on a GPU this waits for the work so far."""
        recent = self.brain.train_loss
        loss, self.samples = recent.compute(), recent.count
        if recent.count:
            self.epoch_loss.add(torch.tensor(loss, dtype=torch.float64), recent.count)
        recent.reset()
        return loss

    def print(self) -> None:
        """Tell the plugins."""
        numbers = {"loss": self._close()}
        now = time.perf_counter()
        numbers["samples_per_second"] = self.samples / (now - self.since)
        self.since = now
        self.context["hooks"].on_print_interval(context=self.context, phase=self.phase, metrics=numbers)

    def epoch_numbers(self) -> dict[str, float]:
        """The numbers of the pass, weighted by samples."""
        self._close()
        self.context["train_state"]["samples"] += self.epoch_loss.count
        return {"loss": self.epoch_loss.compute()}
