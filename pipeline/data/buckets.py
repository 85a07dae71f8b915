"""Length buckets: batches of samples that are about as long, with at most so many padded elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from pipeline.data.loader import EpochSampler
from pipeline.data.rng import mix
from pipeline.errors import DataError


class LengthBuckets(Sampler[list[int]]):
    """A batch sampler: as many samples of about the same length as fit into ``max_elements``, once they are padded.

    The length of a sample is rounded up to a multiple of ``width``. In the order of these lengths, samples join a batch
    until their number times the longest of them would be more than ``max_elements``. A sample that is longer is an error,
    so no batch has more elements. With ``shuffle`` an epoch mixes the samples whose rounded lengths are equal, and the
    batches, as (seed, epoch) says; each sample comes once, and the number of batches is the same in all epochs.

    Args:
        dataset: the samples.
        max_elements: of a batch: its samples times the length of the longest.
        lengths: of the samples, a number for each; or the name of the attribute or method of the dataset that has them.
        width: of a bucket. 1 pads least; a larger one mixes more.
        shuffle: whether each epoch has other batches, in another order; else they come from the shortest to the longest.
        seed: with the epoch it decides them; None draws one from torch.

    Raises:
        DataError: there is not one length for each sample, or a sample is too long.
    """

    has_exact_length = True

    def __init__(
        self,
        dataset: Any,
        max_elements: int,
        lengths: str | Sequence[int] = "lengths",
        width: int = 8,
        shuffle: bool = False,
        seed: int | None = 0,
    ) -> None:
        self.sampler, self.max_elements = EpochSampler(dataset, shuffle, seed), max_elements
        values = getattr(dataset, lengths, ()) if isinstance(lengths, str) else lengths
        values = torch.as_tensor(values() if callable(values) else values).tolist()
        if len(values) != len(self.sampler):
            what = f"{len(values)} lengths for the {len(self.sampler)} samples of {type(dataset).__name__}"
            raise DataError(f"LengthBuckets: {what}; give the dataset a `lengths` with one for each, or name it")
        longest = max(values, default=0)
        if longest > max_elements:
            what = f"sample {values.index(longest)} has the length {longest}, and max_elements is {max_elements}"
            raise DataError(f"LengthBuckets: {what}; raise it, or cut the sample")
        # A whole bucket may be wider than max_elements, although no sample in it is.
        self._lengths = [min(-(-value // width) * width, max_elements) for value in values]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose batches come next, from 0."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """How many batches there are."""
        return len(self._batches(range(len(self._lengths))))

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of one epoch, as indices."""
        batches = self._batches(self.sampler)
        if not self.sampler.shuffle:
            return iter(batches)
        generator = torch.Generator().manual_seed(mix(self.sampler.seed, self.sampler.epoch, "batches"))
        return iter([batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()])

    def _batches(self, order: Any) -> list[list[int]]:
        """The batches, from the shortest to the longest; samples of one bucket in this order."""
        batches: list[list[int]] = []
        for index in sorted(order, key=self._lengths.__getitem__):
            if not batches or (len(batches[-1]) + 1) * self._lengths[index] > self.max_elements:
                batches.append([])
            batches[-1].append(index)
        return batches
