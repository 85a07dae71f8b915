"""A tower for users and one for items: whoever is near in both has chosen."""

from torch import Tensor, nn

from .data import ITEMS, USERS


class Tower(nn.Sequential):
    def __init__(self, count: int, width: int) -> None:
        super().__init__(nn.Embedding(count, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Towers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.items = Tower(USERS, width), Tower(ITEMS, width)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.users(users) @ self.items(items).T
