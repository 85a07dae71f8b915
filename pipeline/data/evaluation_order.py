"""The order of the samples in an evaluation: neither shuffled nor weighted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from loguru import logger
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler


class FixedBatches(Sampler[list[int]]):
    """Batches that are decided before a pass starts.

    Args:
        batches: the indices of each.
    """

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def use_batches_of(self, other: FixedBatches) -> None:
        """Give the batches of another one from the next pass on, to workers that keep asking this object."""
        self.batches = other.batches

    def __len__(self) -> int:
        """Return how many batches there are."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches."""
        return iter(self.batches)


def selected_indices(sampler: Any, count: int, where: str) -> Sequence[int]:
    """Return the indices that a sampler selects, in ascending order and each once.

    A sampler that repeats an index weights the samples. It selects all samples of the dataset.

    Args:
        sampler: gives indices.
        count: how many samples the dataset has.
        where: what messages begin with.
    """
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(set(map(int, sampler.indices)))
    iterate = type(sampler).__iter__
    if isinstance(sampler, RandomSampler) and iterate is RandomSampler.__iter__:
        return range(len(sampler.data_source))
    if isinstance(sampler, WeightedRandomSampler) and iterate is WeightedRandomSampler.__iter__:
        return range(len(sampler.weights))
    distinct: set[int] = set()
    for index in sampler:
        if int(index) in distinct:
            # It may never end.
            _warn_of_weights(sampler, where)
            return range(count)
        distinct.add(int(index))
    return sorted(distinct)


def ordered_batches(batch_sampler: Any, count: int, where: str) -> list[list[int]]:
    """Return the batches of a batch sampler with ascending indices, sorted by their first index.

    Each batch keeps its samples, because the batch sampler may group samples of one length. One
    that repeats an index weights the samples; then all samples of the dataset come in ascending
    order, in batches of the largest size.

    Args:
        batch_sampler: gives lists of indices.
        count: how many samples the dataset has.
        where: what messages begin with.
    """
    batches: list[list[int]] = []
    distinct: set[int] = set()
    size = 1
    for drawn in batch_sampler:
        batch = sorted(map(int, drawn))
        size = max(size, len(batch))
        before = len(distinct)
        distinct.update(batch)
        if len(distinct) < before + len(batch):
            _warn_of_weights(batch_sampler, where)
            return [list(range(first, min(first + size, count))) for first in range(0, count, size)]
        batches.append(batch)
    return sorted(batches)


def _warn_of_weights(sampler: Any, where: str) -> None:
    what = f"{where}: {type(sampler).__name__} repeats samples"
    logger.warning(f"{what}; evaluation takes each sample of the dataset once, in order")


def is_in_order(order: Any) -> bool:
    """Return whether a sampler or batch sampler already has the order of an evaluation."""
    return isinstance(order, SequentialSampler | FixedBatches | range)


def is_plain_batch_sampler(batch_sampler: Any) -> bool:
    """Return whether a batch sampler cuts the order of its sampler into batches, as torch's does."""
    return isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__iter__ is BatchSampler.__iter__
