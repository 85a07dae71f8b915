"""The batches of an IterableDataset, shared out over the workers: each sample once per epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from pipeline.data.place import Beginning, Place
from pipeline.data.progress import Progress
from pipeline.data.share import Share


class Stream(IterableDataset[Any]):
    """The batches that this process makes of an IterableDataset.

    A dataset with a method ``shard(rank, count)`` (the parameters have these names) shares itself out: it is called
    once in each worker and epoch with the number of this worker and of all, and returns the dataset to iterate,
    itself if it has changed itself. Of any other, each of ``count`` workers takes every count-th sample, beginning
    with its own; so the dataset has to give the same order in all of them, and its random draws are the same there:
    the generators are seeded from (seed, epoch), with ``shard`` from (seed, epoch, worker), and go on from batch
    to batch. ``collate`` draws apart from them, and disturbs no order. While the dataset runs, ``get_worker_info()``
    tells it that it is the only worker: one that shares itself out by it would be shared out twice, and samples lost.

    A dataset with ``state_dict`` and ``load_state_dict`` (what ``shard`` returns, where there is that) goes on in the
    middle of an epoch: it is given its state, and then iterated, with the generators where they were after the last
    batch. So its state has to hold whatever it drew before its first sample, such as an order that it has shuffled.

    Args:
        dataset: gives the samples.
        collate: makes a batch of them.
        batch_size: None for samples as they are.
        drop_last: whether each worker leaves out its last batch if it is short.
        seed: of the random generators; None leaves them to chance.
        epoch: from 0.
        where: what messages begin with.
        place: where the pass is; then each batch comes ``Marked`` with the state of the dataset. None: nobody asks.
        beginning: puts the dataset of this process to its beginning.
        progress: of the workers.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        collate: Callable[[Any], Any],
        batch_size: int | None,
        drop_last: bool,
        seed: int | None,
        epoch: int,
        *,
        where: str,
        place: Place | None = None,
        beginning: Beginning | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed, self.epoch, self.where = seed, epoch, where
        self.marks = place is not None
        self.first = place.first if place else 0
        self.states = list(place.states) if place else []
        self.beginning, self.progress = beginning, progress

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch, or the rest of them."""
        return self._share().batches()

    def _share(self) -> Share:
        """What of the stream falls to this process: in a pass that goes on, the first worker has the share that is up."""
        info = get_worker_info()
        number, count = ((info.id + self.first) % info.num_workers, info.num_workers) if info else (0, 1)
        # By chance, but by the same in all workers: torch gives each the sum of one number and its own.
        seed = info.seed - info.id if info and self.seed is None else self.seed
        return Share(self, number, count, seed)
