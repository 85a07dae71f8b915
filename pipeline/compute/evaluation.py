"""Evaluates and predicts: one pass over data without training."""

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
from pipeline.compute.stage import Stage
from pipeline.compute.trainable import Computation, StepRecord, trainable_of
from pipeline.data.batch import EmptySlice, count_samples, is_countable, is_unlabelled, on_device
from pipeline.data.loader import for_evaluation, without_state
from pipeline.data.workers import supervise_workers
from pipeline.distributed.strategy import broadcast_tensors
from pipeline.distributed.world import World, current_world
from pipeline.errors import DataError, DivergedError
from pipeline.metrics.base import Mean, Metric, needs_target
from pipeline.metrics.ranks import Judges, computed, in_step
from pipeline.optim.losses import Losses
from pipeline.signals import SHUTDOWN


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
    """Evaluate a Brain in one pass without training.

    All ranks call this. Each of them has different batches, and all get the same numbers.

    Args:
        brain: computes predictions and losses.
        batches: the batches of this rank, on their device.
        stage: VALID or TEST.
        metrics: name -> metric; reset first.
        observe: called with (predictions, target, batch) for every batch. With it, data may have no
            labels: then there is no loss, and the target may be None.
        epoch: the epoch that is validated; None in a test.
        to_write: makes from (predictions, batch) what ``observe`` gets, instead of the Brain's
            ``readable``. Metrics get what ``readable`` returns in any case.
        world: the ranks that evaluate together; None stands for all.
        data: the name of the data, for the message that they gave no batch.

    Returns:
        ``loss``, if one was computed, the metrics by name, and what the Brain has logged.

    Raises:
        DataError: no rank has a batch.
    """
    trainable = trainable_of(brain)
    if metrics or observe:
        _require_predictions(brain)
    loss = Mean()
    custom_average = trainable.custom_average()
    part_of = _part_of(brain, to_write, has_metrics=bool(metrics))
    has_batches = False
    has_samples = False
    world = world or current_world()
    if trainable.strategy and world.size > 1:
        broadcast_tensors(brain.modules.buffers(), world)
    judges = Judges(metrics, observe, world, brain.device)
    needs_targets = any(map(needs_target, metrics.values()))
    with evaluating(brain) as record:
        brain.on_stage_start(stage, epoch)
        for batch in in_step(batches, world) if judges.gathers else batches:
            # Nothing is saved here, since the numbers would be of half the data. A resumed run
            # repeats the pass.
            SHUTDOWN.raise_if_requested()
            record.begin(batch)
            if isinstance(batch, EmptySlice):
                judges.judge()
                continue
            samples = record.count_samples()
            has_batches = True
            has_samples = has_samples or samples > 0
            if not samples:
                # There is nothing to compute a loss or metrics over. But if the batch has rows,
                # they have predictions to observe.
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
                if custom_average:
                    custom_average.add(reported)
            if metrics or observe:
                judges.judge(*part_of(predictions, batch, needed=needs_targets))
        ranks = world.all_gather((has_batches, has_samples, bool(loss.sums)))
        if not any(rank_has_batches for rank_has_batches, _, _ in ranks):
            raise DataError(no_batch(data))
        # The mean over no samples is nan.
        reports_loss = any(has_loss for _, _, has_loss in ranks) or not any(
            rank_has_samples for _, rank_has_samples, _ in ranks
        )
        loss_by_name = {"loss": loss} if reports_loss else {}
        numbers = computed({**loss_by_name, **metrics}, world)
        if reports_loss and custom_average:
            numbers["loss"] = math.fsum(world.all_gather(custom_average.mean())) / world.size
        brain.on_stage_end(stage, numbers.get("loss", math.nan), epoch)
        trainable.numbers.gather(0, world)
        return trainable.numbers.with_logged(numbers, trainable.where)


def predict(brain: Computation, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield what a Brain computes for each batch, without losses.

    Only ``compute_forward`` and ``readable`` are called. The Brain is in evaluation mode, without
    gradients, only while it computes, and not while the caller uses the result.

    Args:
        brain: its modules are on the device; neither ``on_stage_start`` nor ``on_stage_end`` is
            called.
        batches: on any device.
        device: the device to which the batches are moved.
    """
    trainable = trainable_of(brain)
    for step, batch in enumerate(on_device(batches, device)):
        with evaluating(brain, step) as record:
            record.begin(batch)
            predictions = trainable.predictions(batch, Stage.TEST)
            predictions = type(brain).readable(brain, predictions, batch)
        yield predictions


@contextmanager
def batches_of(loader: Any, device: torch.device, *, in_order: bool = True) -> Iterator[Iterable[Any]]:
    """Give the batches of a loader for an evaluation in the block.

    A signal that ends the run ends them.

    Args:
        loader: the loader.
        device: the device to which the batches are moved.
        in_order: whether they come in the order of the dataset, whatever the loader does in
            training.

    Yields:
        The batches.
    """
    loader = for_evaluation(loader) if in_order else loader
    batches: Iterable[Any] = on_device(without_state(loader), device)
    if getattr(loader, "num_workers", 0):
        batches = SHUTDOWN.interruptible(batches)
    with supervise_workers(batches):
        yield batches


@contextmanager
def evaluating(brain: Computation, step: int = 0) -> Iterator[StepRecord]:
    """Put a Brain into evaluation mode without gradients until the block ends.

    A pass of training around the block is left as it is: the numbers that the Brain logs, its step
    count and its gradients are separate in the block.

    Args:
        brain: the Brain.
        step: how many batches were evaluated before.

    Yields:
        The record of the active batch.
    """
    with (
        trainable_of(brain).evaluating(step) as record,
        in_evaluation_mode(brain.modules),
        GradientsSetAside(brain.modules.parameters()),
    ):
        yield record


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode without gradients until the block ends.

    Then each of its submodules returns to its earlier mode.
    """
    with modes.in_evaluation_mode(module), torch.no_grad():
        yield


def target_of(brain: Computation, batch: Any, *, needed: bool) -> Any:
    """Return the target that a Brain finds in a batch.

    Args:
        brain: the Brain.
        batch: the batch.
        needed: whether a metric needs the target. Otherwise the target of a batch without one is
            None.

    Raises:
        DataError: the batch has no target, and it is needed.
    """
    try:
        return type(brain).target(brain, batch)
    except DataError as error:
        if needed:
            raise DataError(f"{error}; metrics need a target: leave them out where there is none") from error
        return None


def no_batch(data: str) -> str:
    """Return the message for data without batches.

    Args:
        data: the name of the data.
    """
    return f"{data} gave no batch; check the dataset, or drop_last with few samples"


def _require_predictions(brain: Computation) -> None:
    """Raise if an evaluated batch of a Brain has no predictions.

    Raises:
        DataError: its class overrides ``evaluate_batch``.
    """
    if trainable_of(brain).custom.evaluates:
        message = f"{type(brain).__name__} has its own evaluate_batch, which gives no predictions to judge or write"
        raise DataError(f"{message}; leave out metrics and predictions, or use self.log in it")


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


# The errors that ``compute_objectives`` of a Brain raises for a batch that has no target.
_NO_TARGET = (LookupError, TypeError, ValueError, AttributeError, DataError)


def _outputs(brain: Computation, batch: Any, stage: Stage, *, optional: bool) -> tuple[Any, Losses]:
    """Return the predictions and losses of a batch.

    Args:
        brain: the Brain.
        batch: the batch.
        stage: VALID or TEST.
        optional: whether a batch without labels may have no losses.
    """
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
