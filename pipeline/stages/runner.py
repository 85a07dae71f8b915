"""The default runner stage."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from pipeline.checkpoint.initial_weights import load_next
from pipeline.checkpoint.storage import finite, storing
from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.errors import DataError
from pipeline.stages.base import RunnerBase
from pipeline.training.batch_brain import Stage
from pipeline.training.evaluation import evaluate_with_hooks
from pipeline.training.loop import TrainLoop
from pipeline.training.metrics.base import build_metrics
from pipeline.training.phase import pass_loader, phase_errors, phase_of, run_options_for


class Runner(RunnerBase):
    """Trains (``class: train``), or evaluates (``class: infer``) one or several checkpoints.

    Attributes:
        checkpoint: the name of the one of several that is evaluated, and of the folder of its predictions.
    """

    checkpoint = ""

    reads = ("dataset", "model")
    writes = ("current_epoch", "metrics")

    def run(self, context: Context) -> None:
        """Train or evaluate every phase of the runner."""
        context["best"] = None
        if context["is_infer"]:
            self.infer(context)
        else:
            TrainLoop(context).run()

    def infer(self, context: Context) -> None:
        """Evaluate every phase, for each checkpoint; ``metrics`` are the numbers of the last one."""
        context["current_epoch"] = 0
        checkpoints: dict[Path, dict[str, Any]] = context["checkpoints"]
        if not checkpoints:
            self.evaluate_phases(context)
        loaded = next(iter(checkpoints), None)
        for path in checkpoints:
            if path != loaded:
                counters = load_next(path, context["model"])
                if counters is None:
                    continue
                context["train_state"].update(counters)
            self.checkpoint = path.name if len(checkpoints) > 1 else ""
            checkpoints[path] = self.evaluate_phases(context)

    def evaluate_phases(self, context: Context) -> dict[str, dict[str, float]]:
        """Evaluate every phase on its ``valid_dataset_name``, else on its ``dataset_name``, as the weights are now."""
        config: Config = context["config"]
        runner = config.runner(context["runner_name"])
        context["metrics"] = {}
        for phase in config.phases(runner):
            with phase_errors(phase.name):
                context["metrics"][phase.name] = self.evaluate(phase, runner, context)
        numbers: dict[str, dict[str, float]] = context["metrics"]
        return numbers

    def evaluate(self, phase: PhaseSchema, runner: RunnerSchema, context: Context) -> dict[str, float]:
        """Evaluate one phase; with ``write_predictions``, write its predictions to a file."""
        loader = pass_loader(phase.valid_dataset_name or phase.dataset_name or "", runner, context)
        brain = phase_of(phase.name, context, "brain")["brain"]
        brain._apply_run_options(run_options_for(runner, context["device"]))
        type(brain).bind(brain, phase.name, {}, context)
        brain._place_modules()
        metrics = build_metrics(phase.metrics, context["config"].workspace)
        if not runner.write_predictions:
            return evaluate_with_hooks(context, phase.name, brain, loader, Stage.TEST, metrics)
        folder: Path = context["run_dir"] / context["runner_name"] / self.checkpoint
        with storing(folder):
            folder.mkdir(exist_ok=True)
        with _Predictions(folder / f"{phase.name}_predictions.jsonl") as predictions:
            return evaluate_with_hooks(context, phase.name, brain, loader, Stage.TEST, metrics, predictions)


class _Predictions:
    """Writes one JSON line per sample: its index in the order of the loader, prediction and target."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = 0
        with storing(path):
            self.file = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What was refused is tried again when it is closed, which another error has told of.
        with suppress(OSError) if kind else storing(self.path):
            self.file.close()

    def __call__(self, predictions: Any, target: Any) -> None:
        """Write a batch; reading the numbers makes a GPU wait, once per batch."""
        for prediction, expected in zip(_rows(predictions), _rows(target), strict=True):
            line = json.dumps(finite({"index": self.index, "prediction": prediction, "target": expected}))
            with storing(self.path):
                self.file.write(f"{line}\n")
            self.index += 1


def _rows(values: Any) -> list[Any]:
    if isinstance(values, Tensor):
        return values.tolist() if values.dim() else [values.item()]
    if isinstance(values, list | tuple) and not any(isinstance(value, Tensor) for value in values):
        return list(values)
    kind = type(values).__name__
    raise DataError(f"write_predictions: {kind} has no row per sample; return a tensor [batch, …], or set it to false")
