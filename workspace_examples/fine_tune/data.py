"""Tones with noise, made on the spot."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Tones(Dataset[tuple[Tensor, Tensor]]):
    """Waves [64] of any phase, and which of twelve tones (three octaves of four notes) each is.

    Args:
        size: how many there are.
        seed: decides their phases and noise.
        octaves: False: of a tone only its note, from 0 to 3, is told.
    """

    def __init__(self, size: int, seed: int, octaves: bool = True) -> None:
        random = torch.Generator().manual_seed(seed)
        tones = torch.arange(size) % 12
        cycles = 2 * 2 ** (tones / 4)
        time = torch.arange(64) / 64 + torch.rand(size, 1, generator=random)
        self.waves = (2 * math.pi * cycles[:, None] * time).sin() + 0.7 * torch.randn(size, 64, generator=random)
        self.labels = tones if octaves else tones % 4

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.waves[index], self.labels[index]
