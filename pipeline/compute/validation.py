"""Validates the phases of a runner, and reports their numbers and the ones of plugins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipeline.checkpoint.storage import as_number
from pipeline.compute.best_tracker import BestTracker
from pipeline.compute.trainable import Computation
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context, Phase
from pipeline.distributed.world import current_world
from pipeline.errors import DataError
from pipeline.metrics.base import build_metrics
from pipeline.user_code.plugin_calls import each_answer
from pipeline.user_code.tracebacks import error_context

# A method of the runner stage that evaluates a phase.
Verb = Callable[[Context, Phase], Mapping[str, float]]


class Validation:
    """Validates the phases of a runner, each at most once in an iteration.

    Args:
        context: the context after the network and startup stages.
        runner: the settings of the runner.
        phases: the settings of its phases.

    Attributes:
        metrics: phase -> name -> metric.
        best: tracks the number that ``keep_best`` names; None without ``keep_best``.
        schemas: phase -> its settings.
        phases: the names of the phases that have validation data.
        validated: phase -> the iteration in which it was last validated. Phases that were trained
            after that are left out.
        running: whether a validation has started and not ended. A resumed run repeats it.
    """

    def __init__(self, context: Context, runner: RunnerSchema, phases: list[PhaseSchema]) -> None:
        self.context = context
        self.counters: dict[str, int] = context["train_state"]
        self.metrics = {}
        for phase in phases:
            with error_context(f"phase.{phase.name}"):
                where = f"phase.{phase.name}.metrics"
                workspace = context["config"].workspace if phase.metrics else None
                self.metrics[phase.name] = build_metrics(phase.metrics, workspace, where)
        keep = runner.keep_best
        self.best = BestTracker(keep.metric, keep.mode, keep.count) if keep else None
        self.validated: dict[str, int] = {}
        self.running = False
        self.schemas = {phase.name: phase for phase in phases}
        self.phases = [phase.name for phase in phases if phase.valid_datasets]
        # The phases that were not validated yet for `best`.
        self._unreported = set(self.phases)

    def is_needed(self, phase: PhaseSchema, *, last: bool) -> bool:
        """Return whether a phase has validation data and is to be validated now.

        Args:
            phase: the settings of the phase.
            last: whether it is to be validated unless it was validated with its present weights.
                Otherwise it is to be validated unless it was validated in this iteration.
        """
        if not phase.valid_datasets:
            return False
        if last:
            return phase.name not in self.validated
        return self.validated.get(phase.name) != self.counters["iteration"]

    def outdate(self, brain: Computation, *, always: bool = False) -> None:
        """Have the phases of a Brain validated again, since a pass has changed its weights.

        Args:
            brain: the Brain that was trained.
            always: whether that includes phases that were validated in this iteration.
        """
        for name, entry in self.context["model"].items():
            validated_now = self.validated.get(name) == self.counters["iteration"]
            if entry["brain"] is brain and (always or not validated_now):
                self.validated.pop(name, None)

    def outdate_all(self) -> None:
        """Have all phases validated again, since an iteration has changed the weights."""
        self.validated.clear()

    def run(self, phase: Phase, verb: Verb, *, last: bool, keeps_best: bool = True) -> dict[str, float]:
        """Validate a phase.

        Args:
            phase: the phase.
            verb: evaluates it.
            last: whether no interval asks for the validation; then schedules do not get its
                numbers.
            keeps_best: whether it may be the best.

        Returns:
            Its numbers, by the names under which they are reported.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has requested the end of the run.
        """
        self.running = True
        numbers = report_evaluation(self.context, phase, verb, self.schemas[phase.name].valid_name)
        self.validated[phase.name] = self.counters["iteration"]
        self.running = False
        if not last:
            for scheduler in (phase.get("optim_schedulers") or {}).values():
                scheduler.take_metrics(numbers)
        if self.best and keeps_best:
            if self.best.improves(phase.name, numbers, self.counters["iteration"]):
                self.context["best"] = self.best.as_dict()
            self._unreported.discard(phase.name)
            if not self._unreported:
                self.best.check_reported()
        return numbers

    def move(self, before: int, phases: Iterable[str]) -> None:
        """Assign the validations of an earlier iteration to the current one.

        Args:
            before: the earlier iteration.
            phases: the phases that were validated in it, and not before it.
        """
        now = self.counters["iteration"]
        for name in phases:
            if self.validated.get(name) == before:
                self.validated[name] = now
        if self.best:
            self.best.move(before, now)
            if not math.isnan(self.best.value):
                self.context["best"] = self.best.as_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint of this iteration keeps."""
        best = self.best.state_dict(self.counters["iteration"]) if self.best else None
        # An interrupted last validation is repeated by the end of the training.
        running = self.running and not self.context.is_last_validation
        return {"validated": self.validated, "running": running, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.validated = state["validated"]
        self.running = state["running"]
        if self.best and state["best"]:
            self.best.load_state_dict(state["best"])
            self.context["best"] = None if math.isnan(self.best.value) else self.best.as_dict()


def evaluate_each(datasets: Sequence[str], evaluate_one: Callable[[str], dict[str, float]]) -> dict[str, float]:
    """Evaluate datasets, and return their numbers.

    If there are multiple datasets, the names of the numbers start with ``<dataset>/``.
    """
    if len(datasets) == 1:
        return evaluate_one(datasets[0])
    numbers = {}
    for dataset in datasets:
        for name, value in evaluate_one(dataset).items():
            numbers[f"{dataset}/{name}"] = value
    return numbers


def report_evaluation(
    context: Context, phase: Phase, verb: Verb, reported_as: Callable[[str], str] = str
) -> dict[str, float]:
    """Evaluate a phase, and call the plugins before and after it.

    When the plugins are called after it, ``context["metrics"]`` has the numbers already.

    Args:
        context: the context of the run.
        phase: the phase.
        verb: evaluates it.
        reported_as: returns the name under which a number is reported.

    Returns:
        The numbers of the phase, with the ones that plugins add, by the names under which they are
        reported.

    Raises:
        DataError: ``verb`` returned no numbers by name.
    """
    hooks = context["hooks"]
    hooks.before_validation(context=context, phase=phase.name)
    with context.set_gradients_aside("validate"):
        returned = verb(context, phase)
    if not isinstance(returned, Mapping):
        what = f"{getattr(verb, '__qualname__', verb)} returned a {type(returned).__name__}"
        raise DataError(f"{what}; return a dict of numbers by name")
    numbers = dict(returned)
    extend_metrics(context, phase.name, numbers)
    # The method of a user, or a plugin, may have other numbers on another rank. The ranks must not
    # decide differently, so all take the numbers of rank 0.
    numbers = current_world().broadcast(numbers)
    newest = context.peek("metrics").setdefault(phase.name, {})
    newest |= {reported_as(name): value for name, value in numbers.items()}
    hooks.after_validation(context=context, phase=phase.name, metrics=numbers)
    where = f"of phase '{phase.name}'"
    return {reported_as(name): as_number(value, f"metrics['{name}'] {where}") for name, value in numbers.items()}


def extend_metrics(context: Context, phase: str, metrics: dict[str, Any]) -> None:
    """Add the numbers of plugins to the numbers that are about to be reported.

    Args:
        context: the context of the run.
        phase: the name of the phase.
        metrics: the numbers by name; the ones of plugins are added here.

    Raises:
        DataError: a plugin returned something other than numbers by name, or a name that another
            plugin has returned.
    """
    values = {"context": context, "phase": phase, "metrics": metrics}
    owners: dict[str, str] = {}
    # All plugins are called before a number is added, so that their order does not matter.
    with context.set_gradients_aside("extend_metrics"):
        answers = list(each_answer(context["hooks"].extend_metrics, values))
    for plugin, added in answers:
        where = f"plugin '{plugin}', hook extend_metrics"
        if not isinstance(added, Mapping | None):
            raise DataError(f"{where} returned a {type(added).__name__}; return a dict of numbers by name")
        for name, value in (added or {}).items():
            owner = owners.setdefault(str(name), plugin)
            if owner != plugin:
                what = f"{where} returned '{name}', which plugin '{owner}' returned too"
                raise DataError(f"{what}; have the class put its plugin_name into the name")
            metrics[str(name)] = as_number(value, f"{where}: '{name}'")
