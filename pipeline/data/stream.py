"""The batches of an IterableDataset, shared out over the workers: each sample once per epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, cast

from torch.utils.data import IterableDataset, get_worker_info

# There is no public way to change what get_worker_info() says.
from torch.utils.data._utils import worker as torch_worker

from pipeline.data.randomness import Draws, seeded
from pipeline.errors import DataError


class Stream(IterableDataset[Any]):
    """The batches that this process makes of an IterableDataset.

    A dataset with a method ``shard(rank, count)`` (the parameters have these names) shares itself out: it is called
    once in each worker and epoch with the number of this worker and of all, and returns the dataset to iterate,
    itself if it has changed itself. Of any other, each of ``count`` workers takes every count-th sample, beginning
    with its own; so the dataset has to give the same order in all of them, and its random draws are the same there:
    the generators are seeded from (seed, epoch), with ``shard`` from (seed, epoch, worker), and go on from batch
    to batch. ``collate`` draws apart from them, and disturbs no order. While the dataset runs, ``get_worker_info()``
    tells it that it is the only worker: one that shares itself out by it would be shared out twice, and samples lost.

    Args:
        dataset: gives the samples.
        collate: makes a batch of them.
        batch_size: None for samples as they are.
        drop_last: whether each worker leaves out its last batch if it is short.
        seed: of the random generators; None leaves them to chance.
        epoch: from 0.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        collate: Callable[[Any], Any],
        batch_size: int | None,
        drop_last: bool,
        seed: int | None,
        epoch: int,
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed, self.epoch = seed, epoch

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        # By chance, but by the same in all workers: torch gives each the sum of one number and its own.
        seed = info.seed - worker if info and self.seed is None else self.seed
        draws = Draws(seed, self.epoch, "stream", worker if has_shard(self.dataset) else 0)
        samples, size = self._samples(worker, workers, seed), self.batch_size or 1
        for number in count():
            with draws.going_on(), alone():
                taken = list(islice(samples, size))
            if len(taken) < (size if self.drop_last else 1):
                return
            with seeded(seed, self.epoch, "collate", worker, number):
                batch = self.collate(taken if self.batch_size else taken[0])
            yield batch

    def _samples(self, worker: int, workers: int, seed: int | None) -> Iterator[Any]:
        """Those of one worker. A generator: the dataset draws nothing before the first sample is asked for."""
        if workers == 1:
            yield from self.dataset
        elif not has_shard(self.dataset):
            yield from islice(self.dataset, worker, None, workers)
        else:
            with seeded(seed, self.epoch, "shard"):
                shard = cast("Any", self.dataset).shard(rank=worker, count=workers)
            if shard is None:
                raise DataError(
                    f"{type(self.dataset).__name__}.shard(rank={worker}, count={workers}) returned None; "
                    "return the dataset to iterate, self if it has changed itself"
                )
            yield from shard


def has_shard(dataset: Any) -> bool:
    """Whether a dataset has a method ``shard(rank, count)``; a shard with other parameters means something else."""
    try:
        inspect.signature(dataset.shard).bind(rank=0, count=1)
    except (AttributeError, TypeError):
        return False
    return True


@contextmanager
def alone() -> Iterator[None]:
    """In the block this worker is told that there is no other."""
    info = get_worker_info()
    if info:
        torch_worker._worker_info = type(info)(id=0, num_workers=1, seed=info.seed, dataset=info.dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = info
