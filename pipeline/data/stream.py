"""IterableDatasets: shared out over workers, with a state to go on from."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count as numbers
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import pin_memory as torch_pin_memory
from torch.utils.data._utils import worker as torch_worker

from pipeline.data.fetch import Progress, WorkerFailure, add_note, collate_error
from pipeline.data.rng import RngStream, plain_states, seeded, states_of
from pipeline.errors import DataError

_pin_memory: Callable[[Any], Any] = torch_pin_memory.pin_memory

_SCALARS = (type(None), bool, int, float, str, bytes, Tensor, nn.Parameter)

_MAPPINGS = (dict, OrderedDict, Counter)


class BatchWithState(NamedTuple):
    """A batch of a stream, and where its worker is after it.

    Attributes:
        batch: the batch.
        share: which of the shares of the stream it is from.
        state: of that share; None where the dataset cannot tell.
    """

    batch: Any
    share: int
    state: dict[str, Any] | None

    def pin_memory(self) -> BatchWithState:
        """The same with the batch in pinned memory; the state stays where it is."""
        return self._replace(batch=_pin_memory(self.batch))


class StreamPosition:
    """The place of one pass over a stream.

    Args:
        shares: into how many parts the stream is shared out: one for each worker.
        batch_size: of the loader.

    Attributes:
        states: share -> its state after the last batch of it; None where there was none yet.
        last: which share the last batch was from; the next one is from the one after it.
        taken: how many batches of the pass were given so far.
        certain: whether each of them came with a state.
    """

    def __init__(self, shares: int, batch_size: int | None) -> None:
        self.shares, self.batch_size = shares, batch_size
        self.states: list[dict[str, Any] | None] = [None] * shares
        self.last = shares - 1
        self.taken = 0
        self.certain = True
        self._before: tuple[int, int, dict[str, Any] | None] = (self.last, 0, None)

    def over(self, marked: Iterable[BatchWithState]) -> Iterator[Any]:
        """The batches, the place moving with them."""
        for batch, share, state in marked:
            self._before = (self.last, share, self.states[share])
            self.last, self.states[share] = share, state
            self.taken += 1
            self.certain = self.certain and state is not None
            yield batch

    def after(self, taken: int) -> dict[str, Any]:
        """The place after so many batches of the pass, as plain data: all that were given, or all but the last."""
        ahead = self.taken - taken
        place = unknown_place(self.shares, self.batch_size, taken)
        if not self.certain or ahead not in {0, 1}:
            return place
        last, states = self.last, list(self.states)
        if ahead:
            last, share, before = self._before
            states[share] = before
        return {**place, "last": last, "states": states}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Be where another was: its ``after``, with states."""
        self.taken, self.last, self.states = saved["taken"], saved["last"], list(saved["states"])

    @property
    def first(self) -> int:
        """The share that the next batch is from."""
        return (self.last + 1) % self.shares


def unknown_place(shares: int, batch_size: int | None, taken: int) -> dict[str, Any]:
    """What is known of a place where the dataset has no state: enough to see whether counting batches leads there."""
    return {"shares": shares, "batch_size": batch_size, "taken": taken, "last": None, "states": None}


class Beginning:
    """How a dataset begins each epoch that it goes through in the process that trains, where it keeps its place itself.

    A worker has a copy of its own in each epoch. Here it is the same object, and where it ended, or was led to by
    ``load_state_dict``, is no place to begin.

    Args:
        dataset: has a state.
        where: what messages begin with.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        self.dataset = dataset
        self.state = state_of(dataset, where)

    def restore(self, epoch: int) -> None:
        """Be there again."""
        self.dataset.load_state_dict(copy.deepcopy(self.state))
        tell = getattr(self.dataset, "set_epoch", None)
        if tell:
            tell(epoch)


def has_state(dataset: Any) -> bool:
    """Whether a dataset can tell where it is, and go on from there."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(dataset: Any, where: str) -> Any:
    """The state of a dataset as it is now; what it does later changes nothing in it.

    Raises:
        DataError: it holds something that no checkpoint can.
    """
    state = dataset.state_dict()
    _refuse_unplain(state, f"{where}: {type(dataset).__name__}.state_dict()", "")
    return copy.deepcopy(state)


def _refuse_unplain(value: Any, what: str, key: str) -> None:
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind in _MAPPINGS:
        for name, each in value.items():
            if type(name) not in {str, int}:
                raise DataError(f"{what}{key} has the key {name!r}, which cannot be saved; use strings and integers")
            _refuse_unplain(each, what, f"{key}[{name!r}]")
    elif kind in {list, tuple}:
        for index, each in enumerate(value):
            _refuse_unplain(each, what, f"{key}[{index}]")
    else:
        plain = "numbers, strings, lists, tuples, dicts and tensors"
        raise DataError(f"{what}{key} is a {kind.__qualname__}, which cannot be saved; keep the state in {plain}")


class Shard:
    """The part of a stream that one process reads.

    Args:
        stream: the whole.
        number: which share.
        count: of how many.
        seed: of the random generators; None leaves them to chance.
    """

    def __init__(self, stream: Stream, number: int, count: int, seed: int | None) -> None:
        begun = [each for each in stream.states if each]
        self.stream, self.number, self.count = stream, number, count
        # Those that were not begun are shuffled as the others were.
        self.seed = begun[0]["seed"] if begun else seed
        self.begun = stream.states[number] if stream.states else None
        self.dataset: Any = stream.dataset

    def batches(self) -> Iterator[Any]:
        """Its batches, or the rest of them."""
        if self.begun and self.begun["ended"]:
            # A dataset that has come to its end may begin again.
            return
        stream, size = self.stream, self.stream.batch_size or 1
        draws = RngStream(self.seed, stream.epoch, "stream", self.number if has_shard(stream.dataset) else 0)
        if self.begun and self.begun["draws"]:
            draws.reached = states_of(self.begun["draws"])
        samples = self._samples()
        for number in numbers(self.begun["batches"] if self.begun else 0):
            try:
                taken, state = self._taken(samples, draws, number)
                if len(taken) < (size if stream.drop_last else 1):
                    return
                batch = self._collated(taken, number)
            except Exception as error:
                yield WorkerFailure.instead(error)
                return
            if stream.marks:
                batch = BatchWithState(batch, self.number, self._mark(state, draws, number, ended=len(taken) < size))
            yield batch

    def _taken(self, samples: Iterator[Any], draws: RngStream, number: int) -> tuple[list[Any], Any]:
        """The samples of a batch, and the state of the dataset after them."""
        stream, info = self.stream, get_worker_info()
        if stream.progress and info:
            samples = stream.progress.over(samples, number, info.id, there=True)
        try:
            with draws.going_on(), alone():
                taken = list(islice(samples, stream.batch_size or 1))
                return taken, state_of(self.dataset, stream.where) if stream.marks and has_state(self.dataset) else None
        except Exception as error:
            add_note(error, stream.where, f"raised for {self._told(number)}")
            raise

    def _samples(self) -> Iterator[Any]:
        """Its samples. A generator: the dataset draws nothing before the first sample is asked for."""
        stream, number, count = self.stream, self.number, self.count
        shards = count > 1 and has_shard(self.dataset)
        if shards:
            self.dataset = self._shard()
        if self.begun:
            self.dataset.load_state_dict(self.begun["dataset"])
        elif stream.beginning:
            stream.beginning.restore(stream.epoch)
        if count == 1 or shards:
            yield from self._iterated()
        else:
            # Of a dataset that goes on, the samples that were up to the other workers come first.
            yield from islice(self._iterated(), count - 1 if self.begun else number, None, count)

    def _iterated(self) -> Iterator[Any]:
        try:
            return iter(self.dataset)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:
                # __iter__ itself has raised it.
                raise
            what = f"{type(self.dataset).__name__}.__iter__ gives no iterator ({error})"
            raise DataError(f"{self.stream.where}: {what}; yield the samples in it, or return iter(…)") from error

    def _shard(self) -> Any:
        stream, number, count = self.stream, self.number, self.count
        with seeded(self.seed, stream.epoch, "shard"):
            shard = self.dataset.shard(rank=number, count=count)
        if shard is None:
            raise DataError(
                f"{stream.where}: {type(self.dataset).__name__}.shard(rank={number}, count={count}) returned None; "
                "return the dataset to iterate, self if it has changed itself"
            )
        return shard

    def _collated(self, samples: list[Any], number: int) -> Any:
        stream = self.stream
        given = samples if stream.batch_size else samples[0]
        try:
            with seeded(self.seed, stream.epoch, "collate", self.number, number):
                return stream.collate(given)
        except Exception as error:
            if told := collate_error(error, stream.where, self._told(number), given, stream.collate):
                raise told from error
            raise

    def _mark(self, state: Any, draws: RngStream, number: int, *, ended: bool) -> dict[str, Any] | None:
        """What it needs to go on after a batch; None where the dataset does not know."""
        if not has_state(self.dataset):
            return None
        reached = plain_states(draws.reached) if draws.reached else None
        return {"batches": number + 1, "ended": ended, "seed": self.seed, "draws": reached, "dataset": state}

    def _told(self, number: int) -> str:
        of_share = f" of the worker that reads share {self.number}" if self.count > 1 else ""
        return f"batch {number}{of_share} in epoch {self.stream.epoch}"


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
        place: StreamPosition | None = None,
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

    def _share(self) -> Shard:
        """What of the stream falls to this process: in a pass that goes on, the first worker has the share that is up."""
        info = get_worker_info()
        number, count = ((info.id + self.first) % info.num_workers, info.num_workers) if info else (0, 1)
        # By chance, but by the same in all workers: torch gives each the sum of one number and its own.
        seed = info.seed - info.id if info and self.seed is None else self.seed
        return Shard(self, number, count, seed)
