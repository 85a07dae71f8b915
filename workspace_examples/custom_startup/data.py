"""Points within two rings, made on the spot."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Rings(Dataset[tuple[Tensor, Tensor]]):
    """Points [2] at a distance of about 1 or 2 from the origin, and which of the two (0 or 1).

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.labels = torch.arange(size) % 2
        radius = 1 + self.labels + 0.1 * torch.randn(size, generator=random)
        angle = 2 * math.pi * torch.rand(size, generator=random)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]
