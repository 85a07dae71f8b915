"""The order of the samples: a pure function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from pipeline.data.randomness import mix


class EpochSampler(Sampler[int]):
    """Indices in order, or in a new order for each epoch.

    Args:
        length: how many samples there are.
        shuffle: whether to shuffle.
        seed: with the epoch it decides the order; None draws one from torch, if it is needed.
    """

    def __init__(self, length: int, shuffle: bool, seed: int | None) -> None:
        self.length = length
        self.shuffle = shuffle
        drawn = seed is None and shuffle
        self.seed = int(torch.randint(2**31, ()).item()) if drawn else seed or 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many samples there are."""
        return self.length

    def __iter__(self) -> Iterator[int]:
        """The indices of one epoch."""
        if not self.shuffle:
            return iter(range(self.length))
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        return iter(torch.randperm(self.length, generator=generator).tolist())
