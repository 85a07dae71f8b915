import random

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int, noise: float) -> None:
        self.x, self.noise = torch.linspace(-1, 1, 3 * size).reshape(size, 3), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = self.noise * (torch.randn(3) + random.random())
        return self.x[index] + noise, self.x[index].sum(0, keepdim=True)
