from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributions import Categorical

from pipeline import Brain, Context, Stage, stages

from .networks import Net


class Model(Brain):
    """A policy with two actions."""

    def __init__(self, dropout: float) -> None:
        super().__init__({"net": Net(dropout, outputs=2)})

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        scores: Tensor = self.modules["net"](batch[0])
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        return -(Categorical(logits=predictions).log_prob(batch[1]) * batch[2]).mean()


class Runner(stages.Runner):
    """In each epoch the policy of that moment acts, and learns from what came of it."""

    def run(self, context: Context) -> None:
        policy, rollouts = context["model"]["policy"], context["dataset"]["train_data"].dataset
        context["checkpointer"].add_recoverable("rollouts", rollouts)
        for _ in context.epochs():
            # One that is resumed in the middle of an epoch has those of that epoch already.
            if not context.resuming:
                rollouts.collect(policy.brain.modules["net"])
            for batch in context.batches(policy):
                policy.brain.fit_batch(batch)
