"""The loop over epochs, phases and batches. This is what happens when a model is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.random_state import restore_random_state
from pipeline.checkpoint.snapshot import snapshot
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.errors import DataError
from pipeline.stopping import STOP
from pipeline.training.agenda import Agenda
from pipeline.training.best import Best
from pipeline.training.brain import Brain
from pipeline.training.configured import options_of, pass_loader
from pipeline.training.entry import entry_of
from pipeline.training.epoch import train_epoch
from pipeline.training.evaluation import watched
from pipeline.training.metrics import build_metrics
from pipeline.training.passes import Stage
from pipeline.training.report import Report
from pipeline.training.triggers import NEVER
from pipeline.training.updates import is_plain
from pipeline.training.watching import watch


class Training:
    """The training of one runner.

    Args:
        context: after network and startup.

    Attributes:
        judges: phase -> name -> the metric that judges its validation passes.
        metrics: phase -> name -> number of the running epoch; ``context["metrics"]``.
        validated: phase -> the iteration in which it was last validated.
        saved: the newest checkpoint that the plugins were told of.
        kept: the checkpoint of the best, which is not removed.
        training: the Brain whose pass is running; None between two passes.
        begun: what a pass in whose middle the run was interrupted needs to go on; None once it does.
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
        self.agenda = Agenda(self.runner, self.state["iteration"])
        self.judges = {phase.name: build_metrics(phase.metrics, config.workspace) for phase in self.phases}
        self.best = Best(self.runner.keep_best.metric, self.runner.keep_best.mode) if self.runner.keep_best else None
        self.metrics: dict[str, dict[str, float]] = {}
        self.validated: dict[str, int] = {}
        self.saved: Path | None = None
        self.kept: Path | None = None
        self.training: Brain | None = None
        self.options = options_of(self.runner, self.device)
        for phase in self.phases:
            entry = entry_of(phase.name, context, "brain", "optim_schedulers", "updater")
            entry["brain"].configure(self.options)
            watch(entry["optim_schedulers"], context)
        self.begun = self.resume()

    def resume(self) -> Mapping[str, Any] | None:
        """Go on from the checkpoint that the trainer has restored; where it was in the middle of a pass, that state."""
        saved = self.context["checkpointer"].resumed
        if saved is None:
            return None
        state = saved.training["loop"]
        self.context["metrics"] = self.metrics = saved.training["metrics"]
        self.validated, self.saved = state["validated"], saved.path
        if self.best and state["best"]:
            self.best.load_state_dict(state["best"])
            self.context["best"] = self.best.as_dict()
            if self.best.iteration:
                self.keep(self.context["checkpointer"].path_of(self.best.iteration))
        random = saved.training["random"]
        restore_random_state(random)
        return {"pass": state["pass"], "random": random} if state["pass"] else None

    def run(self) -> None:
        """All epochs, and a checkpoint at the end."""
        for brain in {id(entry["brain"]): entry["brain"] for entry in map(self.entry, self.phases)}.values():
            brain.on_fit_start()
        for epoch in range(self.state["epoch"], self.last_epoch if not self.agenda.over(self.state) else 0):
            self.context["current_epoch"] = epoch
            self.hooks.before_epoch(context=self.context)
            over = self.epoch(epoch)
            self.hooks.after_epoch(context=self.context)
            if self.agenda.saving.fires_after(epoch + 1) or self.is_best_now:
                self.save()
            if over:
                break
        self.save()

    @property
    def last_epoch(self) -> int:
        """The one before which training ends."""
        limits = [self.runner.epochs or NEVER, self.runner.debug_epochs if self.runner.debug else NEVER]
        return min(limits)

    @property
    def is_best_now(self) -> bool:
        """Whether no iteration was better than this one."""
        return self.best is not None and 0 < self.best.iteration == self.state["iteration"]

    def entry(self, phase: PhaseSchema) -> dict[str, Any]:
        """What the network stage built for a phase, its Brain bound to it: phases may share one."""
        entry = self.models[phase.name]
        brain, updater = entry["brain"], entry["updater"]
        patience = self.runner.nonfinite_patience
        brain.bind(phase.name, entry["optim_schedulers"], self.context, patience)
        brain.counts_batches = is_plain(brain, updater)
        return entry

    def epoch(self, epoch: int) -> bool:
        """Train every phase on its data, evaluating each after it; True when the training is over."""
        # In an epoch that was begun before, some phases have been trained already.
        first = self.state["phase_index"]
        if not first and not self.begun:
            self.metrics = {}
        self.context["metrics"] = self.metrics
        over = False
        for index, phase in list(enumerate(self.phases))[first:]:
            self.state["phase_index"] = index
            with in_phase(phase.name):
                over = self.train(phase, epoch)
                if (over or self.agenda.validating.fires_after(epoch + 1)) and self.runner.valid_intervals:
                    self.validate(phase, epoch)
            if over:
                break
            if self.is_best_now and phase is not self.phases[-1]:
                self.state["phase_index"] = index + 1
                self.save()
        self.state.update(epoch=epoch + 1, phase_index=0)
        return over

    def train(self, phase: PhaseSchema, epoch: int) -> bool:
        """One pass over a phase's data; True when training has reached one of its limits."""
        entry = self.entry(phase)
        brain, updater = entry["brain"], entry["updater"]
        on_due = partial(self.on_due, phase, Report(self.context, phase.name, brain))
        updater.state.epoch = epoch
        begun, self.begun = self.begun, None
        self.training = brain
        numbers = train_epoch(
            brain,
            updater,
            self.loader(phase.dataset_name),
            epoch,
            self.agenda.next_look(self.state),
            on_due,
            context=self.context,
            name=f"'{phase.dataset_name}'",
            begun=begun,
        )
        self.training = None
        updater.state.epoch = epoch + 1
        self.metrics[phase.name] = {**numbers, **self.metrics.get(phase.name, {})}
        return self.agenda.over(self.state)

    def on_due(self, phase: PhaseSchema, report: Report, iteration: int) -> int:
        """Print, validate, save or end where it is time to; the next iteration to look at, 0 at the end.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked for it; what was due is done, and a checkpoint saved.
        """
        agenda = self.agenda
        printing, validating, saving = agenda.due(iteration)
        if printing or validating or saving:
            # On a GPU this waits for the work so far, as what follows does anyway.
            report.brain.look()
        if printing:
            report.print()
        if validating:
            self.validate(phase, self.context["current_epoch"])
        if agenda.over(self.state):
            return 0
        if saving or self.is_best_now or STOP.asked is not None:
            self.save()
        STOP.end()
        return agenda.next_look(self.state)

    def validate(self, phase: PhaseSchema, epoch: int) -> None:
        """Evaluate a phase, once in an iteration; its numbers come with ``valid_`` before their names."""
        iteration = self.state["iteration"]
        if not phase.valid_dataset_name or self.validated.get(phase.name) == iteration:
            return
        self.validated[phase.name] = iteration
        brain = self.models[phase.name]["brain"]
        loader = self.loader(phase.dataset_name if self.runner.overfit_batches else phase.valid_dataset_name)
        judges = self.judges[phase.name]
        numbers = watched(self.context, phase.name, brain, loader, Stage.VALID, judges, epoch=epoch)
        named = {f"valid_{name}": value for name, value in numbers.items()}
        self.metrics[phase.name] = {**self.metrics.get(phase.name, {}), **named}
        for scheduler in self.models[phase.name]["optim_schedulers"].values():
            scheduler.take_metrics(named)
        self.judge(phase.name, named)

    def judge(self, phase: str, numbers: dict[str, float]) -> None:
        """Keep in mind whether this is the best so far."""
        if not self.best:
            return
        if self.best.improves(phase, numbers, self.state["iteration"]):
            self.context["best"] = self.best.as_dict()
        if len(self.validated) == sum(bool(phase.valid_dataset_name) for phase in self.phases):
            self.best.check_reported()

    def loader(self, dataset: str | None) -> Any:
        """The batches of one pass over a dataset."""
        return pass_loader(dataset or "", self.runner, self.context)

    def save(self) -> None:
        """Save a checkpoint of this moment."""
        loop = {
            "pass": self.training.pass_state() if self.training else None,
            "validated": self.validated,
            "best": self.best.state_dict() if self.best else None,
        }
        training = snapshot(self.models, loop=loop, metrics=self.metrics)
        checkpointer = self.context["checkpointer"]
        if self.is_best_now:
            self.keep(checkpointer.path_of(self.state["iteration"]))
        path = checkpointer.save(self.models, self.state, self.metrics, training)
        if path != self.saved:
            self.saved = path
            self.hooks.after_checkpoint_saved(context=self.context, path=path)

    def keep(self, best: Path) -> None:
        """Keep a checkpoint as the best, however old it gets; the one before is like any other again."""
        checkpointer = self.context["checkpointer"]
        if self.kept:
            checkpointer.release(self.kept)
        checkpointer.protect(best)
        self.kept = best


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """What is wrong with data or losses is told with the phase in which it was found."""
    try:
        yield
    except DataError as error:
        place = f"phase.{name}: "
        raise error if str(error).startswith("phase.") else DataError(f"{place}{error}") from error
