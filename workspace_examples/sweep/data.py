"""The squares of a checkerboard, made on the spot."""

import torch
from torch.utils.data import TensorDataset


class Checkerboard(TensorDataset):
    """Points [2] between 0 and 4, and whether each is on a white square (0) or a black one (1).

    Args:
        seed: decides the points.
        size: how many there are.
    """

    def __init__(self, seed: int, size: int = 4000) -> None:
        points = 4 * torch.rand(size, 2, generator=torch.Generator().manual_seed(seed))
        super().__init__(points, points.floor().sum(dim=1).long() % 2)
