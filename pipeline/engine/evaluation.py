"""One pass without training: the loss and the metrics of a phase; validation, and which of its numbers are the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeline.checkpoint import modes
from pipeline.checkpoint.gradients import GradientsSetAside
from pipeline.data.batch import EmptySlice, count_samples, is_countable, is_unlabelled, on_device
from pipeline.data.loader import for_evaluation, without_state
from pipeline.data.workers import supervise_workers
from pipeline.distributed.strategy import broadcast_tensors
from pipeline.distributed.world import World, current_world
from pipeline.engine.trainable import Computation, Stage, StepRecord, trainable_of
from pipeline.errors import DataError, DivergedError
from pipeline.metrics.base import Mean, Metric, needs_target
from pipeline.metrics.ranks import Judges, computed, in_step
from pipeline.optim.losses import Losses
from pipeline.signals import SHUTDOWN


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients until the block ends; then each module returns to its earlier mode."""
    with modes.in_evaluation_mode(module), torch.no_grad():
        yield


@contextmanager
def evaluating(brain: Computation, step: int = 0) -> Iterator[StepRecord]:
    """The same for a Brain; what it logs, its step count and its gradients are separate from those of the pass around it.

    Args:
        brain: the Brain.
        step: how many batches were evaluated before.

    Yields:
        The record of the active batch.
    """
    apart = trainable_of(brain).evaluating(step)
    with apart as record, in_evaluation_mode(brain.modules), GradientsSetAside(brain.modules.parameters()):
        yield record


def evaluate(
    brain: Computation,
    batches: Iterable[Any],
    stage: Stage,
    metrics: Mapping[str, Metric],
    observe: Callable[[Any, Any, Any], None] | None = None,
    epoch: int | None = None,
    to_write: Callable[[Any, Any], Any] | None = None,
    world: World | None = None,
    *,
    data: str = "the evaluated dataset",
) -> dict[str, float]:
    """One pass without training, on all ranks: each has batches of its own, and all get the same numbers.

    Args:
        brain: computes predictions and losses.
        batches: on their device.
        stage: VALID or TEST.
        metrics: name -> metric; reset first.
        observe: called with (predictions, target, batch) of every batch. Only where it is, data may have no labels: then
            there is no loss, and the target may be None.
        epoch: the one that is validated; None in a test.
        to_write: makes of (predictions, batch) what ``observe`` gets, in place of the Brain's
            ``readable``. Metrics get what ``readable`` returns in any case.
        world: the ranks that evaluate together; None: all.
        data: what is evaluated, for the message that it gave no batch.

    Returns:
        ``loss``, if one was computed, the metrics by name, and what the Brain has logged.

    Raises:
        DataError: no rank has a batch.
    """
    trainable = trainable_of(brain)
    if (metrics or observe) and not trainable.gives_predictions:
        message = f"{type(brain).__name__} has its own evaluate_batch, which gives no predictions to judge or write"
        raise DataError(f"{message}; leave out metrics and predictions, or use self.log in it")
    loss, average = Mean(), 0.0
    part_of = _part_of(brain, to_write, has_metrics=bool(metrics))
    has_batches = has_samples = False
    world = world or current_world()
    if trainable.strategy and world.size > 1:
        broadcast_tensors(brain.modules.buffers(), world)
    judges = Judges(metrics, observe, world, brain.device)
    needed = any(map(needs_target, metrics.values()))
    with evaluating(brain) as record:
        brain.on_stage_start(stage, epoch)
        for batch in in_step(batches, world) if judges.gathers else batches:
            # Nothing is saved: the numbers would be those of half the data. The pass is made again.
            SHUTDOWN.raise_if_requested()
            record.begin(batch)
            if isinstance(batch, EmptySlice):
                judges.judge()
                continue
            samples = record.count_samples()
            has_batches = True
            has_samples = has_samples or samples > 0
            if not samples:
                # Its loss and its metrics would be of nothing, but its rows have predictions.
                has_rows = bool(count_samples(batch)) or not is_countable(batch)
                if observe and has_rows:
                    part = part_of(trainable.predictions(batch, stage), batch, needed=False)
                    judges.judge(*part, has_samples=False)
                else:
                    judges.judge()
                continue
            predictions, losses = _outputs(brain, batch, stage, optional=observe is not None)
            if losses:
                reported = trainable.numbers.reported_loss(losses)
                loss.add_mean(reported, samples)
                if trainable.averages:
                    average = brain.update_average(reported, average)
            if metrics or observe:
                judges.judge(*part_of(predictions, batch, needed=needed))
        ranks = world.all_gather((has_batches, has_samples, bool(loss.sums)))
        if not any(rank[0] for rank in ranks):
            raise DataError(no_batch(data))
        # The mean over no samples is nan.
        reports_loss = any(rank[2] for rank in ranks) or not any(rank[1] for rank in ranks)
        own = {"loss": loss} if reports_loss else {}
        numbers = computed({**own, **metrics}, world)
        if own and trainable.averages:
            numbers["loss"] = math.fsum(world.all_gather(average)) / world.size
        brain.on_stage_end(stage, numbers.get("loss", math.nan), epoch)
        trainable.numbers.gather(0, world)
        return trainable.numbers.with_logged(numbers, trainable.where)


def no_batch(data: str) -> str:
    """Return the message for data without batches; ``data`` names them."""
    return f"{data} gave no batch; check the dataset, or drop_last with few samples"


def _part_of(
    brain: Computation,
    to_write: Callable[[Any, Any], Any] | None,
    *,
    has_metrics: bool,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return a function of predictions, batch and whether a target is needed.

    It returns what metrics judge, the target, the batch, and what is written.
    """

    def part(predictions: Any, batch: Any, *, needed: bool) -> tuple[Any, Any, Any, Any]:
        target = target_of(brain, batch, needed=needed)
        judged = None
        if has_metrics or to_write is None:
            judged = type(brain).readable(brain, predictions, batch)
        if to_write is None:
            return judged, target, batch, judged
        if has_metrics:
            # The function may change in place what metrics judge.
            predictions = tree_map_only(Tensor, torch.clone, predictions)
        return judged, target, batch, to_write(predictions, batch)

    return part


# What a Brain's ``compute_objectives`` raises for a batch that has no target.
_NO_TARGET = (LookupError, TypeError, ValueError, AttributeError, DataError)


def _outputs(brain: Computation, batch: Any, stage: Stage, *, optional: bool) -> tuple[Any, Losses]:
    """Predictions and losses of a batch; ``optional``: one without labels need not have losses."""
    trainable = trainable_of(brain)
    if not (optional and is_unlabelled(batch)):
        return trainable.predictions_and_losses(batch, stage)
    predictions = trainable.predictions(batch, stage)
    try:
        return predictions, trainable.losses(predictions, batch, stage)
    except DivergedError:
        raise
    except _NO_TARGET as error:
        if trainable.record.step == 1:
            logger.info(f"{trainable.where}no loss, since the data have no labels ({type(error).__name__}: {error})")
        return predictions, {}


def target_of(brain: Computation, batch: Any, *, needed: bool) -> Any:
    """What a Brain names as the target of a batch; None for one without, if it is not ``needed``."""
    try:
        return type(brain).target(brain, batch)
    except DataError as error:
        if needed:
            raise DataError(f"{error}; metrics need a target: leave them out where there is none") from error
        return None


def predict(brain: Computation, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """What a Brain computes for each batch, without losses: ``compute_forward`` and ``readable`` alone.

    The Brain is in evaluation mode, without gradients, only while it computes, and not while the caller uses the result.

    Args:
        brain: its modules are on the device; neither ``on_stage_start`` nor ``on_stage_end`` is called.
        batches: on any device.
        device: where they go.
    """
    trainable = trainable_of(brain)
    for step, batch in enumerate(on_device(batches, device)):
        with evaluating(brain, step) as record:
            record.begin(batch)
            predictions = type(brain).readable(brain, trainable.predictions(batch, Stage.TEST), batch)
        yield predictions


@contextmanager
def batches_of(loader: Any, device: torch.device, *, in_order: bool = True) -> Iterator[Iterable[Any]]:
    """The batches of a loader, to evaluate on in the block; a signal ends it.

    Args:
        loader: the loader.
        device: where the batches go.
        in_order: whether they come in the order of the dataset, whatever the loader does in training.
    """
    loader = for_evaluation(loader) if in_order else loader
    batches: Iterable[Any] = on_device(without_state(loader), device)
    if getattr(loader, "num_workers", 0):
        batches = SHUTDOWN.interruptible(batches)
    with supervise_workers(batches):
        yield batches
