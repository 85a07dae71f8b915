"""The same training written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from .policy import ActorCritic, ppo_loss
from .rollouts import Rollouts, Shuffled

EPOCHS, PASSES = 8, 3


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rollouts = Rollouts(count=16, horizon=32, seed=0)
    sampler = Shuffled(rollouts, seed=0)
    loader = DataLoader(rollouts, batch_size=128, sampler=sampler)
    model = ActorCritic(width=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rewards = []
    for epoch in range(EPOCHS):
        rewards.append(rollouts.collect(model))
        for number in range(PASSES):
            sampler.set_epoch(epoch * PASSES + number)
            for batch in loader:
                loss = ppo_loss(*model(batch["states"]), batch)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    return {"weights": model.state_dict(), "rewards": rewards}
