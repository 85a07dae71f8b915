from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from pipeline import Context, stages


class Runner(stages.Runner):
    """Where the gradients of two tasks point apart, each loses its part along the other (Yu et al., NeurIPS 2020)."""

    def train_batch(self, context: Context, phase: Any, batch: Any) -> dict[str, Tensor]:
        weights = list(phase.model.parameters())
        sine, cosine = (phase.model(batch[0]) - batch[1]).square().mean(dim=0)
        one, other = (
            parameters_to_vector(torch.autograd.grad(loss, weights, retain_graph=True)) for loss in (sine, cosine)
        )
        if (against := one @ other) < 0:
            one, other = one - against / (other @ other) * other, other - against / (one @ one) * one
        for weight, gradient in zip(weights, (one + other).split([weight.numel() for weight in weights]), strict=True):
            weight.grad = gradient.view_as(weight)
        phase.optim_schedulers["main"].apply(context["current_epoch"])
        return {"loss": sine + cosine, "sine": sine, "cosine": cosine}
