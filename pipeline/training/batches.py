"""The batches of one epoch, one at a time, and how many of them were taken: a position at which to go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from loguru import logger
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from pipeline.data.loader import set_epoch
from pipeline.data.position import after, place_of
from pipeline.data.seeded_loader import SeededLoader
from pipeline.errors import DataError


class Batches:
    """The batches of one epoch of a loader.

    Args:
        loader: gives them; nothing is read before it has to be.
        epoch: which epoch, from 1; its sampler is told. 0 stands for the time before the first.
        taken: how many of them were taken before; they are left out.

    Attributes:
        taken: how many were taken so far.
    """

    def __init__(self, loader: Iterable[Any], epoch: int, taken: int = 0) -> None:
        self.loader = loader
        self.epoch = epoch
        self.taken = taken
        self.length = _exact_length(loader)
        self._rest: Iterator[Any] | None = None
        self._reading: Any = None
        self._place: Mapping[str, Any] | None = None
        self._ahead: list[Any] = []
        if epoch:
            set_epoch(loader, epoch - 1)

    def open(self, place: Mapping[str, Any] | None = None) -> None:
        """Begin to read, if any is left; ``place``: where the batches were that are left out, if they knew."""
        self._place = place
        if self.taken and not self.over():
            self._opened()

    def place(self) -> Mapping[str, Any] | None:
        """The place in the data after those that were taken; None where their number says it all."""
        return self._place if self._reading is None else place_of(self._reading, self.taken)

    def over(self) -> bool:
        """Whether all were taken. A loader whose length is not certain is read one batch ahead to tell."""
        if self.length is not None:
            return self.taken >= self.length
        if not self._ahead:
            self._ahead = list(islice(self._opened(), 1))
        return not self._ahead

    def take(self) -> Any:
        """The next one; there has to be one.

        Raises:
            DataError: the loader ends before its length says so.
        """
        for batch in self._ahead or islice(self._opened(), 1):
            self._ahead = []
            self.taken += 1
            return batch
        raise DataError(
            f"train_loader: gave {self.taken} batches in epoch {self.epoch}, and its length is {self.length}; "
            "correct its __len__, or that of its batch_sampler"
        )

    def _opened(self) -> Iterator[Any]:
        if self._rest is None:
            sampler = getattr(self.loader, "sampler", None)
            if self.taken and isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
                other = f"its {type(sampler).__name__} draws another order than the one that was left"
                logger.warning(f"train_loader: {other}; make it with pipeline.data.loader.make_loader to go on exactly")
            ours = isinstance(self.loader, SeededLoader)
            self._reading = after(self.loader, self.taken, self._place) if ours else self.loader
            self._rest = iter(self._reading)
            if not ours:
                self._skip(self._rest)
        return self._rest

    def _skip(self, batches: Iterator[Any]) -> None:
        """Leave out what was taken before: it is read, and not trained on."""
        found = sum(1 for _ in islice(batches, self.taken))
        if found < self.taken:
            left = f"has {found} batches in epoch {self.epoch}, and {self.taken} of them were taken before"
            raise DataError(f"train_loader: {left}; go on with the data and batch size that it was trained on")


def _exact_length(loader: Iterable[Any]) -> int | None:
    """How many batches there are, where that is certain: an IterableDataset gives what it gives."""
    if isinstance(loader, list | tuple):
        return len(loader)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except TypeError:  # a batch_sampler without a length
        return None
