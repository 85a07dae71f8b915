"""Two spirals, made on the spot."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    """Points [2] of two interleaved spirals, and which of the two (0 or 1) each belongs to.

    Args:
        seed: decides the points.
        size: how many there are.
    """

    def __init__(self, seed: int, size: int = 1000) -> None:
        random = torch.Generator().manual_seed(seed)
        turn = torch.rand(size, generator=random).sqrt() * 3 * math.pi
        self.labels = torch.arange(size) % 2
        angle = turn + self.labels * math.pi
        radius = turn / (3 * math.pi)
        noise = 0.02 * torch.randn(size, 2, generator=random)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]
