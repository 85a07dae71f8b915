"""Training on the losses of one batch: the backwards, then the steps of one or multiple optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
from loguru import logger
from torch import Tensor

from pipeline.context import Context
from pipeline.distributed.world import current_world
from pipeline.errors import DataError, one_of
from pipeline.optim.losses import Losses
from pipeline.optim.windowed_optimizer import Watcher, WindowedOptimizer, update_scalers
from pipeline.user_code.plugin_calls import hook_or_none


def backward_and_step(  # noqa: PLR0912 # a call for each branch would be one a step
    losses: Losses,
    optim_schedulers: Sequence[WindowedOptimizer],
    epoch: int,
    samples: int | None,
    *,
    last: bool = False,
    retain_graph: bool | None = None,
    steps: bool = True,
) -> tuple[bool, bool]:
    """Run one backward for each distinct loss, then step each scheduler whose window is full: ``optimize`` in the hot loop.

    Args:
        losses: name -> scalar that is a mean over the samples of the batch; left as they are.
        optim_schedulers: those that the losses drive.
        epoch: counted from 0.
        samples: how many the batch has; with accumulation, losses are weighted by it. With 0, no loss goes backward. None:
            as for ``optimize``.
        last: whether this is the last batch of a pass, which closes every window.
        retain_graph: whether the last backward leaves the graph in place; None: nobody else goes through it, so a plain
            backward will do where one scheduler ``owns_all``.
        steps: whether the schedulers whose window is full step; else the caller sees to that.

    Returns:
        As ``optimize``, and likewise what it raises.
    """
    only, *others = optim_schedulers
    before_backward = only.before_backward
    after_backward = only.after_backward
    for other in others:
        # One that was made by hand has no hooks.
        before_backward = before_backward or other.before_backward
        after_backward = after_backward or other.after_backward
    counts: dict[WindowedOptimizer, int] = {}
    if samples is None:
        counts = _samples_of_batches(optim_schedulers)
        has_samples = any(counts.values())
    else:
        has_samples = samples > 0
    if has_samples and before_backward:
        before_backward(losses=losses)
    finite = True
    if not losses:
        # Nothing was computed for a batch without samples.
        pass
    elif only.owns_all and not others and retain_graph is None:
        loss = losses[only.loss_name] if only.loss_name in losses else _missing(only.loss_name, losses)
        acts = only.step_per_update == 1 or only.acts()
        count = counts[only] if samples is None else samples
        if not acts:
            pass
        elif count and only.strategy is None and only.accum_grad == 1 and not only.scaler and loss.is_cpu:
            # The same as ``backward`` of the optimizer does, without its call.
            if not loss.requires_grad:
                only.raise_no_gradient()
            if only.guarded and not -math.inf < loss.item() < math.inf:
                only.skip_update()
                finite = False
            else:
                torch.autograd.backward(loss)
        else:
            finite = only.backward(loss, optim_schedulers, count)
    else:
        finite = _backward_by_loss(losses, optim_schedulers, samples, counts, retain_graph)
    if has_samples and after_backward:
        after_backward(losses=losses)
    closed = stepped = False
    finite_on_ranks = True
    for scheduler in optim_schedulers:
        count = counts[scheduler] if samples is None else samples
        if steps and (last or scheduler.window.batches + 1 >= scheduler.accum_grad):
            closed |= scheduler.apply(epoch, count)
        else:
            scheduler.add_batch(count)
        stepped |= scheduler.stepped
        finite_on_ranks = finite_on_ranks and scheduler.finite_on_ranks
    if stepped:
        update_scalers(optim_schedulers)
    return finite if only.strategy is None else finite_on_ranks, closed


def _samples_of_batches(optim_schedulers: Sequence[WindowedOptimizer]) -> dict[WindowedOptimizer, int]:
    """Return how many samples the batch of each scheduler has."""
    counts = {scheduler: scheduler.record.count_samples() for scheduler in optim_schedulers}
    active = {counts[scheduler] for scheduler in optim_schedulers if scheduler.record.is_open}
    # A phase that is not trained at present has no batch, so the batch is that of the other phases.
    return dict.fromkeys(counts, *active) if len(active) == 1 else counts


def _samples_of(group: Sequence[WindowedOptimizer], counts: dict[WindowedOptimizer, int]) -> int:
    """The samples of the batch whose loss some schedulers share.

    Args:
        group: the schedulers.
        counts: the samples of the batch of each scheduler; afterwards those that this returns.

    Raises:
        DataError: they are of phases whose batches have different numbers of samples.
    """
    numbers = {counts[scheduler] for scheduler in group if scheduler.record.is_open}
    averages = any(scheduler.accum_grad > 1 or scheduler.strategy is not None for scheduler in group)
    if averages and len(numbers) > 1:
        text = " and ".join(str(number) for number in sorted(numbers))
        what = f"optimize: the loss '{group[0].loss_name}' drives OptimSchedulers of several phases"
        raise DataError(f"{what}, whose batches have {text} samples; say how many count: optimize(…, samples=…)")
    samples = max(numbers or {counts[scheduler] for scheduler in group})
    counts.update(dict.fromkeys(group, samples))
    return samples


OPTIMIZER_HOOKS = ("before_backward", "after_backward", "before_update", "after_update")


def attach_optimizer_hooks(optim_schedulers: Mapping[str, WindowedOptimizer], context: Context, phase: str) -> None:
    """Call the plugins at each backward and update of a phase's schedulers; a hook that nobody implements costs nothing."""
    for name, scheduler in optim_schedulers.items():
        watchers: dict[str, Watcher] = {}
        for moment in OPTIMIZER_HOOKS:
            hook = hook_or_none(context["hooks"], moment)
            named = {"name": name} if moment.endswith("update") else {}
            watchers[moment] = partial(hook, context=context, phase=phase, **named) if hook else None
        scheduler.watch(**watchers)


def close_windows(optim_schedulers: Sequence[WindowedOptimizer], epoch: int) -> bool:
    """Close the windows that are open at the end of a pass; whether a scheduler acted."""
    acted = [scheduler.apply(epoch) for scheduler in optim_schedulers if scheduler.window.batches]
    update_scalers(optim_schedulers)
    return any(acted)


def log_discarded_windows(where: str, epoch: int, optim_schedulers: Mapping[str, WindowedOptimizer]) -> None:
    """Log how many windows were discarded since the last call; on a GPU this waits for the work so far.

    Args:
        where: what the log line begins with.
        epoch: counted from 0.
        optim_schedulers: of one phase, by name.
    """
    counts = {name: scheduler.take_discarded_windows() for name, scheduler in optim_schedulers.items()}
    total = sum(counts.values())
    if not total or not current_world().is_main:
        return
    windows = "1 window was" if total == 1 else f"{total} windows were"
    each = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    names = f" ({each})" if len(counts) > 1 else ""
    what = f"{windows} discarded in epoch {epoch}{names}"
    logger.info(f"{where}: {what}: each counts as an update, but the optimizer made no step")


def clear_leftovers(scheduler: WindowedOptimizer, others: Iterable[WindowedOptimizer], number: int) -> None:
    """Clear the gradients of a scheduler without an open window, as other code has left them.

    Args:
        scheduler: its window is about to begin.
        others: all schedulers; what they gather in a parameter that they share with this one stays.
        number: the number of the batch before the one that begins the window.
    """
    gathered: set[Tensor] = set()
    for other in others:
        last = number if other.record is scheduler.record else other.record.number
        if other is not scheduler and (other.window.batches or other.window.samples or other.last_gradients < last):
            gathered.update(other.parameters)
    for parameter in scheduler.parameters:
        if parameter not in gathered:
            parameter.grad = None


def _backward_by_loss(
    losses: Losses,
    optim_schedulers: Sequence[WindowedOptimizer],
    samples: int | None,
    counts: dict[WindowedOptimizer, int],
    retain_graph: bool | None,
) -> bool:
    """Run one backward for each loss that an acting scheduler minimizes, into the parameters of these schedulers only."""
    first, *others = optim_schedulers
    if first.partners != others:
        first.step_beside(others)
    # Each scaler needs its own backward: what it scales is for the schedulers that share it.
    groups: dict[tuple[str, int], list[WindowedOptimizer]] = {}
    for scheduler in optim_schedulers:
        name = scheduler.loss_name
        if name not in losses:
            _missing(name, losses)
        if scheduler.acts():
            groups.setdefault((name, id(scheduler.scaler)), []).append(scheduler)
    remaining, finite = len(groups), True
    for (name, _), group in groups.items():
        remaining -= 1
        # Losses may share a graph, which each but the last backward has to leave in place.
        own = [parameter for scheduler in group for parameter in scheduler.parameters if parameter.requires_grad]
        inputs = list(dict.fromkeys(own))
        count = _samples_of(group, counts) if samples is None else samples
        finite &= group[0].backward(
            losses[name], group, count, inputs=inputs, retain_graph=bool(retain_graph or remaining)
        )
    return finite


def _missing(name: str, losses: Mapping[str, Tensor]) -> NoReturn:
    raise DataError(f"there is no loss '{name}', which an OptimScheduler descends{one_of(name, losses)}")
