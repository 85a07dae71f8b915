"""The default runner stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.brain.brain import Brain, Stage
from pipeline.brain.internals import overridden
from pipeline.brain.run_options import run_options_for
from pipeline.brain.start import prepare_for_evaluation
from pipeline.checkpoint.initial_weights import load_next
from pipeline.checkpoint.storage import short
from pipeline.compute.evaluation import batches_of, evaluate
from pipeline.compute.validation import evaluate_each, report_evaluation
from pipeline.config.schema import PredictionSettings
from pipeline.context import Context, Phase
from pipeline.data.loader import for_evaluation, sample_indices
from pipeline.engine.pass_engine import engine_of
from pipeline.engine.phase import pass_loader, phase_errors, phase_of
from pipeline.metrics.base import build_metrics
from pipeline.stages.base import RunnerBase
from pipeline.user_code.class_path import load_named
from pipeline.user_code.plugins import prediction_formats


class Runner(RunnerBase):
    """Trains (``class: train``), or evaluates (``class: infer``) one or several checkpoints.

    A subclass may override any of these methods alone. The loop, which the context's ``epochs``, ``batches``,
    ``validate`` and ``save`` belong to, decides when each is called: whoever overrides one without calling ``super()``
    loses what that method does, and nothing else.

    Attributes:
        checkpoint: the name of the one of several that is evaluated, and of the folder of its predictions.
    """

    checkpoint = ""

    has_loop_methods = True
    reads = ("dataset", "model")
    writes = ("current_epoch", "metrics")

    def run(self, context: Context) -> None:
        """Train, epoch after epoch, or evaluate every phase of the runner."""
        if context["is_infer"]:
            self._infer(context)
            return
        engine = engine_of(context)
        own = overridden(self, Runner, "train_epoch", "train_phase")
        why = f"{type(self).__name__}.{own[0]} is of its own" if own else ""
        engine.plan_schedules(why)
        for epoch in context.epochs():
            self.train_epoch(context, epoch)

    def train_epoch(self, context: Context, epoch: int) -> None:
        """Train the phases in turn; each is validated, if that is due after this epoch."""
        engine, counters = engine_of(context), context["train_state"]
        phases = list(engine.phases.values())
        for index, phase in enumerate(phases):
            counters["phase_index"] = index
            self.train_phase(context, phase)
            is_over = engine.end_phase(phase)
            if phase is not phases[-1] and not engine.cut_short:
                counters["phase_index"] = index + 1
                if is_over:
                    engine.end_between_phases()
                else:
                    engine.save_if(False)
            if is_over:
                break

    def train_phase(self, context: Context, phase: Phase) -> dict[str, float]:
        """One pass over the data of a phase: ``train_batch`` on each batch; ``loss`` and what was logged."""
        training = engine_of(context).train_pass(phase)
        if overridden(self, Runner, "train_batch"):
            name = f"{type(self).__name__}.train_batch"
            training.run(training.custom(partial(self.train_batch, context, phase), name))
        elif training.updater.is_plain(training.brain):
            training.run(training.trainable.fit_batch)
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
        return engine_of(context).evaluate(context, phase)

    def is_over(self, context: Context) -> bool:
        """Whether training is over: after as many epochs, iterations or updates as the config says.

        It is called after each validation, pass and epoch, and where a limit may be reached.
        """
        engine = engine_of(context)
        return engine.schedule.over(engine.counters)

    def _infer(self, context: Context) -> None:
        """Evaluate every phase, for each checkpoint; ``metrics`` are the numbers of the last one."""
        context["current_epoch"], context["best"] = 0, None
        checkpoints: dict[Path, dict[str, Any]] = context["checkpoints"]
        if not checkpoints:
            self._evaluate_phases(context)
        loaded = next(iter(checkpoints), None)
        for path in checkpoints:
            if path != loaded:
                counters = context["world"].all_gather(load_next(path, context["model"]))
                # One that is damaged on any rank is left out by all.
                if None in counters:
                    continue
                context["train_state"].update(counters[0] or {})
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

        The data come in the order of the dataset. With ``predictions``, those of every sample are
        written to a file, one for each of several datasets; then data without labels have no loss.
        """
        runner = context["runner"]
        schema = next(schema for schema in context["config"].phases(runner) if schema.name == phase.name)
        brain: Brain = phase["brain"]
        prepare_for_evaluation(brain, phase.name, context, run_options_for(runner, context["device"]))
        datasets = schema.valid_datasets or [schema.dataset_name or ""]
        metrics = build_metrics(schema.metrics, context["config"].workspace, f"phase.{schema.name}.metrics")
        settings, to_write = runner.predictions, None
        if settings and settings.source:
            address = f"runner.{runner.name}.predictions.from"
            to_write = load_named(settings.source, address, "readable", context["config"])

        def evaluate_one(dataset: str) -> dict[str, float]:
            loader = pass_loader(dataset, runner, context)
            if settings is not None:
                loader = for_evaluation(loader, every_sample=True)
            with batches_of(loader, context["device"]) as batches:
                if settings is None:
                    return evaluate(brain, batches, Stage.TEST, metrics, data=f"'{dataset}'")
                # A name of a phase or dataset has no dot.
                name = phase.name if len(datasets) == 1 else f"{phase.name}.{dataset}"
                path = self._predictions_path(context, settings, name)
                # Rank 0 writes those of all ranks.
                is_main = context["world"].is_main
                with prediction_formats()[settings.format].load()(path) if is_main else nullcontext(_nothing) as write:
                    observe = with_indices(write, sample_indices(loader))
                    arguments = brain, batches, Stage.TEST, metrics, observe
                    numbers = evaluate(*arguments, to_write=to_write, data=f"'{dataset}'")
            logger.info(f"predictions of phase '{phase.name}' are in {short(path)}")
            return numbers

        return evaluate_each(datasets, evaluate_one)

    def _predictions_path(self, context: Context, settings: PredictionSettings, name: str) -> Path:
        """The file for the predictions of a phase or dataset; of several checkpoints, in the folder of the one that is evaluated."""
        folder: Path = context["run_dir"] / context["runner_name"]
        path = Path(settings.path) if settings.path else folder / f"{name}_predictions.{settings.format}"
        return path.parent / self.checkpoint / path.name


def _nothing(predictions: Any, target: Any, batch: Any, indices: Any) -> None:
    """Write nothing of a batch."""


def with_indices(
    write: Callable[[Any, Any, Any, Sequence[int] | None], None],
    batches: Iterator[Sequence[int]] | None,
) -> Callable[[Any, Any, Any], None]:
    """Return a function that writes each batch with the indices of its samples.

    Args:
        write: called with (predictions, target, batch, indices) of each batch.
        batches: the indices of each; None: unknown.
    """

    def write_batch(predictions: Any, target: Any, batch: Any) -> None:
        indices = None if batches is None else next(batches)
        write(predictions, target, batch, indices)

    return write_batch
