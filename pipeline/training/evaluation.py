"""One pass without training: the loss and the metrics of a phase on some data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.context import Context
from pipeline.data.batch import on_device, uncountable
from pipeline.errors import DataError
from pipeline.training.brain import Brain, Stage
from pipeline.training.metrics import Mean, Metric

Observer = Callable[[Any, Any], None]
"""Called with (predictions, target) of each evaluated batch."""


@contextmanager
def evaluating(brain: Brain) -> Iterator[None]:
    """Modules in evaluation mode and no gradients, until the block ends; then each is in the mode that it was in."""
    modes = [(module, module.training) for module in brain.modules.modules()]
    brain.modules.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(
    brain: Brain, batches: Iterable[Any], stage: Stage, metrics: Mapping[str, Metric], observe: Observer | None = None
) -> dict[str, float]:
    """One pass without training.

    Args:
        brain: computes predictions and losses.
        batches: on their device.
        stage: VALID or TEST.
        metrics: name -> metric; reset first.
        observe: called with every batch's predictions and target.

    Returns:
        ``loss`` and the metrics by name.
    """
    loss = Mean()
    for metric in metrics.values():
        metric.reset()
    with evaluating(brain):
        for batch in batches:
            predictions, losses = brain.evaluate_batch(batch, stage)
            loss.add(losses["loss"], brain.count_samples(batch) or uncountable(batch))
            target = brain.target(batch) if metrics or observe else None
            for metric in metrics.values():
                metric.update(predictions, target)
            if observe:
                observe(predictions, target)
    if not loss.count:
        raise DataError("the evaluated dataset gave no batch; check it")
    return {"loss": loss.compute(), **{name: float(metric.compute()) for name, metric in metrics.items()}}


def watched(
    context: Context,
    phase: str,
    brain: Brain,
    loader: Any,
    stage: Stage,
    metrics: Mapping[str, Metric],
    observe: Observer | None = None,
) -> dict[str, float]:
    """Evaluate a phase with the plugins told before and after."""
    hooks = context["hooks"]
    hooks.before_validation(context=context, phase=phase)
    numbers = evaluate(brain, on_device(loader, context["device"]), stage, metrics, observe)
    hooks.after_validation(context=context, phase=phase, metrics=numbers)
    return numbers
