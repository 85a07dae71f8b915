"""One batch of a map-style dataset, fetched with the random generators seeded for it, in whatever process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Sampler

from pipeline.data.randomness import seeded


class Fetch(NamedTuple):
    """What is asked of a dataset.

    Attributes:
        epoch: from 0.
        position: how many samples of the epoch come before this batch.
        indices: those of the batch; one index, where the loader makes no batches.
    """

    epoch: int
    position: int
    indices: Any


class Fetches(Sampler[Fetch]):
    """What a sampler or batch sampler gives, each with its position in the epoch.

    Args:
        indices: the sampler, any iterable.
        epoch: of the next pass, from 0.
        taken: how many of the first fetches are left out.
    """

    def __init__(self, indices: Any, epoch: int, taken: int = 0) -> None:
        self.indices, self.epoch, self.taken = indices, epoch, taken

    def __iter__(self) -> Iterator[Fetch]:
        """The fetches of one epoch."""
        epoch, position = self.epoch, 0
        for number, indices in enumerate(self.indices):
            if number >= self.taken:
                yield Fetch(epoch, position, indices)
            position += length_hint(indices, 1)

    def __len__(self) -> int:
        """How many they are."""
        return max(0, len(self.indices) - self.taken)


class FetchedDataset(Dataset[Any]):
    """A dataset whose items are collated batches, each a function of its ``Fetch`` and the seed.

    Args:
        dataset: gives the samples.
        collate: makes a batch of them.
        seed: with epoch and position it seeds the random generators, once per batch.
        batched: whether a fetch has a list of indices.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[Any], Any], seed: int | None, batched: bool) -> None:
        self.dataset, self.collate, self.seed, self.batched = dataset, collate, seed, batched

    def __getitem__(self, fetch: Fetch) -> Any:
        """The batch; the generators of this process are afterwards as they were."""
        with seeded(self.seed, fetch.epoch, "batch", fetch.position):
            return self.collate(self._samples(fetch.indices))

    # What torch calls where there is a batch sampler.
    __getitems__ = __getitem__

    def _samples(self, indices: Any) -> Any:
        if not self.batched:
            return self.dataset[indices]
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self.dataset[index] for index in indices]
