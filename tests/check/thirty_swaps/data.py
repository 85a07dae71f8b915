"""Clicks, made on the spot."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

USERS, ITEMS = 6, 12


class Clicks(Dataset[tuple[Tensor, Tensor]]):
    """A user and an item [2], and whether the one clicked the other (0 or 1)."""

    def __init__(self, seed: int, size: int = 64) -> None:
        random = torch.Generator().manual_seed(seed)
        users = torch.randint(USERS, (size,), generator=random)
        items = torch.randint(ITEMS, (size,), generator=random)
        self.pairs = torch.stack([users, items], dim=1)
        self.labels = ((users + items) % 3 == 0).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index], self.labels[index]
