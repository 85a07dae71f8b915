"""PaddleRec's Wide & Deep (Cheng et al., 2016, arXiv:1606.07792): two models whose logits are added."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeline.data.batch import SlotBatch, SparseSlot

SLOTS = ("user_id", "app", "installed")


class Wide(nn.Module):
    """A linear model: a weight for each id, and for each pair of an installed app and the one that is shown.

    Args:
        ids: how many rows a table has; pairs are hashed into as many.
    """

    def __init__(self, ids: int) -> None:
        super().__init__()
        self.ids = ids
        tables = {slot: nn.EmbeddingBag(ids, 1, mode="sum", sparse=True) for slot in (*SLOTS, "pair")}
        for table in tables.values():
            nn.init.zeros_(table.weight)
        self.tables = nn.ModuleDict(tables)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, slots: SlotBatch) -> Tensor:
        """Logits, float32 (batch, 1)."""
        crossed = {**slots, "pair": self.pairs(slots["installed"], slots["app"].ids)}
        return torch.stack([table(*crossed[name]) for name, table in self.tables.items()]).sum(0) + self.bias

    def pairs(self, installed: SparseSlot, app: Tensor) -> SparseSlot:
        """An id for each pair, of as many in a line as it has installed apps."""
        values, offsets = installed
        counts = torch.diff(offsets, append=offsets.new_tensor([len(values)]))
        return SparseSlot((values * 1_000_003 + app.repeat_interleave(counts)) % self.ids, offsets)


class Deep(nn.Module):
    """A network over embeddings; the arguments are those of Model."""

    def __init__(self, ids: int, embedding_dim: int, hidden_units: list[int]) -> None:
        super().__init__()
        tables = {slot: nn.EmbeddingBag(ids, embedding_dim, mode="mean", sparse=True) for slot in SLOTS}
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.3)
        self.tables = nn.ModuleDict(tables)
        sizes = [len(SLOTS) * embedding_dim + 1, *hidden_units]
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, slots: SlotBatch) -> Tensor:
        """Logits, float32 (batch, 1)."""
        vectors = [table(*slots[name]) for name, table in self.tables.items()]
        logits: Tensor = self.network(torch.cat([*vectors, slots["price"]], 1))
        return logits


class Model(nn.Module):
    """Predicts clicks.

    Args:
        ids: how many rows a table has: the ``hash_size`` of the data.
        embedding_dim: of a row of the deep part.
        hidden_units: of each hidden layer.
    """

    def __init__(self, ids: int, embedding_dim: int, hidden_units: list[int]) -> None:
        super().__init__()
        self.wide, self.deep = Wide(ids), Deep(ids, embedding_dim, hidden_units)

    def forward(self, slots: SlotBatch) -> Tensor:
        """Probabilities of clicks, float32 (batch,)."""
        return torch.sigmoid(self.wide(slots) + self.deep(slots)).squeeze(1)
