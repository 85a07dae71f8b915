"""Points on a line."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Line(Dataset[tuple[Tensor, Tensor]]):
    """x [1] and y = 3 x - 1 [1]."""

    def __init__(self, size: int) -> None:
        self.x = torch.linspace(-1, 1, size).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], 3 * self.x[index] - 1
