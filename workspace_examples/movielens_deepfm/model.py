"""DeepFM: Guo, Tang, Ye, Li and He, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", 2017."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data import FIELD_SIZES

IDS = ("user", "item")


class Model(nn.Module):
    """A factorization machine and an MLP that share their embeddings; the logit is the sum of both.

    The constructor's arguments come from `hyper_parameters` by name.

    Args:
        embedding_dim: length of each field's vector.
        hidden_units: widths of the MLP's hidden layers.
        dropout: share of hidden units dropped in training.
        side_features: False leaves only user id and item id, to see what the other fields are worth.
    """

    def __init__(self, embedding_dim: int, hidden_units: list[int], dropout: float, side_features: bool = True) -> None:
        super().__init__()
        self.fields = tuple(FIELD_SIZES) if side_features else IDS
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.ParameterDict({name: torch.zeros(FIELD_SIZES[name], 1) for name in self.fields})
        # Small at first: most users to be predicted were never trained, and should add next to nothing, not noise.
        self.embeddings = nn.ParameterDict(
            {name: 0.01 * torch.randn(FIELD_SIZES[name], embedding_dim) for name in self.fields}
        )
        self.mlp = mlp([len(self.fields) * embedding_dim, *hidden_units], dropout)

    def forward(
        self, user: Tensor, age: Tensor, gender: Tensor, occupation: Tensor, item: Tensor, year: Tensor, genres: Tensor
    ) -> Tensor:
        """The logits that a user likes an item, [batch].

        Args:
            user, age, gender, occupation, item, year: indices into each field's table, long [batch].
            genres: 1.0 for each genre that the item has, float [batch, genres]; at least one per row.
        """
        values = dict(zip(FIELD_SIZES, (user, age, gender, occupation, item, year, genres), strict=True))
        first_order = torch.stack([look_up(self.weights[name], values[name]) for name in self.fields], dim=1)
        vectors = torch.stack([look_up(self.embeddings[name], values[name]) for name in self.fields], dim=1)
        deep = self.mlp(vectors.flatten(1))
        logits: Tensor = self.bias + first_order.sum(dim=(1, 2)) + pairwise_products(vectors) + deep.squeeze(1)
        return logits


def pairwise_products(vectors: Tensor) -> Tensor:
    """The sum of the dot products of all pairs of fields, [batch, fields, dim] -> [batch] (Rendle 2010, lemma 3.1)."""
    return 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)


def look_up(table: Tensor, values: Tensor) -> Tensor:
    """The rows of `table` [size, dim] that `values` names, [batch, dim].

    Args:
        table: one row per value of the field.
        values: one index per sample, long [batch]; or several values per sample as a multi-hot float [batch, size],
            for which the mean of their rows is returned.
    """
    if values.is_floating_point():
        return values @ table / values.sum(dim=1, keepdim=True)
    return functional.embedding(values, table)


def mlp(widths: list[int], dropout: float) -> nn.Sequential:
    """Hidden layers with ReLU and dropout, `widths` long from the input on, and one linear output."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))
