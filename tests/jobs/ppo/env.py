"""Many points on a line at once, each pushed left or right; the nearer to the origin, the better."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Points:
    def __init__(self, count: int, horizon: int, seed: int) -> None:
        self.count, self.horizon = count, horizon
        self.random = torch.Generator().manual_seed(seed)

    def reset(self) -> Tensor:
        """The first states [count, 2]: where each point is, and how fast."""
        self.states = 2 * torch.rand(self.count, 2, generator=self.random) - 1
        return self.states

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The next states, and the rewards [count]; an action [count] is 0 for left, and 1 for right."""
        speed = self.states[:, 1] + 0.1 * (2 * actions - 1)
        place = self.states[:, 0] + 0.1 * speed
        self.states = torch.stack([place, speed], dim=1)
        return self.states, -place.abs() - 0.1 * speed.abs()

    def sample(self, probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=self.random)[:, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])
