"""The validation of a training: its numbers, and whether they are the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.training.best import Best
from pipeline.training.brain import Brain
from pipeline.training.configured import pass_loader
from pipeline.training.evaluation import watched
from pipeline.training.metrics import build_metrics
from pipeline.training.passes import Stage
from pipeline.user_code import belonging_to


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
            with belonging_to(f"phase.{phase.name}"):
                self.judges[phase.name] = build_metrics(phase.metrics, context["config"].workspace)
        keep = runner.keep_best
        self.best = Best(keep.metric, keep.mode, keep.count) if keep else None
        self.validated: dict[str, int] = {}
        self.running = False
        self._silent = {phase.name for phase in phases if phase.valid_dataset_name}

    def comes(self, phase: PhaseSchema, *, last: bool) -> bool:
        """Whether there is anything to validate a phase on, and this was not done in this iteration, or for these weights."""
        done = phase.name in self.validated if last else self.validated.get(phase.name) == self._iteration
        return phase.valid_dataset_name is not None and not done

    def outdate(self, brain: Brain) -> None:
        """A pass has changed the weights of a Brain: what was validated before its last iteration is to be again."""
        for name, entry in self.context["model"].items():
            if entry["brain"] is brain and self.validated.get(name) != self._iteration:
                self.validated.pop(name, None)

    def of(self, phase: PhaseSchema, epoch: int, *, last: bool) -> dict[str, float]:
        """The numbers of a phase, with ``valid_`` before their names; the last ones are no interval's, and no schedule's.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked the run to end.
        """
        self.running = True
        entry = self.context["model"][phase.name]
        name = phase.dataset_name if self.runner.overfit_batches else phase.valid_dataset_name
        loader = pass_loader(name or "", self.runner, self.context)
        judges = self.judges[phase.name]
        numbers = watched(self.context, phase.name, entry["brain"], loader, Stage.VALID, judges, epoch=epoch)
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

    def _judge(self, best: Best, phase: str, numbers: dict[str, float]) -> None:
        if best.improves(phase, numbers, self._iteration):
            self.context["best"] = best.as_dict()
        self._silent.discard(phase)
        if not self._silent:
            best.check_reported()
