"""Two rings, some of whose points are labelled wrongly, made on the spot."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Rings(Dataset[tuple[Tensor, Tensor]]):
    """Points [2] on two rings, one in the other, and on which of them (0 or 1) each is.

    Args:
        size: how many there are.
        seed: decides the points.
        wrong: the share of labels that are false.
    """

    def __init__(self, size: int, seed: int, wrong: float = 0.0) -> None:
        random = torch.Generator().manual_seed(seed)
        ring = torch.arange(size) % 2
        angle = 2 * math.pi * torch.rand(size, generator=random)
        radius = 1 + ring + 0.2 * torch.randn(size, generator=random)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.labels = torch.where(torch.rand(size, generator=random) < wrong, 1 - ring, ring)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]
