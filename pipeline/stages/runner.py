"""The default runner stage."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from torch import Tensor

from pipeline.checkpoint.initial_weights import load_next
from pipeline.checkpoint.storage import finite, storing
from pipeline.config.schema import RunnerSchema
from pipeline.context import Context, Phase
from pipeline.errors import DataError
from pipeline.stages.base import RunnerBase
from pipeline.training.brain import Brain, Stage
from pipeline.training.evaluation import evaluate_each, evaluate_loader, report_evaluation
from pipeline.training.loop import loop_of
from pipeline.training.metrics.base import build_metrics
from pipeline.training.phase import pass_loader, phase_errors, phase_of, refuse_short_schedules, run_options_for
from pipeline.training.updater import is_plain


class Runner(RunnerBase):
    """Trains (``class: train``), or evaluates (``class: infer``) one or several checkpoints.

    A subclass may override any of these methods alone. The loop, which the context's ``epochs``, ``batches``,
    ``validate`` and ``save`` belong to, decides when each is called: whoever overrides one without calling ``super()``
    loses what that method does, and nothing else.

    Attributes:
        checkpoint: the name of the one of several that is evaluated, and of the folder of its predictions.
    """

    checkpoint = ""

    _has_verbs = True
    reads = ("dataset", "model")
    writes = ("current_epoch", "metrics")

    def run(self, context: Context) -> None:
        """Train, epoch after epoch, or evaluate every phase of the runner."""
        if context["is_infer"]:
            self._infer(context)
            return
        loop = loop_of(context)
        refuse_short_schedules(loop.runner, list(loop.schemas.values()), context)
        for epoch in context.epochs():
            self.train_epoch(context, epoch)

    def train_epoch(self, context: Context, epoch: int) -> None:
        """Train the phases in turn; each is validated, if that is due after this epoch."""
        loop, counters = loop_of(context), context["train_state"]
        phases = list(loop.phases.values())
        for index, phase in enumerate(phases):
            counters["phase_index"] = index
            self.train_phase(context, phase)
            if loop.end_phase(phase):
                break
            if phase is not phases[-1]:
                counters["phase_index"] = index + 1
                loop.save_if(False)

    def train_phase(self, context: Context, phase: Phase) -> dict[str, float]:
        """One pass over the data of a phase: ``train_batch`` on each batch; ``loss`` and what was logged."""
        training = loop_of(context).train_pass(phase)
        if type(self).train_batch is not Runner.train_batch:
            name = f"{type(self).__name__}.train_batch"
            training.run(training.custom(partial(self.train_batch, context, phase), name))
        elif is_plain(training.brain, training.updater):
            training.run(phase.brain.fit_batch)
        else:
            training.run(training.custom(phase.updater.update, f"{type(phase.updater).__name__}.update"))
        return training.numbers

    def train_batch(self, context: Context, phase: Phase, batch: Any) -> Any:
        """Train on one batch; its loss, several by name, or None.

        Where no subclass overrides this, the pass calls the updater itself.
        """
        return phase.updater.update(batch)

    def validate(self, context: Context, phase: Phase) -> dict[str, float]:
        """The loss and the metrics of a phase's validation data, as the weights are now."""
        return loop_of(context).evaluate(context, phase)

    def is_over(self, context: Context) -> bool:
        """Whether training is over: after as many epochs, iterations or updates as the config says.

        It is called after each validation, pass and epoch, and where a limit may be reached.
        """
        loop = loop_of(context)
        return loop.schedule.over(loop.counters)

    def _infer(self, context: Context) -> None:
        """Evaluate every phase, for each checkpoint; ``metrics`` are the numbers of the last one."""
        context["current_epoch"], context["best"] = 0, None
        checkpoints: dict[Path, dict[str, Any]] = context["checkpoints"]
        if not checkpoints:
            self._evaluate_phases(context)
        loaded = next(iter(checkpoints), None)
        for path in checkpoints:
            if path != loaded:
                counters = load_next(path, context["model"])
                if counters is None:
                    continue
                context["train_state"].update(counters)
            self.checkpoint = path.name if len(checkpoints) > 1 else ""
            checkpoints[path] = self._evaluate_phases(context)

    def _evaluate_phases(self, context: Context) -> dict[str, dict[str, float]]:
        """Evaluate every phase, as the weights are now."""
        numbers: dict[str, dict[str, float]] = {}
        context["metrics"] = numbers
        for schema in context["config"].phases(context["runner"]):
            with phase_errors(schema.name):
                numbers[schema.name] = report_evaluation(context, phase_of(schema.name, context), self.evaluate)
        return numbers

    def evaluate(self, context: Context, phase: Phase) -> dict[str, float]:
        """The loss and the metrics of a phase's ``valid_dataset_name``, else of its ``dataset_name``.

        With ``write_predictions``, its predictions are written to a file, those of each of several datasets to one.
        """
        runner = cast("RunnerSchema", context["runner"])
        schema = next(schema for schema in context["config"].phases(runner) if schema.name == phase.name)
        brain: Brain = phase["brain"]
        brain._apply_run_options(run_options_for(runner, context["device"]))
        type(brain).bind(brain, phase.name, {}, context)
        brain._place_modules()
        datasets = schema.valid_datasets or [schema.dataset_name or ""]
        metrics = build_metrics(schema.metrics, context["config"].workspace)

        def evaluate_one(dataset: str) -> dict[str, float]:
            loader, device = pass_loader(dataset, runner, context), context["device"]
            if not runner.write_predictions:
                return evaluate_loader(brain, loader, device, Stage.TEST, metrics)
            folder: Path = context["run_dir"] / context["runner_name"] / self.checkpoint
            with storing(folder):
                folder.mkdir(exist_ok=True)
            # A name of a phase or dataset has no dot.
            name = phase.name if len(datasets) == 1 else f"{phase.name}.{dataset}"
            with _Predictions(folder / f"{name}_predictions.jsonl") as predictions:
                return evaluate_loader(brain, loader, device, Stage.TEST, metrics, predictions)

        return evaluate_each(datasets, evaluate_one)


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
