from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline import Context, Stage, stages


class Runner(stages.Runner):
    """Lets the optimizer compute the loss as often as it wants to."""

    def train_batch(self, context: Context, phase: Any, batch: Any) -> dict[str, Tensor]:
        optimizer = phase.optim_schedulers["main"].optimizer

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = phase.brain.compute_objectives(
                phase.brain.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN
            )
            torch.autograd.backward(loss)
            return loss

        return {"loss": optimizer.step(closure)}
