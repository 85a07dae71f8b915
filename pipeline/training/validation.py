"""The validation of a training: its numbers, and which of them are the best so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.errors import DataError, one_of
from pipeline.training.batch_brain import Stage
from pipeline.training.brain import Brain
from pipeline.training.evaluation import evaluate_with_hooks
from pipeline.training.metrics.base import build_metrics
from pipeline.training.phase import pass_loader
from pipeline.user_code.tracebacks import error_context


class BestEntry(NamedTuple):
    """A number, and the iteration in which it was reported."""

    value: float
    iteration: int


class BestTracker:
    """Remembers when a number was best, and which checkpoints are the best that were saved.

    Args:
        metric: its name, as the validation reports it: ``valid_loss``.
        mode: ``min`` or ``max``: which is better.
        count: how many checkpoints are kept.

    Attributes:
        value: the best so far; nan before the first.
        iteration: when it was; 0 before the first.
        pending: moments that are to have a checkpoint, which may not be on disk yet.
        kept: those of which there is one, best first, at most ``count``.
    """

    def __init__(self, metric: str, mode: str, count: int = 1) -> None:
        self.metric, self.mode, self.count = metric, mode, count
        self.value, self.iteration = math.nan, 0
        self.pending: list[BestEntry] = []
        self.kept: list[BestEntry] = []
        self._reported: dict[str, str] = {}

    def improves(self, phase: str, numbers: Mapping[str, float], iteration: int) -> bool:
        """Whether the numbers of a phase are better than all before, which they then replace; nan never is.

        Raises:
            DataError: another phase has reported the number too, which is not to be compared with this one's.
        """
        other = self._reported.get(self.metric, phase) if self.metric in numbers else phase
        if other != phase:
            both = f"which phases '{other}' and '{phase}' both report"
            raise DataError(f"keep_best watches '{self.metric}', {both}; name a metric that only one of them has")
        self._reported |= dict.fromkeys(numbers, phase)
        value = numbers.get(self.metric, math.nan)
        if math.isnan(value):
            return False
        ranked = self._best_of([*self.kept, *self.pending])
        if len(ranked) < self.count or self._is_better(value, ranked[-1].value):
            self.pending.append(BestEntry(value, iteration))
        better = self._is_better(value, self.value)
        if better:
            self.value, self.iteration = value, iteration
        return better

    def deserves_checkpoint(self, iteration: int) -> bool:
        """Whether this iteration is one of the best."""
        return any(each.iteration == iteration for each in self.pending)

    def kept_with(self, iteration: int) -> list[BestEntry]:
        """What is kept once there is a checkpoint of an iteration."""
        return self._best_of([*self.kept, *(each for each in self.pending if each.iteration == iteration)])

    def saved(self, iteration: int) -> None:
        """There is a checkpoint of an iteration now; of one before it there will be none any more."""
        self.kept = self.kept_with(iteration)
        self.pending = [each for each in self.pending if each.iteration > iteration]

    def check_reported(self) -> None:
        """After every phase has been validated.

        Raises:
            DataError: none of them reports the number.
        """
        if self.metric not in self._reported:
            known = one_of(self.metric, self._reported)
            raise DataError(f"keep_best watches '{self.metric}', which no validation reports{known}")

    def as_dict(self) -> dict[str, Any]:
        """For ``context["best"]``."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "iteration": self.iteration}

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """The best so far, what is kept of it once there is a checkpoint of this iteration, and who reports what."""
        kept = [list(each) for each in self.kept_with(iteration)]
        return {"value": self.value, "iteration": self.iteration, "kept": kept, "reported": dict(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another."""
        self.value, self.iteration, self._reported = state["value"], state["iteration"], dict(state["reported"])
        self.kept = [BestEntry(*each) for each in state["kept"]][: self.count]

    def _best_of(self, moments: list[BestEntry]) -> list[BestEntry]:
        # Of equals the older stays: Python's sort keeps their order.
        return sorted(moments, key=lambda each: each.value, reverse=self.mode == "max")[: self.count]

    def _is_better(self, value: float, other: float) -> bool:
        return math.isnan(other) or (value > other if self.mode == "max" else value < other)


class Validation:
    """Validates the phases of a runner, each once in an iteration.

    Args:
        context: after network and startup.
        runner: whose phases they are.
        phases: the phases.

    Attributes:
        judges: phase -> name -> the metric that judges it.
        best: what ``keep_best`` watches; None: nothing.
        validated: phase -> the iteration in which it was last validated; without those that were trained after it.
        running: whether one has begun and is not over; a resumed run makes it again.
    """

    def __init__(self, context: Context, runner: RunnerSchema, phases: list[PhaseSchema]) -> None:
        self.context = context
        self.runner = runner
        self.judges = {}
        for phase in phases:
            with error_context(f"phase.{phase.name}"):
                self.judges[phase.name] = build_metrics(phase.metrics, context["config"].workspace)
        keep = runner.keep_best
        self.best = BestTracker(keep.metric, keep.mode, keep.count) if keep else None
        self.validated: dict[str, int] = {}
        self.running = False
        self._silent = {phase.name for phase in phases if phase.valid_dataset_name}

    def is_needed(self, phase: PhaseSchema, *, last: bool) -> bool:
        """Whether there is anything to validate a phase on, and this was not done in this iteration, or for these weights."""
        done = phase.name in self.validated if last else self.validated.get(phase.name) == self._iteration
        return phase.valid_dataset_name is not None and not done

    def outdate(self, brain: Brain) -> None:
        """A pass has changed the weights of a Brain: what was validated before its last iteration is to be again."""
        for name, entry in self.context["model"].items():
            if entry["brain"] is brain and self.validated.get(name) != self._iteration:
                self.validated.pop(name, None)

    def run(self, phase: PhaseSchema, epoch: int, *, last: bool) -> dict[str, float]:
        """The numbers of a phase, with ``valid_`` before their names; the last ones are no interval's, and no schedule's.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked the run to end.
        """
        self.running = True
        entry = self.context["model"][phase.name]
        name = phase.dataset_name if self.runner.overfit_batches else phase.valid_dataset_name
        loader = pass_loader(name or "", self.runner, self.context)
        judges = self.judges[phase.name]
        numbers = evaluate_with_hooks(
            self.context, phase.name, entry["brain"], loader, Stage.VALID, judges, epoch=epoch
        )
        self.validated[phase.name], self.running = self._iteration, False
        named = {f"valid_{name}": value for name, value in numbers.items()}
        for scheduler in () if last else entry["optim_schedulers"].values():
            scheduler.take_metrics(named)
        if self.best:
            self._judge(self.best, phase.name, named)
        return named

    @property
    def _iteration(self) -> int:
        iteration: int = self.context["train_state"]["iteration"]
        return iteration

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this iteration keeps."""
        best = self.best.state_dict(self._iteration) if self.best else None
        return {"validated": self.validated, "running": self.running, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self.validated, self.running = state["validated"], state["running"]
        if self.best and state["best"]:
            self.best.load_state_dict(state["best"])
            self.context["best"] = self.best.as_dict() if self.best.iteration else None

    def _judge(self, best: BestTracker, phase: str, numbers: dict[str, float]) -> None:
        if best.improves(phase, numbers, self._iteration):
            self.context["best"] = best.as_dict()
        self._silent.discard(phase)
        if not self._silent:
            best.check_reported()
