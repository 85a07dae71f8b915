"""Which way to push, how good a state is, and how both are learned from what happened."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .env import Points

DISCOUNT, SMOOTHING, CLIP = 0.98, 0.95, 0.2


class ActorCritic(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states).log_softmax(dim=1), self.critic(states)[:, 0]


@torch.no_grad()
def play(model: Any, env: Points) -> tuple[dict[str, Tensor], float]:
    """What happened in one episode of each point, by name [count * horizon, ...], and the mean of all rewards."""
    states, steps, rewards, values = env.reset(), [], [], []
    for _ in range(env.horizon):
        scores, value = model(states)
        actions = env.sample(scores.exp())
        steps.append((states, actions, scores.gather(1, actions[:, None])[:, 0]))
        values.append(value)
        states, reward = env.step(actions)
        rewards.append(reward)
    values.append(model(states)[1])
    advantage, advantages = torch.zeros(env.count), []
    for reward, value, following in zip(rewards[::-1], values[-2::-1], values[:0:-1], strict=True):
        advantage = reward + DISCOUNT * following - value + DISCOUNT * SMOOTHING * advantage
        advantages.append(advantage)
    parts = [*map(torch.cat, zip(*steps, strict=True)), torch.cat(advantages[::-1])]
    names = ("states", "actions", "before", "advantages")
    returns = parts[-1] + torch.cat(values[:-1])
    return {**dict(zip(names, parts, strict=True)), "returns": returns}, torch.cat(rewards).mean().item()


def ppo_loss(scores: Tensor, values: Tensor, batch: dict[str, Tensor]) -> Tensor:
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (scores.gather(1, batch["actions"][:, None])[:, 0] - batch["before"]).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    entropy = -(scores.exp() * scores).sum(dim=1).mean()
    return nn.functional.mse_loss(values, batch["returns"]) - gain - 0.01 * entropy
