"""Losses -> gradients -> parameters: the only place that calls backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.training.optim_scheduler import OptimScheduler


def optimize(losses: Mapping[str, Tensor], optim_schedulers: Sequence[OptimScheduler], epoch: int) -> bool:
    """One backward of ``losses["loss"]``, then each scheduler's step.

    Args:
        losses: name -> scalar.
        optim_schedulers: those that the loss drives.
        epoch: counted from 0.

    Returns:
        Whether the parameters were changed: False where the loss is not finite, and then nothing was.
    """
    loss = losses["loss"]
    # Reads one number: a loss that is not finite must not reach the weights. On a GPU this waits for the forward pass.
    if not math.isfinite(loss.item()):
        return False
    torch.autograd.backward(loss)
    for scheduler in optim_schedulers:
        scheduler.apply(epoch)
    return True
