"""Training on the losses of one batch: the backwards, then the steps of the optimizers."""

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

# The hooks of plugins that an optimizer calls.
OPTIMIZER_HOOKS = ("before_backward", "after_backward", "before_update", "after_update")


def backward_and_step(  # noqa: PLR0912 # a call for each branch would be one per step
    losses: Losses,
    optimizers: Sequence[WindowedOptimizer],
    epoch: int,
    samples: int | None,
    *,
    last: bool = False,
    retain_graph: bool | None = None,
    steps: bool = True,
) -> tuple[bool, bool]:
    """Run one backward for each distinct loss, then step each optimizer whose window is full.

    This is ``optimize`` for the training loop: it makes as few calls as possible, and does not
        change autocast.

    Args:
        losses: name -> scalar, a mean over the samples of the batch. The mapping is not changed.
        optimizers: the optimizers that minimize these losses.
        epoch: the current epoch, counted from 0.
        samples: how many samples the batch has. With accumulation, losses are weighted by it. With
            0, no backward is run. None counts them as ``optimize`` does.
        last: whether this is the last batch of a pass, which closes every window.
        retain_graph: whether the last backward keeps the graph. None says that no other code needs
            it, so that a plain backward is enough for a single optimizer that ``owns_all``.
        steps: whether the optimizers whose window is full step. If not, the caller steps them.

    Returns:
        As ``optimize``.

    Raises:
        DataError, ConfigError: as ``optimize``.
    """
    first, *others = optimizers
    before_backward = first.before_backward
    after_backward = first.after_backward
    for other in others:
        # An optimizer that user code has built has no hooks.
        before_backward = before_backward or other.before_backward
        after_backward = after_backward or other.after_backward
    counts: dict[WindowedOptimizer, int] = {}
    if samples is None:
        counts = _samples_of_batches(optimizers)
        has_samples = any(counts.values())
    else:
        has_samples = samples > 0
    if has_samples and before_backward:
        before_backward(losses=losses)
    finite = True
    if not losses:
        # Nothing was computed for a batch without samples.
        pass
    elif first.owns_all and not others and retain_graph is None:
        loss = losses[first.loss_name] if first.loss_name in losses else _raise_no_loss(first.loss_name, losses)
        acts = first.step_per_update == 1 or first.acts()
        count = counts[first] if samples is None else samples
        if not acts:
            pass
        elif count and first.strategy is None and not first.scaler and loss.is_cpu:
            # The same as in the method `backward`, without its call.
            if not loss.requires_grad:
                first.raise_no_gradient()
            if first.guarded and not -math.inf < loss.item() < math.inf:
                first.skip_update()
                finite = False
            else:
                torch.autograd.backward(loss if first.accum_grad == 1 else loss * count)
        else:
            finite = first.backward(loss, optimizers, count)
    else:
        finite = _backward_by_loss(losses, optimizers, samples, counts, retain_graph)
    if has_samples and after_backward:
        after_backward(losses=losses)
    closed = False
    stepped = False
    finite_on_ranks = True
    for optimizer in optimizers:
        count = counts[optimizer] if samples is None else samples
        if steps and (last or optimizer.window.batches + 1 >= optimizer.accum_grad):
            closed |= optimizer.apply(epoch, count)
        else:
            optimizer.add_batch(count)
        stepped |= optimizer.stepped
        finite_on_ranks = finite_on_ranks and optimizer.finite_on_ranks
    if stepped:
        update_scalers(optimizers)
    return finite if first.strategy is None else finite_on_ranks, closed


def close_windows(optimizers: Sequence[WindowedOptimizer], epoch: int) -> bool:
    """Close the windows that are open, as at the end of a pass.

    Args:
        optimizers: all optimizers of the pass.
        epoch: the current epoch, counted from 0.

    Returns:
        Whether an optimizer acted.

    Raises:
        ConfigError: ``update_lr`` returns no learning rate.
    """
    acted = [optimizer.apply(epoch) for optimizer in optimizers if optimizer.window.batches]
    update_scalers(optimizers)
    return any(acted)


def clear_leftovers(optimizer: WindowedOptimizer, others: Iterable[WindowedOptimizer], number: int) -> None:
    """Clear gradients that other code has left, before an optimizer starts a window.

    Args:
        optimizer: its window is about to start.
        others: all optimizers. What they accumulate in a parameter that they share with this one
            stays.
        number: the number of the batch before the one that starts the window.
    """
    accumulated: set[Tensor] = set()
    for other in others:
        last = number if other.record is optimizer.record else other.record.number
        if other is not optimizer and (other.window.batches or other.window.samples or other.last_gradients < last):
            accumulated.update(other.parameters)
    for parameter in optimizer.parameters:
        if parameter not in accumulated:
            parameter.grad = None


def attach_optimizer_hooks(optimizers: Mapping[str, WindowedOptimizer], context: Context, phase: str) -> None:
    """Have the plugins called at each backward and update.

    A hook that no plugin implements costs nothing.

    Args:
        optimizers: the optimizers of the phase, by name.
        context: is passed to the hooks.
        phase: the name of the phase.
    """
    for name, optimizer in optimizers.items():
        watchers: dict[str, Watcher] = {}
        for moment in OPTIMIZER_HOOKS:
            hook = hook_or_none(context["hooks"], moment)
            more = {"name": name} if moment.endswith("update") else {}
            watchers[moment] = partial(hook, context=context, phase=phase, **more) if hook else None
        optimizer.watch(**watchers)


def log_discarded_windows(where: str, epoch: int, optimizers: Mapping[str, WindowedOptimizer]) -> None:
    """Log how many windows were discarded since the last call.

    On a GPU this waits for the work so far.

    Args:
        where: the start of the log line.
        epoch: counted from 0.
        optimizers: the optimizers of one phase, by name.
    """
    counts = {name: optimizer.take_discarded_windows() for name, optimizer in optimizers.items()}
    total = sum(counts.values())
    if not total or not current_world().is_main:
        return
    windows = "1 window was" if total == 1 else f"{total} windows were"
    each = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    names = f" ({each})" if len(counts) > 1 else ""
    what = f"{windows} discarded in epoch {epoch}{names}"
    logger.info(f"{where}: {what}: each counts as an update, but the optimizer made no step")


def _backward_by_loss(
    losses: Losses,
    optimizers: Sequence[WindowedOptimizer],
    samples: int | None,
    counts: dict[WindowedOptimizer, int],
    retain_graph: bool | None,
) -> bool:
    """Run one backward for each loss that an acting optimizer minimizes.

    Only the parameters of these optimizers get gradients.

    Args:
        losses: name -> loss.
        optimizers: the optimizers that minimize these losses.
        samples: how many samples the batch has; None uses ``counts``.
        counts: the samples of the batch of each optimizer. Optimizers that share a loss get the
            same number.
        retain_graph: whether the last backward keeps the graph.

    Returns:
        False if a loss is known not to be finite.
    """
    first, *others = optimizers
    if first.partners != others:
        first.remember_partners(others)
    # Each scaler needs a separate backward, because its scale holds for the optimizers that share
    # it.
    groups: dict[tuple[str, int], list[WindowedOptimizer]] = {}
    for optimizer in optimizers:
        name = optimizer.loss_name
        if name not in losses:
            _raise_no_loss(name, losses)
        if optimizer.step_per_update == 1 or optimizer.acts():
            groups.setdefault((name, id(optimizer.scaler)), []).append(optimizer)
    remaining = len(groups)
    finite = True
    for (name, _), group in groups.items():
        remaining -= 1
        trained = [parameter for optimizer in group for parameter in optimizer.parameters if parameter.requires_grad]
        inputs = list(dict.fromkeys(trained))
        count = _samples_of(group, counts) if samples is None else samples
        # Losses may share a graph, which each backward except the last has to keep.
        keeps_graph = bool(retain_graph or remaining)
        finite &= group[0].backward(losses[name], group, count, inputs=inputs, retain_graph=keeps_graph)
    return finite


def _samples_of_batches(optimizers: Sequence[WindowedOptimizer]) -> dict[WindowedOptimizer, int]:
    """Return how many samples the batch of each optimizer has."""
    counts = {optimizer: optimizer.record.count_samples() for optimizer in optimizers}
    active = {counts[optimizer] for optimizer in optimizers if optimizer.record.is_open}
    # A phase that is not trained at present has no batch; its optimizers use the batch of the other
    # phases.
    return dict.fromkeys(counts, *active) if len(active) == 1 else counts


def _samples_of(group: Sequence[WindowedOptimizer], counts: dict[WindowedOptimizer, int]) -> int:
    """Return how many samples the batch has whose loss some optimizers share.

    Args:
        group: the optimizers that share the loss.
        counts: the samples of the batch of each optimizer. The samples of the group are set
            to the returned number.

    Raises:
        DataError: the optimizers belong to phases whose batches have different numbers of samples.
    """
    numbers = {counts[optimizer] for optimizer in group if optimizer.record.is_open}
    averages = any(optimizer.accum_grad > 1 or optimizer.strategy is not None for optimizer in group)
    if averages and len(numbers) > 1:
        text = " and ".join(str(number) for number in sorted(numbers))
        what = f"optimize: the loss '{group[0].loss_name}' drives OptimSchedulers of several phases"
        raise DataError(f"{what}, whose batches have {text} samples; say how many count: optimize(…, samples=…)")
    samples = max(numbers or {counts[optimizer] for optimizer in group})
    counts.update(dict.fromkeys(group, samples))
    return samples


def _raise_no_loss(name: str, losses: Mapping[str, Tensor]) -> NoReturn:
    raise DataError(f"there is no loss '{name}', which an OptimScheduler descends{one_of(name, losses)}")
