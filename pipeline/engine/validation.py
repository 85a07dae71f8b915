"""Validates the phases of a runner between two training steps, and adds the numbers of plugins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipeline.checkpoint.storage import as_number
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context, Phase
from pipeline.distributed.world import current_world
from pipeline.engine.best_tracker import BestTracker
from pipeline.engine.trainable import Computation
from pipeline.errors import DataError
from pipeline.metrics.base import build_metrics
from pipeline.user_code.plugin_calls import each_answer
from pipeline.user_code.tracebacks import error_context

# Evaluates a phase: a verb of the runner stage.
Verb = Callable[[Context, Phase], Mapping[str, float]]


def evaluate_each(datasets: Sequence[str], evaluate_one: Callable[[str], dict[str, float]]) -> dict[str, float]:
    """The numbers of a dataset; of several, with ``<dataset>/`` before their names."""
    if len(datasets) == 1:
        return evaluate_one(datasets[0])
    return {f"{dataset}/{name}": value for dataset in datasets for name, value in evaluate_one(dataset).items()}


def report_evaluation(
    context: Context, phase: Phase, verb: Verb, reported_as: Callable[[str], str] = str
) -> dict[str, float]:
    """Call the plugins before and after a verb that evaluates a phase; its numbers, with those that plugins add.

    When the plugins are called after it, the numbers are in ``context["metrics"]``, by the names as which they are reported.

    Raises:
        DataError: it returned no numbers by name.
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
    # A verb of the user's own, and plugins of rank 0, may have others there; what is decided by them, all decide alike.
    numbers = current_world().broadcast(numbers)
    newest = context.peek("metrics").setdefault(phase.name, {})
    newest |= {reported_as(name): value for name, value in numbers.items()}
    hooks.after_validation(context=context, phase=phase.name, metrics=numbers)
    where = f"of phase '{phase.name}'"
    return {reported_as(name): as_number(value, f"metrics['{name}'] {where}") for name, value in numbers.items()}


def extend_metrics(context: Context, phase: str, metrics: dict[str, Any]) -> None:
    """Add the numbers of plugins to those that are about to be reported.

    Raises:
        DataError: a plugin returned something else than numbers by name, or a name that another has returned.
    """
    values = {"context": context, "phase": phase, "metrics": metrics}
    owners: dict[str, str] = {}
    # Nothing is added before all were asked, so their order does not matter.
    with context.set_gradients_aside("extend_metrics"):
        answers = list(each_answer(context["hooks"].extend_metrics, values))
    for plugin, added in answers:
        where = f"plugin '{plugin}', hook extend_metrics"
        if not isinstance(added, Mapping | None):
            raise DataError(f"{where} returned a {type(added).__name__}; return a dict of numbers by name")
        for name, value in (added or {}).items():
            if (owner := owners.setdefault(str(name), plugin)) != plugin:
                what = f"{where} returned '{name}', which plugin '{owner}' returned too"
                raise DataError(f"{what}; have the class put its plugin_name into the name")
            metrics[str(name)] = as_number(value, f"{where}: '{name}'")


class Validation:
    """Validates the phases of a runner, each once in an iteration.

    Args:
        context: after network and startup.
        runner: whose phases they are.
        phases: the phases.

    Attributes:
        metrics: phase -> name -> metric.
        best: what ``keep_best`` watches; None: nothing.
        phases: the names of those that have validation data.
        validated: phase -> the iteration in which it was last validated; without those that were trained after it.
        running: whether a validation is not over; a resumed run makes it again.
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
        self._unreported = set(self.phases)

    def is_needed(self, phase: PhaseSchema, *, last: bool) -> bool:
        """Whether a phase has validation data, and was not validated in this iteration; ``last``: with these weights."""
        done = phase.name in self.validated if last else self.validated.get(phase.name) == self.counters["iteration"]
        return bool(phase.valid_datasets) and not done

    def outdate(self, brain: Computation, *, always: bool = False) -> None:
        """A pass has changed the weights of a Brain: its phases are to be validated again.

        Args:
            brain: what was trained.
            always: whether that includes phases that were validated in this iteration.
        """
        for name, entry in self.context["model"].items():
            validated_now = self.validated.get(name) == self.counters["iteration"]
            if entry["brain"] is brain and (always or not validated_now):
                self.validated.pop(name, None)

    def outdate_all(self) -> None:
        """An iteration has changed the weights: all phases are to be validated again."""
        self.validated.clear()

    def run(self, phase: Phase, verb: Verb, *, last: bool, keeps_best: bool = True) -> dict[str, float]:
        """Validate a phase with a verb of the stage; its numbers, by the names as which they are reported.

        Args:
            phase: what is validated.
            verb: evaluates it.
            last: whether the validation is of no interval; schedules do not get its numbers.
            keeps_best: whether it may be the best.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked the run to end.
        """
        self.running = True
        numbers = report_evaluation(self.context, phase, verb, self.schemas[phase.name].valid_name)
        self.validated[phase.name], self.running = self.counters["iteration"], False
        for scheduler in () if last else (phase.get("optim_schedulers") or {}).values():
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
            before: that iteration.
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
        """What a checkpoint of this iteration keeps."""
        best = self.best.state_dict(self.counters["iteration"]) if self.best else None
        # The end of training makes an interrupted last validation again.
        running = self.running and not self.context.is_last_validation
        return {"validated": self.validated, "running": running, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that state."""
        self.validated, self.running = state["validated"], state["running"]
        if self.best and state["best"]:
            self.best.load_state_dict(state["best"])
            self.context["best"] = None if math.isnan(self.best.value) else self.best.as_dict()
