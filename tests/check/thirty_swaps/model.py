"""Two embeddings, an encoder and a head."""

import torch
from torch import Tensor, nn

from .data import ITEMS, USERS


class Model(nn.Module):
    """Pairs [batch, 2] -> scores [batch, 2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, width)
        self.items = nn.Embedding(ITEMS, width)
        self.encoder = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, pairs: Tensor) -> Tensor:
        features = torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], dim=1)
        scores: Tensor = self.head(self.encoder(features))
        return scores
