"""A small GPT: characters [batch, length] -> scores [batch, length, alphabet] of what follows each."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data import ALPHABET


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor) -> Tensor:
        parts = self.attention(self.norm1(states)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.projection(attended.transpose(1, 2).flatten(-2))
        return states + self.mlp(self.norm2(states))


class Model(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.characters, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.norm(self.blocks(self.characters(characters) + self.places(places))))

    @torch.no_grad()
    def generate(self, characters: Tensor, count: int) -> Tensor:
        for _ in range(count):
            scores = self(characters[:, -self.length :])[:, -1]
            characters = torch.cat([characters, scores.argmax(dim=-1, keepdim=True)], dim=1)
        return characters


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
