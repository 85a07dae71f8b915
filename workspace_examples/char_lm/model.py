"""A plain module: what comes after each character, given those before it."""

from torch import Tensor, nn

from .data import ALPHABET


class Model(nn.Module):
    """Characters [batch, length] -> scores [batch, alphabet, length] of what follows each.

    (Scores of classes stand in the second place, where `cross_entropy` looks for them.)

    Args:
        width: units of the GRU.
        embedding_dim: numbers that stand for a character.
    """

    def __init__(self, width: int, embedding_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), embedding_dim)
        self.gru = nn.GRU(embedding_dim, width, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(characters))
        scores: Tensor = self.head(states)
        return scores.transpose(1, 2)
