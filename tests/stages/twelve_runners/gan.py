from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline import Brain, Context, Stage, optimize, stages


class Model(Brain):
    """Makes points, and tells them from real ones."""

    def __init__(self, width: int) -> None:
        generator = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 3))
        critic = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))
        super().__init__({"generator": generator, "critic": critic})

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        made: Tensor = self.modules["generator"](torch.randn(len(batch[0]), 2))
        return made

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> dict[str, Tensor]:
        critic = self.modules["critic"]
        real, made = critic(batch[0]), critic(predictions.detach())
        return {
            "critic": (real - 1).square().mean() + made.square().mean(),
            "generator": (critic(predictions) - 1).square().mean(),
        }


class Runner(stages.Runner):
    """Two steps of the critic, then one of the generator, each on a batch of its own."""

    def run(self, context: Context) -> None:
        points = context["model"]["points"]
        for _ in context.epochs():
            for _ in range(4):
                for name, count in (("critic", 2), ("generator", 1)):
                    for real in context.batches(points, count=count):
                        made = points.brain.compute_forward(real, Stage.TRAIN)
                        losses = points.brain.compute_objectives(made, real, Stage.TRAIN)
                        optimize(losses, [points.optim_schedulers[name]])
