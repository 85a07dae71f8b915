"""The data of both jobs: points in a square, made on the spot."""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


def points(size: int, seed: int) -> Tensor:
    """Points [size, 2] between -2 and 2."""
    return 4 * torch.rand(size, 2, generator=torch.Generator().manual_seed(seed)) - 2


def inside(size: int, seed: int) -> TensorDataset:
    """Points, and whether each lies within a circle of radius 1.6 (0 or 1)."""
    square = points(size, seed)
    return TensorDataset(square, (square.norm(dim=1) < 1.6).long())


def distance(size: int, seed: int) -> TensorDataset:
    """Points, and the distance [1] of each from the origin."""
    square = points(size, seed)
    return TensorDataset(square, square.norm(dim=1, keepdim=True))
