"""What happened last, as a dataset, and the order in which it is learned from."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from .env import Points
from .policy import play


class Rollouts(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, horizon: int, seed: int) -> None:
        self.env, self.size = Points(count, horizon, seed), count * horizon
        self.happened: dict[str, Tensor] = {}

    def collect(self, model: Any) -> float:
        self.happened, reward = play(model, self.env)
        return reward

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.happened.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"env": self.env.state_dict(), "happened": self.happened}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state["env"])
        self.happened = state["happened"]


class Shuffled(Sampler[int]):
    """The steps in an order of its own in each pass."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.size, self.seed, self.epoch = len(dataset), seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
