"""Points in and around a circle, made on the spot."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points [2] of a square, and whether each lies outside (0) or inside (1) of a circle.

    Args:
        seed: decides the points.
        size: how many there are.
    """

    def __init__(self, seed: int, size: int = 1000) -> None:
        random = torch.Generator().manual_seed(seed)
        self.points = 2 * torch.rand(size, 2, generator=random) - 1
        self.labels = (self.points.square().sum(dim=1) < 0.6).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]
