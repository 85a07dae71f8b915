"""IterableDatasets: split over workers, with a state to resume from."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count as numbers
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import pin_memory as torch_pin_memory
from torch.utils.data._utils import worker as torch_worker

from pipeline.checkpoint import pytree
from pipeline.checkpoint.random_state import (
    cpu_random_state,
    generators_in,
    restore_cpu_random_state,
    restore_states,
    states_of,
)
from pipeline.data.fetch import (
    Progress,
    WorkerFailure,
    collate_samples,
    generators_of_parts,
    in_worker,
    uses_random_numbers,
)
from pipeline.data.random_numbers import refuse_draws
from pipeline.data.rng import RngStream, mix, seeding
from pipeline.errors import CheckpointError, DataError

_pin_memory: Callable[[Any], Any] = torch_pin_memory.pin_memory


class BatchWithState(NamedTuple):
    """A batch of a stream, and the state of its worker after it.

    Attributes:
        batch: the batch.
        shard: which part of the stream it is from.
        state: of that shard; None where the dataset has none.
    """

    batch: Any
    shard: int
    state: dict[str, Any] | None

    def pin_memory(self) -> BatchWithState:
        """The same with the batch in pinned memory; the state stays where it is."""
        return self._replace(batch=_pin_memory(self.batch))


class StreamPosition:
    """The position of one pass over a stream.

    Args:
        state: with ``taken``, ``last`` and ``states``, where to go on; None: the beginning of the epoch.
        shards: into how many parts the stream is divided: one for each worker.

    Attributes:
        current: ``taken``: how many batches of the pass were given so far; ``last``: which shard the last one was from, the
            next is from the one after it; ``states``: of each shard after its last batch, None where it had none yet; or
            None in place of the list, where the dataset has no state.
        previous: the same before the last batch.
    """

    def __init__(self, state: Mapping[str, Any] | None = None, shards: int = 1) -> None:
        state = state or {"taken": 0, "last": shards - 1, "states": [None] * shards}
        self.current = self.previous = {name: state[name] for name in ("taken", "last", "states")}

    def track(self, batches: Iterable[BatchWithState]) -> Iterator[Any]:
        """The batches, while the position moves with them."""
        for batch, shard, state in batches:
            before = self.previous = self.current
            states = before["states"]
            if states is not None:
                states = None if state is None else [*states[:shard], state, *states[shard + 1 :]]
            self.current = {"taken": before["taken"] + 1, "last": shard, "states": states}
            yield batch

    def after(self, done: int) -> dict[str, Any]:
        """The position after so many batches of the pass: all that were given, or all but the last.

        Where the dataset has no state, that number is all that is known.
        """
        for position in (self.current, self.previous):
            if position["taken"] == done and position["states"]:
                return position
        return {"taken": done, "last": None, "states": None}


def has_state(dataset: Any) -> bool:
    """Whether a dataset can be saved in the middle of an epoch, and go on from there."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(dataset: Any, where: str) -> Any:
    """A copy of the state of a dataset.

    Raises:
        DataError: it holds something that no checkpoint can.
    """
    state = dataset.state_dict()
    try:
        pytree.check(state, f"{where}: {type(dataset).__name__}.state_dict()")
    except CheckpointError as error:
        raise DataError(str(error)) from error
    return copy.deepcopy(state)


def has_shard(dataset: Any) -> bool:
    """Whether a dataset has a method ``shard(rank, count)``; a shard with other parameters means something else."""
    with suppress(AttributeError, TypeError):
        inspect.signature(dataset.shard).bind(rank=0, count=1)
        return True
    return False


def _shuffled(samples: Iterator[Any], size: int, chance: Random) -> Iterator[Any]:
    """Each next one is drawn from ``size`` of them, of which it makes room for another."""
    held = list(islice(samples, size))
    for sample in samples:
        place = chance.randrange(len(held))
        yield held[place]
        held[place] = sample
    chance.shuffle(held)
    yield from held


@contextmanager
def only_worker() -> Iterator[None]:
    """In the block, ``get_worker_info()`` says that there is no other worker."""
    info = get_worker_info()
    if info:
        torch_worker._worker_info = type(info)(id=0, num_workers=1, seed=info.seed, dataset=info.dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = info


@dataclass(eq=False)
class Stream(IterableDataset[Any]):
    """The batches that this process makes of an IterableDataset.

    A dataset with a method ``shard(rank, count)`` (the parameters have these names) divides itself: it is called once
    in each worker and epoch with the number of this worker and of all, those of other ranks included, and returns the
    dataset to iterate, itself if it has changed itself. A rank without workers is one, and calls it on a copy. Of any
    other dataset, each of ``count`` workers takes every count-th sample, beginning with its own; so
    the dataset has to give the same order in all of them, and its random draws are the same there: the generators are
    seeded from (seed, epoch), with ``shard`` from (seed, epoch, worker), and go on from batch to batch. Generators that
    the dataset itself holds are seeded in the same way. ``collate``
    draws apart from them, and disturbs no order. While the dataset runs, ``get_worker_info()`` says that it is the only
    worker: a dataset that divides itself by it would be divided twice, and samples lost.

    A dataset with ``state_dict`` and ``load_state_dict`` (what ``shard`` returns, where there is that) goes on in the
    middle of an epoch: its state is loaded, and then it is iterated, with the generators where they were after the last
    batch. So its state has to hold whatever it drew before its first sample, such as an order that it has shuffled.

    Attributes:
        dataset: gives the samples; in a worker, what ``shard`` has returned.
        collate: makes a batch of them.
        batch_size: None for samples as they are.
        drop_last: whether each worker leaves out its last batch if it is short.
        seed: of the random generators; None leaves them to chance. They are not seeded for a dataset and a ``collate``
            that declare that they use no random numbers.
        epoch: from 0.
        where: what messages begin with.
        start: the position where the pass begins; then it gives each batch as a ``BatchWithState``. None: it has no state.
        initial_state: with which the dataset begins each epoch in the process that trains, where it keeps its place itself.
        progress: of the workers.
        rank, size: which of the processes this one trains with or loads for, and how many there are.
        shuffle_buffer: how many samples of the shard are held at a time, of which each next one is drawn; 0: none.
        worker, number, count, state: of the shard of this process, once it is iterated: which one of its rank, which one of
            how many in all, and its state after its last batch.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    batch_size: int | None
    drop_last: bool
    seed: int | None
    epoch: int
    where: str
    start: Mapping[str, Any] | None = None
    initial_state: Any = None
    progress: Progress | None = None
    rank: int = 0
    size: int = 1
    shuffle_buffer: int = 0

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch, or the rest of them, of the shard of this process."""
        worker, workers = 0, 1
        if info := get_worker_info():
            # In a pass that goes on, the first worker has the shard whose turn it is.
            first, workers = self.start["last"] + 1 if self.start else 0, info.num_workers
            worker = (info.id + first) % workers
            # By chance, but by the same in all workers: torch gives each the sum of one number and its own.
            self.seed = info.seed - info.id if self.seed is None else self.seed
        self.worker, self.number, self.count = worker, self.rank * workers + worker, self.size * workers
        states = self.start["states"] if self.start else [None] * workers
        # A shard without a state yet is shuffled as the others were.
        self.seed = next((state["seed"] for state in states if state), self.seed)
        self.state = states[worker]
        # A dataset that has come to its end may begin again.
        return iter(()) if self.state and self.state["ended"] else self._batches()

    def _batches(self) -> Iterator[Any]:
        size, divides = self.batch_size or 1, self.count > 1 and has_shard(self.dataset)
        is_seeded = self.seed is not None and uses_random_numbers(self.dataset, self.collate, self.where)
        seed = self.seed if is_seeded else None
        own = generators_in(self.dataset)
        rng = RngStream(seed, self.epoch, "stream", self.number if divides else 0, own=own)
        if self.state and self.state["draws"]:
            with rng.drawing():
                restore_cpu_random_state(self.state["draws"])
                restore_states(rng.own, self.state["own"])
        samples = self._samples(divides, rng)
        if self.shuffle_buffer:
            # Drawn apart from the dataset, whose draws have to be the same in all workers.
            chance = Random(None if self.seed is None else mix(self.seed, self.epoch, "buffer", self.number))
            samples = _shuffled(samples, self.shuffle_buffer, chance)
        is_declared = self.seed is not None and seed is None
        first = self.state["batches"] if self.state else 0
        for number in numbers(first):
            try:
                with self._refuse_draws(number) if is_declared and number == first else nullcontext():
                    fetched, state = self._fetch(samples, rng, number)
                    if len(fetched) < (size if self.drop_last else 1):
                        return
                    items = fetched if self.batch_size else fetched[0]
                    with seeding(seed, self.epoch, "collate", self.number, number):
                        batch = collate_samples(self.collate, items, self.where, self._describe(number))
            except Exception as error:
                yield WorkerFailure.or_raise(error)
                return
            if self.start:
                counts = {"batches": number + 1, "ended": len(fetched) < size, "seed": self.seed}
                batch = BatchWithState(batch, self.worker, {**counts, **state} if state else None)
            yield batch

    def _refuse_draws(self, number: int) -> AbstractContextManager[None]:
        """Raise if a batch uses random numbers, which are not seeded for it."""
        generators = generators_of_parts(self.dataset, self.collate)
        return refuse_draws(generators, self.where, f"{self._describe(number)}{in_worker()}")

    def _fetch(self, samples: Iterator[Any], rng: RngStream, number: int) -> tuple[list[Any], dict[str, Any] | None]:
        """The samples of a batch, and the states of dataset and generators after them; None: the dataset has none."""
        if self.progress:
            samples = self.progress.track(samples, number, fetched=True)
        try:
            with rng.drawing(), only_worker():
                batch = list(islice(samples, self.batch_size or 1))
                if not (self.start and has_state(self.dataset)):
                    return batch, None
                state = state_of(self.dataset, self.where)
                if rng.seed is None:
                    return batch, {"dataset": state, "draws": None, "own": {}}
                return batch, {"dataset": state, "draws": cpu_random_state(), "own": states_of(rng.own)}
        except Exception as error:
            error.add_note(f"{self.where}: raised for {self._describe(number)}{in_worker()}")
            raise

    def _samples(self, divides: bool, rng: RngStream) -> Iterator[Any]:
        """The samples of the shard; a generator, so that the dataset draws nothing before the first sample."""
        if divides:
            kind, number, count = type(self.dataset).__name__, self.number, self.count
            # A worker has a copy of its own in each epoch.
            dataset = self.dataset if get_worker_info() else copy.deepcopy(self.dataset)
            with seeding(rng.seed, self.epoch, "shard"):
                self.dataset = dataset.shard(rank=number, count=count)
            if self.dataset is None:
                what = f"{kind}.shard(rank={number}, count={count}) returned None"
                raise DataError(f"{self.where}: {what}; return the dataset to iterate, self if it has changed itself")
            rng.adopt(generators_in(self.dataset), self.state["own"] if self.state else {})
        if self.state:
            self.dataset.load_state_dict(self.state["dataset"])
        elif self.initial_state is not None and not divides:
            # Here it is the same object in all epochs, and each would begin where the one before has ended.
            self.dataset.load_state_dict(copy.deepcopy(self.initial_state))
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
        step = 1 if divides else self.count
        # Of a dataset that goes on, the samples of the other workers come first.
        first = step - 1 if self.state or divides else self.number
        try:
            samples = iter(self.dataset)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:
                # __iter__ itself has raised it.
                raise
            what = f"{type(self.dataset).__name__}.__iter__ gives no iterator ({error})"
            raise DataError(f"{self.where}: {what}; yield the samples in it, or return iter(…)") from error
        yield from islice(samples, first, None, step)

    def _describe(self, number: int) -> str:
        worker = f" of the worker that reads share {self.number}" if self.count > 1 else ""
        return f"batch {number}{worker} in epoch {self.epoch}"
