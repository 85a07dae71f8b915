"""Two spirals, made on the spot."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    """Points [2] of two interleaved spirals, and which of the two (0 or 1) each belongs to.

    Args:
        size: how many there are.
        seed: decides the points.
    """

    def __init__(self, size: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        turn = torch.rand(size, generator=random).sqrt() * 2 * math.pi
        self.labels = torch.arange(size) % 2
        angle = turn + self.labels * math.pi
        noise = 0.05 * torch.randn(size, 2, generator=random)
        self.points = turn[:, None] / 6 * torch.stack([angle.cos(), angle.sin()], dim=1) + noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]
