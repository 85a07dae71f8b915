"""A factorization of users and items."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.data.batch import SlotBatch


class Model(nn.Module):
    """Predicts clicks.

    Args:
        users: how many there are.
        items: how many there are.
        dim: of a vector.
    """

    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim, sparse=True), nn.Embedding(items, dim, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, slots: SlotBatch) -> Tensor:
        """Logits of clicks, float32 (batch,)."""
        logits: Tensor = (self.users(slots["user"].ids) * self.items(slots["item"].ids)).sum(1)
        return logits
