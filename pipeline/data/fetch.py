"""One batch of a map-style dataset, fetched with the random generators seeded for it, in whatever process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Sampler, Subset, TensorDataset, get_worker_info

from pipeline.data.blame import TORCHS, Raised, blame, here, listed, uncollated
from pipeline.data.progress import Progress
from pipeline.data.randomness import seeded
from pipeline.errors import DataError


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

    @property
    def many(self) -> bool:
        """Whether it is for a batch of several samples."""
        return isinstance(self.indices, list | tuple) and len(self.indices) > 1

    def __str__(self) -> str:
        """Which samples, and where in the epoch."""
        return f"{listed(self.indices)} (from place {self.position} of epoch {self.epoch} on)"


class Fetches(Sampler[Fetch]):
    """What a sampler or batch sampler gives, each with its position in the epoch.

    Args:
        indices: the sampler, any iterable.
        epoch: of the next pass, from 0.
        taken: how many of the first fetches are left out.
        kept: how many of the last are kept in mind, to tell which a worker was asked for.

    Attributes:
        given: these.
    """

    def __init__(self, indices: Any, epoch: int, taken: int = 0, kept: int = 0) -> None:
        self.indices, self.epoch, self.taken = indices, epoch, taken
        self.given: deque[Fetch] = deque(maxlen=kept)

    def __iter__(self) -> Iterator[Fetch]:
        """The fetches of one epoch."""
        epoch, position = self.epoch, 0
        self.given.clear()
        for number, indices in enumerate(self.indices):
            if number >= self.taken:
                fetch = Fetch(epoch, position, indices)
                if self.given.maxlen:
                    self.given.append(fetch)
                yield fetch
            position += length_hint(indices, 1)

    def __len__(self) -> int:
        """How many they are."""
        return max(0, len(self.indices) - self.taken)


class FetchedDataset(Dataset[Any]):
    """A dataset whose items are collated batches, each a function of its ``Fetch`` and the seed.

    What fails is told with the dataset and the samples: in a note of the exception that the dataset or ``collate``
    raised, or in a DataError where these samples make no batch for torch.

    Args:
        dataset: gives the samples.
        collate: makes a batch of them.
        seed: with epoch and position it seeds the random generators, once per batch.
        batched: whether a fetch has a list of indices.
        where: what messages begin with.
        progress: of the workers; None: the process that trains fetches.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[Any], Any],
        seed: int | None,
        batched: bool,
        *,
        where: str,
        progress: Progress | None = None,
    ) -> None:
        self.dataset, self.collate, self.seed, self.batched = dataset, collate, seed, batched
        self.where, self.progress = where, progress

    def __getitem__(self, fetch: Fetch) -> Any:
        """The batch, or what a worker gives in its place; the generators of this process are afterwards as they were."""
        try:
            if self.seed is None:
                return self._collated(fetch, self._samples(fetch))
            with seeded(self.seed, fetch.epoch, "batch", fetch.position):
                return self._collated(fetch, self._samples(fetch))
        except Exception as error:
            return Raised.instead(error)

    # What torch calls where there is a batch sampler.
    __getitems__ = __getitem__

    def _samples(self, fetch: Fetch) -> Any:
        asked = indices = noted = fetch.indices
        at_once = getattr(self.dataset, "__getitems__", None) if self.batched else None
        if self.progress and (info := get_worker_info()):
            self.progress.begin(fetch.position, info.id)
            noted = self.progress.over(indices, fetch.position, info.id)
        try:
            if not self.batched:
                return self.dataset[indices]
            return at_once(indices) if at_once else [self.dataset[asked := index] for index in noted]
        except StopIteration as error:
            what = f"{type(self.dataset).__name__} raised StopIteration for {listed(asked)}, which would end the epoch"
            raise DataError(f"{self.where}: {what}{here()}; raise IndexError, or correct __len__") from error
        except Exception as error:
            blame(error, self.where, f"raised for {listed(asked)}, fetching {fetch}")
            raise

    def _collated(self, fetch: Fetch, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            if told := uncollated(error, self.where, str(fetch), samples, self.collate):
                raise told from error
            raise


def draws_nothing(dataset: Any, collate: Callable[[Any], Any]) -> bool:
    """Whether no fetch can draw a random number: the samples are slices of tensors, and torch collates them.

    A class of somebody's own may draw, in whatever it overrides.
    """
    return collate in TORCHS and _slices(dataset)


def _slices(dataset: Any) -> bool:
    kind = type(dataset)
    if kind is Subset:
        return type(dataset.indices) in {list, tuple, range, Tensor} and _slices(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(_slices, dataset.datasets))
    tensors = dataset.tensors if kind is TensorDataset else dataset
    return kind in {TensorDataset, list, tuple} and all(type(each) is Tensor for each in tensors)
