"""In the worker: one seeded batch, and the error of a sample, with the sample that caused it."""

from __future__ import annotations

import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import c_int64
from multiprocessing.sharedctypes import RawArray
from operator import length_hint
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from pipeline.data.rng import seeded
from pipeline.errors import DataError
from pipeline.user_code.tracebacks import user_traceback

_T = TypeVar("_T")


class Progress:
    """What each of several workers is at, in memory that they share.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self._at = RawArray(c_int64, [-1] * (2 * workers))

    def over(self, samples: Iterable[_T], batch: int, worker: int, *, there: bool = False) -> Iterator[_T]:
        """The samples of a batch, with a note of which one a worker is at.

        Args:
            samples: asked for one by one.
            batch: of which they are.
            worker: asks for them.
            there: whether it has a sample once it is given, and so is at the next; else it has its index.
        """
        self.begin(batch, worker)
        for number, sample in enumerate(samples):
            self._at[2 * worker + 1] = number + there
            yield sample

    def begin(self, batch: int, worker: int) -> None:
        """A worker is at the first sample of a batch."""
        self._at[2 * worker], self._at[2 * worker + 1] = batch, 0

    def of(self, worker: int) -> tuple[int, int]:
        """The batch that a worker was at last, -1 where it had come to none; and which sample in it, from 0."""
        return self._at[2 * worker], self._at[2 * worker + 1]


MOST = 8

"""Samples of a batch that are named one by one."""

TORCHS = (default_collate, default_convert)

"""What a DataLoader collates with where it is given no function."""


class WorkerTracebackError(Exception):
    """The cause of an exception that a worker raised: its traceback there, as text."""

    def __str__(self) -> str:
        """The text, on lines of its own."""
        return f"\n{self.args[0]}"


class WorkerFailure:
    """What a worker gives in the place of a batch that it could not make.

    Args:
        error: what was raised; it can be pickled.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        shown = error.with_traceback(user_traceback(error.__traceback__))
        self.trace = "".join(traceback.format_exception(shown))

    @classmethod
    def instead(cls, error: Exception) -> Self:
        """Itself in a worker.

        Raises:
            Exception: the error, in the process that trains, or where it cannot be pickled: then torch reports it.
        """
        if get_worker_info() is None or not _can_travel(error):
            raise error
        return cls(error)

    def again(self) -> Exception:
        """The exception, in the process that trains."""
        if not isinstance(self.error, DataError):
            self.error.__cause__ = WorkerTracebackError(self.trace)
        return self.error


def _can_travel(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the class of a user's exception does
        return False
    return True


def add_note(error: BaseException, where: str, what: str) -> None:
    """Give an error of user code a note that says where in the data it was raised; type and traceback stay.

    Args:
        error: gets it.
        where: the dataset.
        what: which samples, and what was done with them.
    """
    error.add_note(f"{where}: {what}{here()}")


def here() -> str:
    """``, in worker 1``; nothing in the process that trains."""
    info = get_worker_info()
    return f", in worker {info.id}" if info else ""


def collate_error(error: Exception, where: str, which: str, samples: Any, collate: Any) -> DataError | None:
    """What to raise where torch's own collate failed, which names no sample; a user's function gets a note instead.

    Args:
        error: was raised.
        where: the dataset.
        which: the samples, in words.
        samples: what the dataset gave.
        collate: the function.
    """
    if collate not in TORCHS:
        add_note(error, where, f"collate_fn failed on {which}: {describe_samples(samples)}")
        return None
    reason = str(error).partition("\n")[0]
    remedy = "return the same from each, in numbers or in tensors of one shape, or name a collate_fn that pads them"
    return DataError(
        f"{where}: torch's collate makes no batch of {which}{here()}: {describe_samples(samples)} ({reason}); {remedy}"
    )


def format_indices(indices: Any) -> str:
    """``the samples 3, 17, 9``."""
    if not isinstance(indices, list | tuple):
        return f"sample {indices}"
    if len(indices) == 1:
        return f"sample {indices[0]}"
    return f"the samples {_first(indices)}"


def describe_samples(samples: Any) -> str:
    """What the samples of a batch are, those that are alike told once: ``a tensor of shape (3,), 2 times; None``."""
    if not isinstance(samples, list | tuple):
        return form(samples)
    counts: dict[str, int] = {}
    for each in samples:
        told = form(each)
        counts[told] = counts.get(told, 0) + 1
    told_once = [told if count == 1 else f"{told}, {count} times" for told, count in counts.items()]
    more = f"; and {len(told_once) - MOST} other kinds" if len(told_once) > MOST else ""
    return "; ".join(told_once[:MOST]) + more


def form(value: Any, depth: int = 0) -> str:
    """What a sample is, with the shapes of the tensors in it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    kind = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        inside = [f"{name}: {form(each, depth + 1)}" for name, each in list(value.items())[:MOST]]
    elif isinstance(value, list | tuple):
        inside = [form(each, depth + 1) for each in value[:MOST]]
    else:
        return f"{kind} of length {len(value)}" if isinstance(value, str | bytes) else kind
    return f"{kind} of {len(value)}" + (f" ({', '.join(inside)})" if inside and depth < 2 else "")


def _first(each: Any) -> str:
    told = ", ".join(map(str, each[:MOST]))
    return f"{told} … ({len(each)} of them)" if len(each) > MOST else told


class BatchRequest(NamedTuple):
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
        return f"{format_indices(self.indices)} (from place {self.position} of epoch {self.epoch} on)"


class BatchRequests(Sampler[BatchRequest]):
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
        self.given: deque[BatchRequest] = deque(maxlen=kept)

    def __iter__(self) -> Iterator[BatchRequest]:
        """The fetches of one epoch."""
        epoch, position = self.epoch, 0
        self.given.clear()
        for number, indices in enumerate(self.indices):
            if number >= self.taken:
                fetch = BatchRequest(epoch, position, indices)
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

    def __getitem__(self, fetch: BatchRequest) -> Any:
        """The batch, or what a worker gives in its place; the generators of this process are afterwards as they were."""
        try:
            if self.seed is None:
                return self._collated(fetch, self._samples(fetch))
            with seeded(self.seed, fetch.epoch, "batch", fetch.position):
                return self._collated(fetch, self._samples(fetch))
        except Exception as error:
            return WorkerFailure.instead(error)

    # What torch calls where there is a batch sampler.
    __getitems__ = __getitem__

    def _samples(self, fetch: BatchRequest) -> Any:
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
            what = f"{type(self.dataset).__name__} raised StopIteration for {format_indices(asked)}, which would end the epoch"
            raise DataError(f"{self.where}: {what}{here()}; raise IndexError, or correct __len__") from error
        except Exception as error:
            add_note(error, self.where, f"raised for {format_indices(asked)}, fetching {fetch}")
            raise

    def _collated(self, fetch: BatchRequest, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            if told := collate_error(error, self.where, str(fetch), samples, self.collate):
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
