"""In the worker: make one seeded batch; errors name the sample that caused them."""

from __future__ import annotations

import pickle
import traceback
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from multiprocessing.sharedctypes import RawArray
from operator import length_hint
from types import MethodType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from pipeline.checkpoint.random_state import generators_in
from pipeline.config.yaml_tree import differences
from pipeline.data.batch import MAX_LISTED, EmptySlice, SlotBatch, lengths, shape_of
from pipeline.data.padded import pad
from pipeline.data.random_numbers import declared_use, refuse_draws
from pipeline.data.rng import seeding
from pipeline.errors import DataError
from pipeline.user_code.tracebacks import user_traceback

_T = TypeVar("_T")


class Progress:
    """The batch and sample that each worker is at, in memory that they share.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self._at = RawArray(c_int64, [-1] * (2 * workers))

    def track(self, samples: Iterable[_T], batch: int, *, fetched: bool = False) -> Iterator[_T]:
        """The samples of a batch, while it is noted which one this worker is at.

        Args:
            samples: the samples, or their indices.
            batch: of which they are.
            fetched: whether they are the samples, so that it is at the next one when it has one.
        """
        # At once: while the samples are taken, a stream is told that there is no other worker.
        place = self.begin(batch)

        def note() -> Iterator[_T]:
            for number, sample in enumerate(samples):
                self._at[place] = number + fetched
                yield sample

        return note()

    def begin(self, batch: int) -> int:
        """Note that this worker is at the first sample of a batch; where that is noted."""
        info = get_worker_info()
        place = 2 * info.id if info else 0
        self._at[place], self._at[place + 1] = batch, 0
        return place + 1

    def last(self, worker: int) -> tuple[int, int]:
        """The last batch of a worker, -1 where it had none yet; and which sample in it, from 0."""
        return self._at[2 * worker], self._at[2 * worker + 1]


# What a DataLoader collates with by default.
TORCH_COLLATES = (default_collate, default_convert)


class WorkerTracebackError(Exception):
    """The cause of an exception that a worker raised: its traceback there, as text."""

    def __str__(self) -> str:
        """The text, on lines of its own."""
        return f"\n{self.args[0]}"


class WorkerFailure:
    """What a worker returns in place of a batch that it could not make.

    Args:
        error: what was raised; it can be pickled.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.trace = "".join(traceback.format_exception(error.with_traceback(user_traceback(error.__traceback__))))

    @classmethod
    def or_raise(cls, error: Exception) -> Self:
        """A failure, in a worker.

        Raises:
            Exception: the error, in the process that trains, or where it cannot be pickled: then torch reports it.
        """
        if get_worker_info():
            with suppress(Exception):  # whatever the class of a user's exception does
                pickle.loads(pickle.dumps(error))
                return cls(error)
        raise error

    def exception(self) -> Exception:
        """The error, in the process that trains."""
        if not isinstance(self.error, DataError):
            self.error.__cause__ = WorkerTracebackError(self.trace)
        return self.error


def in_worker() -> str:
    """``, in worker 1``; nothing in the process that trains."""
    info = get_worker_info()
    return f", in worker {info.id}" if info else ""


def collate_samples(collate: Callable[[Any], Any], samples: Any, where: str, which: object) -> Any:
    """A batch of samples.

    Args:
        collate: the function.
        samples: what the dataset gave.
        where: the dataset.
        which: the samples, in words.

    Raises:
        DataError: torch's collate has failed, which names no sample; an error of a user's function gets a note instead.
    """
    try:
        return collate(samples)
    except DataError:
        raise
    except Exception as error:
        if collate not in TORCH_COLLATES:
            error.add_note(f"{where}: collate_fn failed on {which}: {describe_samples(samples)}{in_worker()}")
            raise
        what = f"torch's collate makes no batch of {which}{in_worker()}: {describe_samples(samples)}"
        reason = str(error).partition("\n")[0]
        remedy = "return the same from each, in numbers or in tensors of one shape, or name a collate_fn that pads them"
        raise DataError(f"{where}: {what} ({reason}); {remedy}") from error


def uncollated(batch: _T) -> _T:
    """The collate function of a dataset that gives whole batches."""
    return batch


def format_indices(indices: Any) -> str:
    """``the samples 3, 17, 9``."""
    if not isinstance(indices, list | tuple):
        return f"sample {indices}"
    if len(indices) == 1:
        return f"sample {indices[0]}"
    more = f" … ({len(indices)} of them)" if len(indices) > MAX_LISTED else ""
    return f"the samples {', '.join(map(str, indices[:MAX_LISTED]))}{more}"


def describe_samples(samples: Any) -> str:
    """What the samples of a batch are, each kind once: ``a tensor of shape (3,), 2 times; None``."""
    if not isinstance(samples, list | tuple):
        return shape_of(samples, 2)
    counts = Counter(shape_of(sample, 2) for sample in samples)
    kinds = [kind if count == 1 else f"{kind}, {count} times" for kind, count in counts.items()]
    more = f"; and {len(kinds) - MAX_LISTED} other kinds" if len(kinds) > MAX_LISTED else ""
    return "; ".join(kinds[:MAX_LISTED]) + more


class BatchRequest(NamedTuple):
    """The request for one batch: its samples and its position in the epoch.

    Attributes:
        epoch: from 0.
        position: how many samples of the epoch come before this batch.
        indices: those of the batch; one index, where the loader makes no batches.
        empty: whether this rank has none of the batch, and ``indices`` are those of a stand-in.
    """

    epoch: int
    position: int
    indices: Any
    empty: bool = False

    def __str__(self) -> str:
        """Which samples, and where in the epoch."""
        return f"{format_indices(self.indices)} (from place {self.position} of epoch {self.epoch} on)"


def slice_of(count: int, rank: int, size: int) -> range:
    """The places of a rank among so many samples, as ``torch.tensor_split`` cuts them into ``size`` slices."""
    shortest, longer = divmod(count, size)
    begin = rank * shortest + min(rank, longer)
    return range(begin, begin + shortest + (rank < longer))


class BatchRequests:
    """The requests that a sampler or batch sampler makes, each with its position in the epoch.

    Of each batch, a rank gets the requests for its slice. What is counted and hashed is the whole batch, so it is the same
    on all ranks.

    Args:
        indices: the sampler, any iterable.
        where: what messages begin with.
        history: how many of the last are kept, to tell which of them a worker had: all that may not be answered yet.
        hashed: whether the indices that are taken are hashed; else a description of the order says enough.
        seed: with the epoch it decides what the sampler draws; None leaves that to the sampler.
        rank, size: which slice of each batch is asked for, and into how many it is cut.
        single: whether a slice is one sample, which is asked for by its index alone.

    Attributes:
        epoch: of the next pass, from 0.
        skip: how many of its first are left out.
        seen: how many samples are left out, in these and at the beginning of the next; 0: those of ``skip`` alone.
        expected: what the hash of those that are left out has to be; None: unknown.
        last: the last ones.
    """

    def __init__(
        self,
        indices: Any,
        where: str,
        history: int,
        hashed: bool,
        seed: int | None,
        *,
        rank: int = 0,
        size: int = 1,
        single: bool = False,
    ) -> None:
        self.indices = indices
        self.where = where
        self.seed = seed
        self.rank = rank
        self.size = size
        self.single = single
        self.epoch = 0
        self.skip = 0
        self.seen = 0
        self.expected: str | None = None
        self.last: deque[BatchRequest] = deque(maxlen=history)
        # How many were taken, and the hash of them: after each that may have been asked for and not given, and two more.
        self._hashes: deque[tuple[int, str]] = deque(maxlen=history + 2 if hashed else 0)

    def prepare(self, epoch: int, start: Mapping[str, Any]) -> None:
        """Prepare the next pass.

        Args:
            epoch: of it, from 0.
            start: the state of the loader with which it begins; empty: at its beginning.
        """
        self.epoch = epoch
        self.skip = start.get("taken", 0)
        self.seen = start.get("samples", 0)
        self.expected = start.get("hash")

    def __iter__(self) -> Iterator[BatchRequest]:
        """The requests of one epoch.

        Raises:
            DataError: the first ``skip`` are others than those that were taken before.
        """
        epoch, skip, number, position, hashed = self.epoch, self.skip, 0, 0, ""
        self.last.clear()
        self._hashes.clear()
        for number, indices in enumerate(self._drawn(epoch), 1):
            if self._hashes.maxlen:
                # A long tensor shows only some of its numbers.
                shown = indices.tolist() if hasattr(indices, "tolist") else indices
                hashed = blake2b(f"{hashed}{shown}".encode(), digest_size=16).hexdigest()
                self._hashes.append((number, hashed))
                if number == skip:
                    self._check(hashed)
            if number > skip:
                whole = self.size == 1 and not self.seen
                request = BatchRequest(epoch, position, indices) if whole else self._slice(epoch, position, indices)
                if self.last.maxlen:
                    self.last.append(request)
                yield request
            position += length_hint(indices, 1)
        if number < skip:
            self._check(hashed)

    def _slice(self, epoch: int, position: int, indices: Any) -> BatchRequest:
        """The request for this rank's slice of a batch, of which some samples may have been taken before."""
        indices = indices if hasattr(indices, "__getitem__") else list(indices)
        seen = max(0, self.seen - position)
        own = slice_of(len(indices) - seen, self.rank, self.size)
        first = seen + own.start if own else seen
        asked = indices[first] if self.single else indices[first : first + (len(own) or 1)]
        return BatchRequest(epoch, position + first, asked, not own)

    def _drawn(self, epoch: int) -> Any:
        if self.seed is None:
            return self.indices
        with seeding(self.seed, epoch, "order"):
            items = iter(self.indices)
            return chain(list(islice(items, length_hint(self.indices))), items)

    def _check(self, hashed: str) -> None:
        if self.expected and (changes := changed_order(self.expected, hashed, f"{self.where}: hash of the indices")):
            raise DataError(f"{changes}; what a sampler draws has to come from a seed and the number in its set_epoch")

    def hash_after(self, count: int) -> str | None:
        """The hash after so many were taken: all that were given, or all but the last."""
        return dict(self._hashes).get(count, self.expected)


def changed_order(before: Any, now: Any, where: str) -> str:
    """Why a pass cannot go on where what decides its order has changed; ``""`` where nothing has."""
    lines = "; ".join(differences(before, now, where))
    why = "has changed in the middle of an epoch, and samples would come twice, and others not at all"
    remedy = "set it back until the epoch is over, or resume from a checkpoint between two epochs"
    return f"{lines}: {why}; {remedy}" if lines else ""


@dataclass(eq=False)
class FetchedDataset:
    """A dataset whose items are collated batches, each a function of its ``BatchRequest`` and the seed.

    An error names the dataset and the samples: in a note of the exception that the dataset or ``collate`` raised, or in
    a DataError where torch cannot collate these samples.

    Attributes:
        dataset: gives the samples.
        collate: makes a batch of them.
        seed: with epoch and position it seeds the random generators, once per batch, and those that the dataset or
            ``collate`` holds. Nothing is seeded for slices of tensors that torch collates, and for a dataset and a
            ``collate`` that declare that they use no random numbers.
        batched: whether a request has a list of indices.
        where: what messages begin with.
        progress: of the workers; None: the process that trains fetches.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    seed: int | None
    batched: bool
    where: str
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._at_once = self.batched and can_slice(self.dataset, self.collate)
        # Whether the first batch of each epoch has to show that no random numbers are used.
        self._is_declared = False
        self._checked_epoch: int | None = None
        if self.seed is not None and not uses_random_numbers(self.dataset, self.collate, self.where):
            self.seed = None
            self._is_declared = not (self.collate in TORCH_COLLATES and _slices(self.dataset))
        # The generators of dataset and collate, once this process has fetched a batch.
        self._own: dict[str, Any] | None = None

    def __getitem__(self, request: BatchRequest) -> Any:
        """The batch, or a WorkerFailure; in the process that trains, the generators are afterwards as they were."""
        if request.empty:
            batch = self[request._replace(empty=False)]
            return batch if type(batch) is WorkerFailure else EmptySlice(batch)
        if self.progress:
            self.progress.begin(request.position)
        try:
            if self._at_once and (batch := slice_batch(self.dataset, request.indices)) is not None:
                return batch
            if self.seed is None:
                if self._is_declared and self._checked_epoch != request.epoch:
                    return self._checked(request)
                return collate_samples(self.collate, self._samples(request), self.where, request)
            if self._own is None:
                self._own = self._generators()
                batch = self._seeded(request)
                made = self._generators()
                if made.keys() == self._own.keys():
                    return batch
                # The first sample has made a generator, which was not seeded for it.
                self._own = made
            with seeding(self.seed, request.epoch, "batch", request.position, own=self._own):
                return collate_samples(self.collate, self._samples(request), self.where, request)
        except Exception as error:
            return WorkerFailure.or_raise(error)

    # What torch calls where there is a batch sampler.
    __getitems__ = __getitem__

    def _checked(self, request: BatchRequest) -> Any:
        """The first batch of an epoch in this process.

        Raises:
            DataError: it used random numbers, which are not seeded.
        """
        which = f"{request}{in_worker()}"
        with refuse_draws(self._generators(), self.where, which):
            batch = collate_samples(self.collate, self._samples(request), self.where, request)
        self._checked_epoch = request.epoch
        return batch

    def _seeded(self, request: BatchRequest) -> Any:
        with seeding(self.seed, request.epoch, "batch", request.position, own=self._own):
            return collate_samples(self.collate, self._samples(request), self.where, request)

    def _generators(self) -> dict[str, Any]:
        """The random generators of the dataset and of ``collate``, by name."""
        return generators_of_parts(self.dataset, self.collate)

    def _samples(self, request: BatchRequest) -> Any:
        indices = failing = request.indices
        try:
            if not self.batched:
                return self.dataset[indices]
            if not (getitems := getattr(self.dataset, "__getitems__", None)):
                tracked = self.progress.track(indices, request.position) if self.progress else indices
                return [self.dataset[failing := index] for index in tracked]
            samples = getitems(indices)
        except StopIteration as error:
            what = f"{type(self.dataset).__name__} raised StopIteration for {format_indices(failing)}{in_worker()}"
            raise DataError(f"{self.where}: {what}, which ends the epoch; raise IndexError, or fix __len__") from error
        except Exception as error:
            error.add_note(f"{self.where}: raised for {format_indices(failing)}, fetching {request}{in_worker()}")
            raise
        count = len(indices)
        found = set(lengths(samples)) if self.collate is uncollated else {length_hint(samples, count)}
        # What a function of somebody's own takes is its own affair; bad lines of slots may be left out.
        if (
            type(samples) is not SlotBatch
            and found
            and count not in found
            and self.collate in (*TORCH_COLLATES, uncollated)
        ):
            what = f"{type(self.dataset).__name__}.__getitems__ returned {shape_of(samples, 1)}"
            remedy = "return a sample for each index or, with whole_batches: true, a batch with a row for each"
            raise DataError(f"{self.where}: {what} for {count} of them, {request}{in_worker()}; {remedy}")
        return samples


def generators_of_parts(dataset: Any, collate: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the random generators that a dataset and a collate function hold, by name."""
    of_collate = generators_in(collate)
    return generators_in(dataset) | {f"collate_fn.{name}": generator for name, generator in of_collate.items()}


def uses_random_numbers(dataset: Any, collate: Callable[[Any], Any], where: str) -> bool:
    """Return whether a batch may depend on random numbers, so that the generators are seeded for it.

    It does not if the dataset declares ``uses_random_numbers = False``, and the collate function is one of torch or of
    this package, or declares the same. A ``Subset`` or ``ConcatDataset`` without a declaration uses what its datasets
    use. Slices of tensors need no declaration.

    Raises:
        DataError: a declaration is not a bool.
    """
    of_dataset = _dataset_uses_random_numbers(dataset, where)
    of_collate = _collate_uses_random_numbers(collate, where)
    return of_dataset or of_collate


def _dataset_uses_random_numbers(dataset: Any, where: str) -> bool:
    declared = declared_use(dataset, where)
    if declared is not None:
        return declared
    if type(dataset) is Subset:
        return _dataset_uses_random_numbers(dataset.dataset, where)
    if type(dataset) is ConcatDataset:
        # Of every part, so that each declaration is checked.
        uses = [_dataset_uses_random_numbers(part, where) for part in dataset.datasets]
        return any(uses)
    return not _slices(dataset)


def _collate_uses_random_numbers(collate: Any, where: str) -> bool:
    while isinstance(collate, partial | MethodType):
        collate = collate.func if isinstance(collate, partial) else collate.__func__
    declared = declared_use(collate, where)
    return collate not in (*TORCH_COLLATES, uncollated, pad) if declared is None else declared


def can_slice(dataset: Any, collate: Callable[[Any], Any]) -> bool:
    """Whether ``slice_batch`` makes the batches that a collate function makes: torch's, of a TensorDataset or a Subset of one."""
    if type(dataset) is Subset:
        return can_slice(dataset.dataset, collate)
    if type(dataset) is not TensorDataset or collate is not default_collate:
        return False
    # torch's documentation has users replace what it does with a tensor, or add what it does with a tuple.
    as_torch = default_collate_fn_map.get(Tensor) is collate_tensor_fn and tuple not in default_collate_fn_map
    return as_torch and all(
        type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
        for tensor in dataset.tensors
    )


def slice_batch(dataset: Any, indices: Any) -> list[Tensor] | None:
    """The batch of some samples, one slice of each tensor; None where this fails: one by one, an error names the sample."""
    try:
        while type(dataset) is Subset:
            dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
        places = torch.frombuffer(array("q", indices), dtype=torch.int64)
        return [tensor.index_select(0, places) for tensor in dataset.tensors]
    except Exception:  # it comes again
        return None


def _slices(dataset: Any) -> bool:
    """Whether samples are slices of tensors. A class of somebody's own may draw, in whatever it overrides."""
    kind = type(dataset)
    if kind is Subset:
        return type(dataset.indices) in {list, tuple, range, Tensor} and _slices(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(_slices, dataset.datasets))
    tensors = dataset.tensors if kind is TensorDataset else dataset
    return kind in {TensorDataset, list, tuple} and all(type(tensor) is Tensor for tensor in tensors)
