"""A factorization machine of two ids: Rendle, "Factorization Machines", 2010."""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """The logit of a click: a bias for user and item each, and the dot product of their vectors.

    Args:
        user_count: number of users.
        item_count: number of items.
        embedding_dim: length of each vector.
    """

    def __init__(self, user_count: int, item_count: int, embedding_dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.user_bias = nn.Embedding(user_count, 1)
        self.item_bias = nn.Embedding(item_count, 1)
        self.user_vector = nn.Embedding(user_count, embedding_dim)
        self.item_vector = nn.Embedding(item_count, embedding_dim)
        for table in (self.user_bias, self.item_bias, self.user_vector, self.item_vector):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """The logits [batch] of ids, both long [batch]."""
        product = (self.user_vector(user) * self.item_vector(item)).sum(dim=1)
        logits: Tensor = self.bias + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0] + product
        return logits
