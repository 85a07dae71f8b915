"""Rings around a point, made on the spot."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Rings(Dataset[tuple[Tensor, Tensor]]):
    """Points [2] on three rings, and on which of them (0, 1 or 2) each is.

    Args:
        seed: decides the points.
        wrong: the share of labels that are drawn by chance.
        size: how many points there are.
    """

    def __init__(self, seed: int, wrong: float = 0.0, size: int = 400) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(size) % 3
        angle = torch.rand(size, generator=random) * 2 * torch.pi
        radius = 1 + self.labels + 0.25 * torch.randn(size, generator=random)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        is_wrong = torch.rand(size, generator=random) < wrong
        self.labels[is_wrong] = torch.randint(3, (int(is_wrong.sum()),), generator=random)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]
