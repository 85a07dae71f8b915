"""Waves of chance phase, made on the spot."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Waves(Dataset[Tensor]):
    """One period of a sine at 16 places [16], each with a phase of its own; there is no target.

    Args:
        seed: decides the phases.
        size: how many waves there are.
    """

    def __init__(self, seed: int, size: int = 1000) -> None:
        random = torch.Generator().manual_seed(seed)
        phases = 2 * math.pi * torch.rand(size, 1, generator=random)
        self.waves = torch.sin(torch.linspace(0, 2 * math.pi, 16) + phases)

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> Tensor:
        return self.waves[index]
