"""Pieces of a text that comes with Python: the topics of its own help."""

from collections.abc import Iterator, Sized
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Sampler, TensorDataset

TEXT = "\n".join(topics[name] for name in sorted(topics))[:100_000]
ALPHABET = sorted(set(TEXT))


def encode(text: str) -> Tensor:
    places = {character: place for place, character in enumerate(ALPHABET)}
    return torch.tensor([places[character] for character in text])


def decode(places: Tensor) -> str:
    return "".join(ALPHABET[place] for place in places.tolist())


def pieces(part: str, length: int) -> TensorDataset:
    """Each piece [length] of the first 90 % of the text, or of the rest, and what follows each of its characters."""
    border = len(TEXT) * 9 // 10
    text = encode(TEXT[:border] if part == "train" else TEXT[border:])
    return TensorDataset(text[:-1].unfold(0, length, 1), text[1:].unfold(0, length, 1))


class RandomBatches(Sampler[list[int]]):
    """Batches of random pieces, others in each epoch."""

    def __init__(self, dataset: Sized, batch_size: int, batches: int, seed: int) -> None:
        self.size, self.batch_size, self.batches, self.seed, self.epoch = len(dataset), batch_size, batches, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        for _ in range(self.batches):
            yield torch.randint(self.size, (self.batch_size,), generator=generator).tolist()
