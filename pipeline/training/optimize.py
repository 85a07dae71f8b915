"""Losses -> gradients -> parameters: the only place that calls backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError, one_of
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.precision import in_autocast, outside_autocast


def optimize(
    losses: Mapping[str, Tensor],
    optim_schedulers: Sequence[OptimScheduler],
    epoch: int,
    samples: int = 1,
    *,
    last: bool = False,
) -> tuple[bool, bool]:
    """One backward for each distinct loss, then the step of each scheduler whose window is full; outside of autocast.

    Args:
        losses: name -> scalar that is a mean over the samples of the batch; left as they are.
        optim_schedulers: those that the losses drive.
        epoch: counted from 0.
        samples: how many the batch has; with accumulation, losses are weighted by it.
        last: whether this is the last batch of a pass, which closes every window.

    Returns:
        (False where a loss is known not to be finite: on a GPU that is known later; whether a window was closed in which
        a scheduler acted).

    Raises:
        DataError: a scheduler's loss is not there, no scalar, or has no gradient.
        ConfigError: two schedulers train the same parameter, or share a gradient scaler with windows of different lengths.
    """
    only, *others = optim_schedulers
    if only.under_autocast and in_autocast(only.parameters[0].device):
        with outside_autocast(only.parameters[0].device):
            return optimize(losses, optim_schedulers, epoch, samples, last=last)
    if only.owns_all and not others:
        loss = losses[only.loss_name] if only.loss_name in losses else _missing(only.loss_name, losses)
        acts = only.step_per_update == 1 or only.acts()
        finite = not acts or _descend(loss, only, samples)
    else:
        finite = _each_loss(losses, optim_schedulers, samples)
    if only.after_backward:
        only.after_backward(losses=losses)
    closed = stepped = False
    for scheduler in optim_schedulers:
        scheduler.batches += 1
        scheduler.samples += samples
        if last or scheduler.batches >= scheduler.accum_grad:
            closed |= scheduler.apply(epoch)
        stepped |= scheduler.stepped
    if stepped:
        _update_scalers(optim_schedulers)
    return finite, closed


def close(optim_schedulers: Sequence[OptimScheduler], epoch: int) -> bool:
    """Close the windows that a pass left open; whether one of them acted."""
    acted = [scheduler.apply(epoch) for scheduler in optim_schedulers if scheduler.batches]
    if acted:
        _update_scalers(optim_schedulers)
    return any(acted)


def _descend(loss: Tensor, scheduler: OptimScheduler, samples: int) -> bool:
    """A backward into everything that the loss depends on; False where the loss is known not to be finite."""
    if loss.ndim or not loss.requires_grad:
        _refuse(loss, scheduler.loss_name)
    if scheduler.guarded:
        if not loss.is_cpu:
            scheduler.guard.note_loss(loss)
        # Reads one number, on the CPU: a loss that is not finite must not reach the weights.
        elif not math.isfinite(loss.item()):
            scheduler.discards = True
            return False
    if scheduler.accum_grad > 1:
        loss = loss * samples
    if scheduler.scaler:
        loss = scheduler.scaler.scale(loss)
    torch.autograd.backward(loss)
    return True


def _each_loss(losses: Mapping[str, Tensor], optim_schedulers: Sequence[OptimScheduler], samples: int) -> bool:
    """A backward for each loss that an acting scheduler descends, into the parameters of those schedulers alone."""
    if not optim_schedulers[0].real_step:
        _refuse_shared_parameters(optim_schedulers)
    # Each scaler needs its own backward: what it scales is for the schedulers that share it.
    groups: dict[tuple[str, int], list[OptimScheduler]] = {}
    for scheduler in optim_schedulers:
        name = scheduler.loss_name
        if name not in losses:
            _missing(name, losses)
        if scheduler.acts():
            groups.setdefault((name, id(scheduler.scaler)), []).append(scheduler)
    left, finite = len(groups), True
    for (name, _), group in groups.items():
        left -= 1
        # Losses may share a graph, which each but the last backward has to leave in place.
        finite &= _descend_into(group, losses[name], name, samples, retain=left > 0)
    return finite


def _descend_into(group: Sequence[OptimScheduler], loss: Tensor, name: str, samples: int, *, retain: bool) -> bool:
    """A backward into the parameters of the schedulers of a group, which share the loss and the scaler."""
    if loss.ndim or not loss.requires_grad:
        _refuse(loss, name)
    guarded = [scheduler for scheduler in group if scheduler.guarded]
    if guarded and loss.is_cpu and not math.isfinite(loss.item()):
        for scheduler in group:
            scheduler.discards = True
        return False
    for scheduler in guarded if not loss.is_cpu else ():
        scheduler.guard.note_loss(loss)
    if weighted := max(scheduler.accum_grad for scheduler in group) > 1:
        loss = loss * samples
    for scheduler in group:
        scheduler.weighted = weighted
    if group[0].scaler:
        loss = group[0].scaler.scale(loss)
    inputs = list(
        {id(each): each for scheduler in group for each in scheduler.parameters if each.requires_grad}.values()
    )
    torch.autograd.backward(loss, inputs=inputs, retain_graph=retain)
    return True


def _update_scalers(optim_schedulers: Sequence[OptimScheduler]) -> None:
    """Let each gradient scaler adapt after a step; no window of gradients scaled by it may then be open."""
    scalers = {id(each.scaler): each.scaler for each in optim_schedulers if each.scaler}
    for scaler in scalers.values():
        sharing = [each for each in optim_schedulers if each.scaler is scaler]
        if any(each.stepped for each in sharing):
            if any(each.batches for each in sharing):
                _refuse_shared_scaler(sharing)
            scaler.update()
            for each in sharing:
                each.stepped = False


def _missing(name: str, losses: Mapping[str, Tensor]) -> NoReturn:
    raise DataError(f"there is no loss '{name}', which an OptimScheduler descends{one_of(name, losses)}")


def _refuse_shared_parameters(optim_schedulers: Sequence[OptimScheduler]) -> None:
    """The first to step would forget the gradients of the second."""
    seen: set[Tensor] = set()
    for scheduler in optim_schedulers:
        if shared := seen.intersection(scheduler.parameters):
            name = next((name for name, each in scheduler.guard.names.items() if each in shared), "?")
            raise ConfigError(
                f"two OptimSchedulers train '{name}'; confine each to its own modules with updated_modules"
            )
        seen.update(scheduler.parameters)


def _refuse_shared_scaler(sharing: Sequence[OptimScheduler]) -> NoReturn:
    factors = " and ".join(str(each.accum_grad) for each in sharing)
    raise ConfigError(
        f"OptimSchedulers with an accum_grad of {factors} share a GradScaler, whose scale would change within a window; "
        "give each a scaler of its own"
    )


def _refuse(loss: Tensor, name: str) -> NoReturn:
    if loss.ndim:
        raise DataError(f"the loss '{name}' has shape {tuple(loss.shape)}; return a scalar, e.g. its mean()")
    raise DataError(
        f"the loss '{name}' has no gradient; compute it from the model's output, outside of torch.no_grad()"
    )
