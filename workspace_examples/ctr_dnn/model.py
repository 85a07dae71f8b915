"""PaddleRec's CTR-DNN: the embeddings of the slots, side by side, and a network over them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeline.data.batch import SlotBatch


class Model(nn.Module):
    """Predicts clicks.

    Args:
        ids: how many rows a table has: the ``hash_size`` of the data.
        embedding_dim: of a row.
        hidden_units: of each hidden layer.
    """

    SLOTS = ("user", "item", "history")

    def __init__(self, ids: int, embedding_dim: int, hidden_units: list[int]) -> None:
        super().__init__()
        # Sparse gradients: with lazy_mode, a step costs what the rows of a batch cost, however large the tables are.
        tables = {slot: nn.EmbeddingBag(ids, embedding_dim, mode="mean", sparse=True) for slot in self.SLOTS}
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.3)
        self.tables = nn.ModuleDict(tables)
        sizes = [len(self.SLOTS) * embedding_dim + 1, *hidden_units]
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, slots: SlotBatch) -> Tensor:
        """Logits of clicks, float32 (batch,)."""
        vectors = [table(*slots[name]) for name, table in self.tables.items()]
        logits: Tensor = self.network(torch.cat([*vectors, slots["price"]], 1))
        return logits.squeeze(1)
