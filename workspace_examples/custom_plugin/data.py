"""Points on a wave, made on the spot."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Wave(Dataset[tuple[Tensor, Tensor]]):
    """x [1] and y = sin(6 x) [1].

    Args:
        size: how many points there are.
    """

    def __init__(self, size: int) -> None:
        self.x = torch.rand(size, 1, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], torch.sin(6 * self.x[index])
