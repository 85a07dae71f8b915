"""One pass without training: the loss and the metrics of a phase on some data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeline.checkpoint.storage import as_number
from pipeline.context import Context
from pipeline.data.batch import on_device, shape_of
from pipeline.data.workers import supervised
from pipeline.errors import DataError
from pipeline.signals import SHUTDOWN
from pipeline.training.batch_brain import BatchBrain, Stage
from pipeline.training.meters import Meters
from pipeline.training.metrics.base import Mean, Metric

Observer = Callable[[Any, Any], None]

"""Called with (predictions, target) of each evaluated batch."""


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """A module in evaluation mode and no gradients, until the block ends; then each part is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def evaluating(brain: BatchBrain) -> Iterator[None]:
    """A Brain's modules so; what is logged and counted in the block is kept apart from the pass around it."""
    outside, brain._pass_numbers = brain._pass_numbers, Meters()
    step, brain.step = brain.step, 0
    try:
        with in_evaluation_mode(brain.modules):
            yield
    finally:
        brain._pass_numbers, brain.step = outside, step


def evaluate(
    brain: BatchBrain,
    batches: Iterable[Any],
    stage: Stage,
    metrics: Mapping[str, Metric],
    observe: Observer | None = None,
    epoch: int | None = None,
) -> dict[str, float]:
    """One pass without training.

    Args:
        brain: computes predictions and losses.
        batches: on their device.
        stage: VALID or TEST.
        metrics: name -> metric; reset first.
        observe: called with every batch's predictions and target.
        epoch: the one that is validated; None in a test.

    Returns:
        ``loss``, the metrics by name, and what the Brain has logged.
    """
    if (metrics or observe) and not brain._gives_predictions:
        own = f"{type(brain).__name__} has its own evaluate_batch, which gives no predictions to judge or write"
        raise DataError(f"{own}; leave out metrics and write_predictions, or use self.log in it")
    loss = Mean()
    for metric in metrics.values():
        metric.reset()
    with evaluating(brain):
        brain.on_stage_start(stage, epoch)
        for batch in batches:
            # Nothing is saved: the numbers would be those of half the data. The pass is made again.
            SHUTDOWN.raise_if_requested()
            brain.step += 1
            samples = brain._pass_numbers.samples = brain._samples(batch)
            predictions, losses = brain._evaluate_batch(batch, stage)
            loss.add_mean(brain._reported_loss(losses), samples)
            target = type(brain).target(brain, batch) if metrics or observe else None
            for metric in metrics.values():
                metric.update(predictions, target)
            if observe:
                observe(predictions, target)
        if not loss.sums:
            raise DataError("the evaluated dataset gave no batch; check it")
        mean = loss.compute()
        judged = {name: _number(metric.compute(), name, metric) for name, metric in metrics.items()}
        brain.on_stage_end(stage, mean, epoch)
        return brain._with_logged({"loss": mean, **judged})


def _number(value: Any, name: str, metric: Metric) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"metric '{name}': {type(metric).__name__}.compute returned {shape_of(value)}"
        raise DataError(f"{what}; return a number, or a tensor with one element") from error


def evaluate_with_hooks(
    context: Context,
    phase: str,
    brain: BatchBrain,
    loader: Any,
    stage: Stage,
    metrics: Mapping[str, Metric],
    observe: Observer | None = None,
    epoch: int | None = None,
) -> dict[str, float]:
    """Evaluate a phase with the plugins told before and after."""
    hooks = context["hooks"]
    hooks.before_validation(context=context, phase=phase)
    batches: Iterable[Any] = on_device(loader, context["device"])
    if getattr(loader, "num_workers", 0):
        batches = SHUTDOWN.interruptible(batches)
    with supervised(batches):
        numbers = evaluate(brain, batches, stage, metrics, observe, epoch)
    hooks.after_validation(context=context, phase=phase, metrics=numbers)
    return {name: as_number(value, f"metrics['{name}'] of phase '{phase}'") for name, value in numbers.items()}
