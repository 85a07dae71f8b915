"""Points around the centres of a ring, made on the spot."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset

MODES = 8
SIGMA = 0.05
"""Standard deviation of the points around their centre, in each direction."""


def centres() -> Tensor:
    """The middle of each mode [MODES, 2], on the unit circle."""
    angle = torch.arange(MODES) * 2 * math.pi / MODES
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def collate(batch: Tensor) -> Tensor:
    """Hands on what `Ring.__getitems__` made, which is a batch already."""
    return batch


class Ring(Dataset[Tensor]):
    """Points [2], equally many of each mode.

    Args:
        seed: decides the points.
        size: how many there are.
    """

    def __init__(self, seed: int, size: int) -> None:
        random = torch.Generator().manual_seed(seed)
        mode = torch.arange(size) % MODES
        self.points = centres()[mode] + SIGMA * torch.randn(size, 2, generator=random)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        """A whole batch [indices, 2] at once, which torch's DataLoader prefers over many single points."""
        return self.points[indices]
