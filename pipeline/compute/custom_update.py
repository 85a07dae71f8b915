"""Updates that are not ``Trainable.fit_batch``: the code of an updater, of a stage, or of a Brain's own ``fit_batch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.compute.trainable import Trainable
from pipeline.metrics.meters import MOST
from pipeline.optim.losses import losses_by_name
from pipeline.optim.precision import autocast

Update = Callable[[Any], Any]


def custom_update(trainable: Trainable, update: Update, name: str) -> Callable[[Any], Tensor | None]:
    """Return a function that trains on a batch with an update of the user, and notes its losses.

    Args:
        trainable: what is trained.
        update: trains on a batch. It returns a loss, multiple losses by name, or None.
        name: what messages call it.
    """
    if trainable.strategy is not None:
        trainable.strategy.forgo_ddp(f"{name} is not that of the framework")
    update = trainable.compiled(update)
    # Not the Brain's autocast: the update may call fit_batch, which enters that one, and it cannot be entered twice.
    around = autocast(trainable.options.precision, trainable.device, steps=True)

    def train_on(batch: Any) -> Tensor | None:
        has_no_samples = trainable.begin_update(batch, under_autocast=bool(around))
        with around or nullcontext(), gradients_dropped(trainable) if has_no_samples else nullcontext():
            returned = update(batch)
        losses = {} if returned is None else losses_by_name(returned, name)
        losses = {name: loss.detach() for name, loss in losses.items()}
        trainable.note_losses(losses)
        return losses.get("loss")

    return train_on


class UpdateCounter:
    """Counts the losses and updates of batches that did not go through ``Trainable.fit_batch``.

    Args:
        trainable: what is trained.
    """

    def __init__(self, trainable: Trainable) -> None:
        self._trainable = trainable
        # Whether a batch of this pass has gone through the schedulers.
        self._uses_schedulers = False

    def count(self, in_round: int) -> None:
        """Count the active batch.

        Args:
            in_round: the number of the batch in its round, from 1.
        """
        trainable = self._trainable
        record = trainable.record
        number = record.number
        trainable.count_losses()
        was_updated = False
        for scheduler in trainable.schedulers:
            self._uses_schedulers = self._uses_schedulers or scheduler.last_batch == number
            was_updated = was_updated or scheduler.last_update == number
        # Unless the code has counted its update itself. Where nothing goes through the schedulers, each batch counts
        # as one update, or each window of a fit_batch.
        if trainable.counters["update"] == record.updates_before:
            window = trainable.options.grad_accumulation_factor if trainable.custom.trains else 1
            ends_window = in_round % window == 0
            trainable.counters["update"] += was_updated if self._uses_schedulers else ends_window
        if in_round % MOST == 0:
            trainable.check_divergence()


@contextmanager
def gradients_dropped(trainable: Trainable) -> Iterator[None]:
    """Have no backward change a gradient of the modules until the block ends.

    This is for code that calls ``backward`` itself, for a batch without samples. A parameter that
    had no gradient has none afterwards, so an optimizer leaves it as it is.
    """
    had_none: set[nn.Parameter] = set()

    def drop(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        # The Brain's own fit_batch, called for something else, has counted that batch.
        if trainable.record.samples:
            return gradient
        if parameter.grad is None:
            had_none.add(parameter)
        return torch.zeros_like(gradient)

    def clear(parameter: nn.Parameter) -> None:
        # A scaler refuses to step without gradients.
        if parameter in had_none and not trainable.brain.scaler.is_enabled():
            parameter.grad = None
        had_none.discard(parameter)

    with ExitStack() as handles:
        for parameter in trainable.modules.parameters():
            if parameter.requires_grad:
                # torch has no types for these hooks.
                hooked: Any = parameter
                handles.enter_context(hooked.register_hook(partial(drop, parameter)))
                handles.enter_context(hooked.register_post_accumulate_grad_hook(clear))
        yield
