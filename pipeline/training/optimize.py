"""Losses -> gradients -> parameters: the only place that calls backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.errors import DataError, one_of
from pipeline.training.optim_scheduler import OptimScheduler


def optimize(
    losses: Mapping[str, Tensor],
    optim_schedulers: Sequence[OptimScheduler],
    epoch: int,
    samples: int = 1,
    *,
    last: bool = False,
) -> tuple[bool, bool]:
    """One backward for each distinct loss, then the step of each scheduler whose window is full.

    Args:
        losses: name -> scalar that is a mean over the samples of the batch; left as they are.
        optim_schedulers: those that the losses drive.
        epoch: counted from 0.
        samples: how many the batch has; with accumulation, losses are weighted by it.
        last: whether this is the last batch of a pass, which closes every window.

    Returns:
        (whether all losses were finite, whether a window was closed in which a scheduler acted).
    """
    if len(optim_schedulers) == 1 and (only := optim_schedulers[0]).owns_all:
        finite = not only.acts() or _descend(_of(losses, only), [only], samples, None, retain=False)
    else:
        finite = _each_loss(losses, optim_schedulers, samples)
    closed = False
    for scheduler in optim_schedulers:
        scheduler.batches += 1
        scheduler.samples += samples
        if last or scheduler.batches >= scheduler.accum_grad:
            closed |= scheduler.apply(epoch)
    return finite, closed


def close(optim_schedulers: Sequence[OptimScheduler], epoch: int) -> bool:
    """Close the windows that a pass left open; whether one of them acted."""
    acted = [scheduler.apply(epoch) for scheduler in optim_schedulers if scheduler.batches]
    return any(acted)


def _each_loss(losses: Mapping[str, Tensor], optim_schedulers: Sequence[OptimScheduler], samples: int) -> bool:
    """A backward for each loss that an acting scheduler descends, into the parameters of those schedulers alone."""
    groups: dict[str, list[OptimScheduler]] = {}
    for scheduler in optim_schedulers:
        _of(losses, scheduler)
        if scheduler.acts():
            groups.setdefault(scheduler.loss_name, []).append(scheduler)
    left, finite = len(groups), True
    for name, group in groups.items():
        left -= 1
        inputs = list({id(each): each for scheduler in group for each in scheduler.parameters}.values())
        # Losses may share a graph, which each but the last backward has to leave in place.
        finite &= _descend(losses[name], group, samples, inputs, retain=left > 0)
    return finite


def _of(losses: Mapping[str, Tensor], scheduler: OptimScheduler) -> Tensor:
    if scheduler.loss_name not in losses:
        known = one_of(scheduler.loss_name, losses)
        raise DataError(f"there is no loss '{scheduler.loss_name}', which an OptimScheduler descends{known}")
    return losses[scheduler.loss_name]


def _descend(
    loss: Tensor, group: Sequence[OptimScheduler], samples: int, inputs: Sequence[Tensor] | None, *, retain: bool
) -> bool:
    """One backward; False, and the windows of the group to be discarded, where the loss is not finite."""
    # Reads one number: a loss that is not finite must not reach the weights. On a GPU this waits for the forward pass.
    if not math.isfinite(loss.item()):
        for scheduler in group:
            scheduler.discards = True
        return False
    if not loss.requires_grad:
        raise DataError("the loss has no gradient; compute it from the model's output, outside of torch.no_grad()")
    if any(scheduler.accum_grad > 1 for scheduler in group):
        loss = loss * samples
    if group[0].scaler:
        loss = group[0].scaler.scale(loss)
    torch.autograd.backward(loss, inputs=inputs, retain_graph=retain)
    return True
