"""Gradients that are averaged over the ranks after each backward, where code of one's own steps the optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pipeline.distributed.strategy import Strategy
from pipeline.distributed.world import World


class GradientAverage:
    """Averages gradients over the ranks as soon as a backward is over, as DDP does, but however the model was called.

    So gradients are clipped, checked and used as in one process. All ranks have to make the same calls of ``backward``.

    Args:
        world: the ranks.
        modules: whose gradients are averaged.
        schedulers: OptimSchedulers; these average the gradients of their parameters themselves.
    """

    discards = guarded = weighted = False

    def __init__(self, world: World, modules: Iterable[nn.Module], schedulers: Sequence[Any]) -> None:
        theirs = {parameter for scheduler in schedulers for parameter in scheduler.parameters}
        trained = [own for module in modules for own in module.parameters() if own.requires_grad and own not in theirs]
        self.parameters: list[Tensor] = list(dict.fromkeys(trained))
        self.strategy, self.schedulers = Strategy(world), schedulers
        self.strategy.reason = "an experiment steps its optimizer itself"
        self.samples: Any = 1
        self.loss: Tensor | None = None
        self._queued = False
        for parameter in self.parameters:
            # torch has no types for it.
            register: Any = parameter.register_post_accumulate_grad_hook
            register(self._queue)

    def weigh(self, samples: int) -> None:
        """The next losses are means over so many samples of this rank."""
        self.samples = samples
        for scheduler in self.schedulers:
            scheduler.batch_samples = samples

    @property
    def guard(self) -> GradientAverage:
        """What discards a window: nothing."""
        return self

    def _queue(self, parameter: Tensor) -> None:
        """Average once the backward that is running is over; the first gradient in it asks for this."""
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._queued = False
        own = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_mul_(own, float(self.samples)) if self.samples else torch._foreach_zero_(own)
        samples, *_ = self.strategy.sum_up(self)
        torch._foreach_div_([own.grad for own in self.parameters if own.grad is not None], samples)
