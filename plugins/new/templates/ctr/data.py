"""Clicks made on the spot: each user likes the items that point in the direction of their taste."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Clicks(Dataset[dict[str, Tensor]]):
    """User, item, and whether the user clicked; `forward` takes the first two by name, the loss the target.

    Args:
        seed: decides who was shown what.
        user_count: number of users.
        item_count: number of items.
        size: number of impressions.
    """

    def __init__(self, seed: int, user_count: int, item_count: int, size: int = 20000) -> None:
        # Tastes are the same for every seed: training and validation are about the same users and items.
        world = torch.Generator().manual_seed(0)
        tastes = torch.randn(user_count, 3, generator=world)
        items = torch.randn(item_count, 3, generator=world)
        random = torch.Generator().manual_seed(seed)
        self.users = torch.randint(user_count, (size,), generator=random)
        self.items = torch.randint(item_count, (size,), generator=random)
        chance = torch.sigmoid((tastes[self.users] * items[self.items]).sum(dim=1) - 1)
        self.clicked = torch.bernoulli(chance, generator=random)

    def __len__(self) -> int:
        return len(self.clicked)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"user": self.users[index], "item": self.items[index], "target": self.clicked[index]}
