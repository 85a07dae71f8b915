"""What the Runners here train on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import Dataset


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Points [3], and the sine and cosine of their sum, or the first of these.

    Args:
        size: how many there are.
        seed: decides the points.
        noise: the standard deviation of what is added to the points.
        part: (n, k): the n-th of k parts, by their norm; None: all.
        outputs: how many targets there are.
    """

    def __init__(
        self, size: int, seed: int, noise: float = 0.0, part: list[int] | None = None, outputs: int = 1
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        points = torch.randn(size, 3, generator=random)
        total = points.sum(1)
        targets = torch.stack([total.sin(), total.cos()][:outputs], dim=1)
        order = points.norm(dim=1).argsort()
        kept = order if part is None else order.chunk(part[1])[part[0]]
        self.points = points[kept] + noise * torch.randn(len(kept), 3, generator=random)
        self.targets = targets[kept]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.targets[index]


class Folds(Waves):
    """Every k-th of the points, from the n-th on; or all others."""

    def __init__(self, size: int, seed: int, fold: int, folds: int, held_out: bool = False) -> None:
        super().__init__(size, seed)
        own = torch.arange(size) % folds == fold
        kept = own if held_out else ~own
        self.points, self.targets = self.points[kept], self.targets[kept]


class Rollouts(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """What a policy did last: states [3], actions, and how much better than usual each was."""

    def __init__(self, size: int) -> None:
        self.states, self.actions, self.advantages = torch.zeros(size, 3), torch.zeros(size).long(), torch.zeros(size)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.states[index], self.actions[index], self.advantages[index]

    @torch.no_grad()
    def collect(self, policy: nn.Module) -> None:
        """Let a policy act; it is right where it says whether the sum of the state is above 0."""
        self.states = torch.randn(len(self), 3)
        self.actions = Categorical(logits=policy(self.states)).sample()
        rewards = (self.actions == (self.states.sum(1) > 0)).float()
        self.advantages = rewards - rewards.mean()

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states, "actions": self.actions, "advantages": self.advantages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states, self.actions, self.advantages = state["states"], state["actions"], state["advantages"]
