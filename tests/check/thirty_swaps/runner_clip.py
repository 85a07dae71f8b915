"""Two batches a step and clipped gradients, by hand."""

from typing import Any

import torch

from pipeline import Context, Stage, stages


class Runner(stages.Runner):
    def __init__(self, context: Context, accumulate: int, clip: float = 1.0) -> None:
        super().__init__(context)
        self.accumulate, self.clip = accumulate, clip
        self.seen = 0

    def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
        predictions = phase.brain.compute_forward(batch, Stage.TRAIN)
        loss = phase.brain.compute_objectives(predictions, batch, Stage.TRAIN)
        torch.autograd.backward(loss / self.accumulate)
        self.seen += 1
        if self.seen % self.accumulate == 0:
            parameters = list(phase.model.parameters())
            torch.nn.utils.clip_grad_norm_(parameters, self.clip)
            for parameter in parameters:
                parameter.data.sub_(0.1 * parameter.grad)
                parameter.grad = None
        return loss.detach()
