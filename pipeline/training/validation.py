"""The validation of a training: its numbers, and whether they are the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.training.best import Best
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
        validated: phase -> the iteration in which it was last validated.
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
        self._watched = sum(bool(phase.valid_dataset_name) for phase in phases)

    def comes(self, phase: PhaseSchema) -> bool:
        """Whether there is anything to validate a phase on, and this was not done in this iteration."""
        iteration = self.context["train_state"]["iteration"]
        return phase.valid_dataset_name is not None and self.validated.get(phase.name) != iteration

    def of(self, phase: PhaseSchema, epoch: int) -> dict[str, float]:
        """The numbers of a phase, with ``valid_`` before their names.

        Raises:
            StoppedError, KeyboardInterrupt: a signal has asked the run to end.
        """
        self.running = True
        entry = self.context["model"][phase.name]
        name = phase.dataset_name if self.runner.overfit_batches else phase.valid_dataset_name
        loader = pass_loader(name or "", self.runner, self.context)
        judges = self.judges[phase.name]
        numbers = watched(self.context, phase.name, entry["brain"], loader, Stage.VALID, judges, epoch=epoch)
        self.validated[phase.name], self.running = self.context["train_state"]["iteration"], False
        named = {f"valid_{name}": value for name, value in numbers.items()}
        for scheduler in entry["optim_schedulers"].values():
            scheduler.take_metrics(named)
        if self.best:
            self._judge(self.best, phase.name, named)
        return named

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this iteration keeps."""
        best = self.best.state_dict(self.context["train_state"]["iteration"]) if self.best else None
        return {"validated": self.validated, "running": self.running, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self.validated, self.running = state["validated"], state["running"]
        if self.best and state["best"]:
            self.best.load_state_dict(state["best"])
            self.context["best"] = self.best.as_dict() if self.best.iteration else None

    def _judge(self, best: Best, phase: str, numbers: dict[str, float]) -> None:
        if best.improves(phase, numbers, self.context["train_state"]["iteration"]):
            self.context["best"] = best.as_dict()
        if len(self.validated) == self._watched:
            best.check_reported()
