"""How one batch trains the model; the loop, its validations, checkpoints and plugins stay the default Runner's."""

from typing import Any

import torch
from torch.func import functional_call

from pipeline import Context, Phase, Stage, optimize, stages


class Runner(stages.Runner):
    """Sharpness-aware minimization (Foret et al., ICLR 2021).

    It descends the gradient of the worst weights nearby: those that lie ``radius`` up the gradient.
    """

    def __init__(self, context: Context, radius: float = 0.05) -> None:
        super().__init__(context)
        self.radius = radius

    def train_batch(self, context: Context, phase: Phase, batch: Any) -> Any:
        """One step, with two forward and backward passes; the loss is that of the worst weights."""
        (inputs, _target), model, brain = batch, phase.model, phase.brain
        weights = dict(model.named_parameters())
        loss = brain.compute_objectives(model(inputs), batch, Stage.TRAIN)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        scale = self.radius / torch.nn.utils.get_total_norm(gradients)
        names = zip(weights, gradients, strict=True)
        worst = {name: weights[name] + scale * gradient for name, gradient in names}
        worst_loss = brain.compute_objectives(functional_call(model, worst, inputs), batch, Stage.TRAIN)
        optimize(worst_loss, phase.optim_schedulers)
        return worst_loss
