"""A few batches of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from pipeline.data.order import EpochSampler
from pipeline.data.seeded_loader import SeededLoader
from pipeline.errors import DataError


class Limited:
    """The first batches of a loader; in all else, the loader."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader = loader
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.count)

    def __len__(self) -> int:
        return min(self.count, len(self.loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Overfitted(Limited):
    """The same batches in every epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Stay in the first: the loader is not told."""


def limited(loader: Any, count: int) -> Limited:
    """The first batches of a loader, of each epoch its own.

    No batch after them is asked for; workers have made those that the loader prefetches.

    Args:
        loader: any iterable of batches; where it has no length, this has none either.
        count: how many.
    """
    return Limited(loader, count)


def overfitted(loader: Any, count: int) -> Overfitted:
    """The first batches of a loader in the order of the dataset, the same in every epoch; the loader stays as it is.

    Args:
        loader: one of ours; or one whose order is that of its dataset anyway.
        count: how many batches.

    Raises:
        DataError: the loader has another order, which cannot be turned off.
    """
    if isinstance(loader, Limited):
        return overfitted(loader.loader, min(count, loader.count))
    order = order_of(loader)
    if isinstance(loader, SeededLoader) and isinstance(order, EpochSampler):
        return Overfitted(in_order(loader, order), count)
    stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if stream or isinstance(order, SequentialSampler) or isinstance(loader, list | tuple):
        return Overfitted(loader, count)
    raise DataError(
        f"overfit_batches: {count} cannot be had of a {type(loader).__name__} whose order a {type(order).__name__} "
        "decides; make it without a sampler of its own, e.g. with make_loader, or use limit_batches"
    )


def order_of(loader: Any) -> Any:
    """What decides the order of a loader's samples: a sampler, a batch sampler, or the loader itself."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler
    return getattr(loader, "sampler", loader) if batch_sampler is None else batch_sampler


def in_order(loader: SeededLoader, sampler: EpochSampler) -> SeededLoader:
    """A loader of the same dataset without shuffling, in epoch 0."""
    ordered = EpochSampler(len(sampler), shuffle=False, seed=sampler.seed)
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler):
        return loader.with_parts(epoch=0, sampler=ordered)
    size, drop_last = batches.batch_size, batches.drop_last
    return loader.with_parts(epoch=0, sampler=ordered, batch_sampler=BatchSampler(ordered, size, drop_last))
