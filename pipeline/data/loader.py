"""The loader: batches as a function of (seed, epoch), with a position to resume from."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from hashlib import blake2b
from itertools import chain, compress, islice, repeat
from operator import length_hint
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from loguru import logger
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe
from torch.utils.data.distributed import DistributedSampler

from pipeline.checkpoint.pytree import flatten
from pipeline.checkpoint.random_state import generators_in, restore_states, states_of
from pipeline.checkpoint.safetensors_io import pack
from pipeline.data.evaluation_order import (
    FixedBatches,
    is_in_order,
    is_plain_batch_sampler,
    ordered_batches,
    selected_indices,
)
from pipeline.data.fetch import (
    BatchRequests,
    FetchedDataset,
    Progress,
    changed_order,
    slice_of,
    uncollated,
    uses_random_numbers,
)
from pipeline.data.rng import get_states, mix, permutation, seeding, set_states
from pipeline.data.stream import Stream, StreamPosition, has_shard, has_state, state_of
from pipeline.data.worker_copies import WorkerCopies
from pipeline.data.workers import IgnoreSignals, Workers, signals_blocked, without_death_reports
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError, DataError, one_of
from pipeline.signals import SHUTDOWN

KEYWORDS = frozenset(inspect.signature(DataLoader).parameters) - {"dataset"} | {"rank", "size"}

# Samples that processes compare; and indices that are numbers of Python's at once.
FEW, _CHUNK = 5, 4096


def make_loader(
    dataset: Any,
    *,
    seed: int | None,
    shuffle: bool = False,
    batch_size: int | None = 1,
    global_batch_size: int | None = None,
    whole_batches: bool = False,
    resume: str | None = None,
    shuffle_buffer: int = 0,
    where: str = "make_loader",
    **keywords: Any,
) -> SeededLoader:
    """A loader of any dataset.

    Args:
        dataset: map-style (a list will do) or iterable.
        seed: of the order and of the random generators; None leaves both to chance.
        shuffle: whether each epoch has an order of its own.
        batch_size: samples per batch and process; None for samples as they are.
        global_batch_size: samples per batch of all processes, in its place.
        whole_batches: whether ``dataset.__getitems__(indices)`` returns a batch as it is trained on; nothing collates it.
        resume: ``"reread"``: a stream that was left in an epoch is read again up to the place, whether it has a state or
            not. This is exact where it gives the same samples in the same order, shuffled by a seed for instance.
        shuffle_buffer: of a stream, how many samples are held at a time, of which each next one is drawn: nearly a shuffle
            where it has no indices. Such a stream is read again up to the place, as with ``resume="reread"``.
        where: what messages begin with.
        keywords: any other of torch's DataLoader, or of ``SeededLoader``. A ``sampler`` or ``batch_sampler`` decides the
            order; so does a ``generator``, as torch has it; see ``SeededLoader``.

    Raises:
        ConfigError: the DataLoader has no such keyword, or one would be ignored, or cannot be.
        DataError: the dataset is empty, has no length, or cannot be shuffled.
    """
    for name in keywords.keys() - KEYWORDS:
        raise ConfigError(f"{where}: a DataLoader has no argument '{name}'{one_of(name, KEYWORDS)}")
    if whole_batches:
        asks = batch_size is not None or keywords.get("batch_sampler") is not None
        if not asks or keywords.get("collate_fn") is not None or not callable(getattr(dataset, "__getitems__", None)):
            needs = "needs a dataset with __getitems__(indices), which returns a batch, a batch_size, and no collate_fn"
            raise ConfigError(f"{where}: whole_batches: true {needs}; change what differs, or remove it")
        keywords["collate_fn"] = uncollated
    if isinstance(dataset, IterableDataset):
        if shuffle:
            kind = f"{type(dataset).__name__} is an IterableDataset"
            remedy = "shuffle in the dataset itself, or within a shuffle_buffer"
            raise DataError(f"{where}: shuffle: true needs indices, and {kind}; {remedy}")
    elif shuffle_buffer:
        what = f"shuffle_buffer: {shuffle_buffer} is of streams, and {type(dataset).__name__} has indices"
        raise ConfigError(f"{where}: {what}; write shuffle: true")
    elif all(keywords.get(name) is None for name in ("sampler", "batch_sampler", "generator")):
        refuse_without_samples(dataset, where)
        keywords["sampler"] = EpochSampler(dataset, shuffle, seed)
        shuffle = False
    if keywords.get("timeout") and not keywords.get("num_workers"):
        waits = f"timeout: {keywords['timeout']} is how long workers are waited for, and there are none"
        raise ConfigError(f"{where}: {waits}; remove it, or set num_workers")
    keywords |= {"shuffle": shuffle, "batch_size": batch_size, "global_batch_size": global_batch_size}
    keywords |= {"resume": "reread" if shuffle_buffer else resume, "shuffle_buffer": shuffle_buffer}
    return SeededLoader(dataset, seed=seed, where=where, **keywords)


def refuse_without_samples(dataset: Any, where: str) -> None:
    """Raise for a dataset that has none.

    Raises:
        DataError: it has none, or nobody knows how many.
    """
    name = type(dataset).__name__
    try:
        if not len(dataset):
            raise DataError(f"{where}: {name} has no samples; check its arguments")
    except (TypeError, ValueError, OverflowError) as error:
        if error.__traceback__ and error.__traceback__.tb_next:
            # __len__ itself has raised it.
            raise
        remedy = "give it a __len__ that returns an int of 0 or more, or make it an IterableDataset"
        raise DataError(f"{where}: {name} has no length ({error}); {remedy}") from error


class EpochSampler(Sampler[int]):
    """Indices in order, or in a new order for each epoch.

    Args:
        data_source: the samples; there may be more or fewer of them in the next epoch.
        shuffle: whether to shuffle.
        seed: with the epoch it decides the order; None draws one from torch, if it is needed, the same on all ranks.
    """

    has_exact_length = True

    def __init__(self, data_source: Sized, shuffle: bool, seed: int | None) -> None:
        self.data_source, self.shuffle, self.epoch = data_source, shuffle, 0
        drawn = seed is None and shuffle
        # All ranks share one order.
        self.seed = current_world().broadcast(int(torch.randint(2**31, ()).item())) if drawn else seed or 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        """The indices of one epoch."""
        if not self.shuffle:
            return iter(range(len(self)))
        order = permutation(len(self), torch.Generator().manual_seed(mix(self.seed, self.epoch)))
        # As a list at once, the numbers would take ten times the memory; a generator would be a call more for each.
        return chain.from_iterable(map(Tensor.tolist, torch.split(order, _CHUNK)))


class SeededLoader(DataLoader[Any]):
    """A torch DataLoader that draws nothing by chance.

    With a map-style dataset, python's, torch's and (where it is imported) numpy's random generators are seeded once
    per batch from (seed, epoch, how many samples of the epoch come before the batch), and are afterwards as they were.
    So samples and collation that draw from them make the same batches with any number of workers, however these are
    started, and others in each epoch. Generators that the dataset or the collate function holds are seeded in the same way.
    An IterableDataset is divided among the workers, see ``Stream``.

    Nothing is seeded for slices of tensors, which use no random numbers. A dataset declares the same with an attribute::

        class Images(Dataset):
            uses_random_numbers = False

    Its batches then cost what they cost without a seed. A ``Subset`` or ``ConcatDataset`` needs no declaration if its
    datasets have one. A collate function that is not one of torch or of this package needs the attribute too; otherwise
    the generators are seeded. The first batch of each epoch, in each worker, is checked.

    A sampler or batch sampler with ``set_epoch`` says the order itself. Of any other that has a length and no generator of
    its own, an epoch is asked for at once, and what it draws is seeded from (seed, epoch). The state has a hash of the
    indices that were taken: a pass that would go on after others is refused with a DataError.

    Several processes share the samples: each batch is that of all ranks together, cut into contiguous slices, the first
    ones longer by one where it does not come out even. A rank whose slice is empty gets an ``EmptySlice``. So samplers
    give the order of all. Of items that no batch is made of, each rank takes one in turn.

    Call ``loader.set_epoch(epoch)`` before each pass. In all else it is what torch makes of the arguments.

    It has a state, as torchdata's StatefulDataLoader has: ``state_dict()`` is the place in the pass that began last, after
    the batches that it has given so far, and the beginning of a pass where that one is over. After ``load_state_dict`` the
    next pass has the batches behind that place, and the one after it is a whole one. What was done of a map-style dataset
    is not fetched again, and a stream that has a state goes on from it; of any other stream it is read again, and dropped.

    Args:
        dataset: gives the samples.
        seed: None leaves the generators to chance, as torch does.
        where: what messages begin with, such as ``dataset.train``.
        resume, shuffle_buffer: as of ``make_loader``.
        keywords: those of the DataLoader, ``global_batch_size`` as of ``make_loader``, and ``rank`` and ``size``: which of
            the processes that share the samples this is, and how many there are; by default as in ``current_world()``.

    Attributes:
        evaluated: the loader that an evaluation uses instead; None: this one, in order.
        takes: how many samples all ranks take at once; 0 where a batch sampler says it.
        batch_size: the same for a map-style dataset; for a stream, how many this rank takes.

    Raises:
        ConfigError: ``persistent_workers`` with a dataset whose copies in the workers need the epoch; or several processes
            cannot share what the sampler or the stream gives.
        DataError: ``uses_random_numbers`` is not a bool; or, when a batch is fetched, it is False and random numbers were
            used.
    """

    def __init__(self, dataset: Any, *, seed: int | None, where: str, resume: str | None, **keywords: Any) -> None:
        world = current_world()
        self.rank: int = keywords.pop("rank", world.rank)
        self.size: int = keywords.pop("size", world.size)
        self.shuffle_buffer: int = keywords.pop("shuffle_buffer")
        self.seed, self.where, self.resume, self.streams = seed, where, resume, isinstance(dataset, IterableDataset)
        sizes = keywords.pop("global_batch_size"), keywords["batch_size"]
        self.takes = self._together(*sizes) if keywords.get("batch_sampler") is None else 0
        if keywords["batch_size"] and self.takes:
            keywords["batch_size"] = len(slice_of(self.takes, self.rank, self.size)) if self.streams else self.takes
        self.epoch = 0
        self.evaluated: SeededLoader | None = None
        # With persistent workers, the copy that evaluates keeps its own.
        self._in_order: SeededLoader | None = None
        # Set on resume if the workers of the interrupted run stayed: the seed that torch had drawn for them.
        self._worker_seed: int | None = None
        self._fetching: tuple[SeededLoader, Progress | None, BatchRequests | None] | None = None
        # Of persistent workers: what was in the dataset when they took their copies.
        self._copies: WorkerCopies | None = None
        # Of the pass that began last, until it is over: how many batches may come, where it began, the stream's place.
        self._to_come: repeat[bool] | None = None
        self._began: dict[str, Any] = {}
        self._position: StreamPosition | None = None
        # At which the next pass begins; None: at its beginning.
        self._start: dict[str, Any] | None = None
        # Whether streams are asked for their states.
        self._tracks = resume != "reread"
        if keywords.get("num_workers"):
            keywords["worker_init_fn"] = IgnoreSignals(keywords.get("worker_init_fn"))
        super().__init__(dataset, **keywords)
        # Raises if a declaration is not a bool.
        uses_random_numbers(dataset, self.collate_fn, self.where)
        if self.size > 1:
            self._refuse_own_shares()
        in_process = self.streams and not self.num_workers and has_state(dataset)
        self._initial_state = state_of(dataset, self.where) if in_process else None
        if self.persistent_workers and (self.streams or hasattr(dataset, "set_epoch")):
            what = f"persistent_workers: is True, but the workers of {type(dataset).__name__} have to be told the epoch"
            raise ConfigError(f"{self.where}.{what}; remove it, so that they are started anew in each")

    def _together(self, whole: int | None, own: int | None) -> int:
        """How many samples all ranks take at once, as one of the two batch sizes says."""
        if whole is None:
            return self.size if own is None else own * self.size
        what = f"{self.where}: global_batch_size: {whole}"
        if own != 1:
            raise ConfigError(f"{what} and batch_size: {own} contradict each other; keep one of the two")
        if whole < self.size:
            raise ConfigError(f"{what} is less than one for each of {self.size} ranks; raise it, or start fewer")
        return whole

    def _refuse_own_shares(self) -> None:
        """Raise where the ranks would not agree on the order that they share."""
        for sampler in _samplers(self):
            if {"rank", "num_replicas"} & inspect.signature(type(sampler).__init__).parameters.keys():
                what = f"{type(sampler).__name__} asks for rank or num_replicas, to share the samples out itself"
                remedy = "name one that gives the order of all: its batches are cut into a slice for each rank"
                raise ConfigError(f"{self.where}: {what}; {remedy}")
        shared = has_shard(self.dataset) and not getattr(self.dataset, "draws_order", False)
        unseeded = self.streams and self.seed is None and not shared
        if chance := type(self.dataset).__name__ if unseeded else random_sampler_of(self):
            what = f"{chance} may give another order on each of {self.size} ranks, which could not share it"
            remedy = "give the runner a seed, a sampler set_epoch(epoch), or a stream shard(rank, count)"
            raise ConfigError(f"{self.where}: {what}; {remedy}")

    def stop_sharing(self) -> None:
        """Give whole batches from now on, as if there were no other ranks."""
        self.rank = 0
        self.size = 1

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, from 0, also for the sampler and the dataset if they have ``set_epoch``.

        The place in another epoch is forgotten.
        """
        if epoch != self.epoch:
            self._to_come = self._start = None
        self.epoch = epoch
        for part in _parts(self):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is after the batches that it has given, as plain data and tensors."""
        if self._to_come is not None:
            return self.state_after(self._began.get("taken", 0) + sys.maxsize - length_hint(self._to_come))
        return self.state_after(self._start["taken"] if self._start else 0)

    def state_after(self, done: int) -> dict[str, Any]:
        """The same after so many batches of the pass: all that it has given, or all but the last."""
        start = self._began if self._to_come is not None else self._start
        if start and start["taken"] == done:
            return start
        state = {"epoch": self.epoch, "taken": done} | ({"ranks": self.size} if self.size > 1 else {})
        if self.streams:
            position = self._position or StreamPosition()
            buffer = {"shuffle_buffer": self.shuffle_buffer} if self.shuffle_buffer else {}
            shares = {"shares": self.shards, "batch_size": self.batch_size, **buffer}
            return {**state, **shares, **position.after(done)}
        requests = self._fetching[2] if self._fetching and done else None
        return {**state, "order": self.order(), "hash": requests.hash_after(done) if requests else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass where ``state_dict`` says.

        Raises:
            DataError: it is no such state, or samples would come twice and others not at all.
        """
        if "taken" not in state:
            keys = ", ".join(map(str, state)) or "no key"
            raise DataError(f"{self.where}: a state has {keys} and not 'taken'; load what state_dict() has returned")
        sampler, order = self._epoch_sampler(), state.get("order")
        if order and sampler and self.seed is None and order["seed"] is not None:
            # Drawn by chance, it stays that of the pass.
            sampler.seed = int(order["seed"])
        if state.get("epoch", self.epoch) != self.epoch:
            self.set_epoch(state["epoch"])
        self._to_come = self._start = None
        if state["taken"] or state.get("samples"):
            now, ranks = self.order(), state.get("ranks", 1)
            if self.streams:
                # In a stream without a state, the batches are counted to find the place.
                counted = self.batch_size if state["states"] else state["batch_size"]
                before = {"num_workers": state["shares"], "batch_size": counted, "ranks": ranks}
                before["shuffle_buffer"] = state.get("shuffle_buffer", 0)
                now = {"num_workers": self.shards, "batch_size": self.batch_size, "ranks": self.size}
                now["shuffle_buffer"] = self.shuffle_buffer
            else:
                state = state if ranks == self.size else self._on_these_ranks(state, ranks)
                before = state.get("order", now)
            if changes := changed_order(before, now, self.where):
                raise DataError(changes)
            self._start = {**state}

    def _on_these_ranks(self, state: Mapping[str, Any], ranks: int) -> Mapping[str, Any]:
        """The state of so many other ranks as one of these: after the same samples."""
        takes, took = self.takes, state["order"]["batch_size"] or ranks
        state = {**state, "ranks": self.size, "order": {**state["order"], "batch_size": self.batch_size}}
        if takes in (0, took):
            return state
        if not self.rank:
            what = f"{self.where}: {ranks} ranks took {took} samples at once, and {self.size} take {takes}"
            remedy = "the epoch goes on after the same samples; set global_batch_size to train on the same batches"
            logger.warning(f"{what}: {remedy}")
        samples, count = state.get("samples") or state["taken"] * took, length(self.sampler)
        # The last batch may be a short one.
        taken = len(range(0, count, takes)) if count and samples >= count else samples // takes
        return {**state, "taken": taken, "samples": samples, "hash": None}

    def order(self) -> dict[str, Any]:
        """What decides the order of a map-style dataset within an epoch."""
        ours, sampler = self._epoch_sampler(), type(order_of(self)).__name__
        shuffle, seed = (ours.shuffle, ours.seed if ours.shuffle else None) if ours else (None, None)
        sizes = {"samples": length(self.dataset), "batch_size": self.batch_size, "drop_last": self.drop_last}
        # What an id means is of the order too.
        hash_sizes = getattr(self.dataset, "hash_sizes", None)
        hashed = {"hash_size": hash_sizes} if hash_sizes else {}
        return {**sizes, "sampler": sampler, "shuffle": shuffle, "seed": seed, **hashed}

    def _epoch_sampler(self) -> EpochSampler | None:
        """That of ours which draws the order, itself or for a batch sampler."""
        return next((sampler for sampler in _samplers(self) if isinstance(sampler, EpochSampler)), None)

    def __iter__(self) -> Any:
        """The batches of the epoch, or the rest of them."""
        start, self._start = self._start or {}, None
        # Whether what ``shard`` returns has a state is known only in its worker.
        shares = self.shards * self.size
        may_have_state = self._tracks and (has_state(self.dataset) or (shares > 1 and has_shard(self.dataset)))
        if self.streams and start and not (start.get("states") and may_have_state):
            return iter(FastForward(self, start["taken"]))
        self._began = start
        self._position = StreamPosition(start, self.shards) if self.streams and may_have_state else None
        if self._fetching is None or not self.persistent_workers:
            self._fetching = self._make_fetching()
            owners = {"dataset": self.dataset, "collate_fn": self.collate_fn}
            self._copies = WorkerCopies(**owners) if self.persistent_workers else None
            if self._worker_seed is not None:
                self._fetching[0].generator = _DrawnSeed().manual_seed(self._worker_seed)
        elif self._copies is not None:
            self._warn_of_changes(self._copies)
        fetching, progress, requests = self._fetching
        if requests is not None:
            requests.prepare(self.epoch, start)
        if progress is None:
            batches = self._until_over(DataLoader.__iter__(fetching))
        else:
            # While its workers start, nobody could tell which one has died, and none ignores signals yet.
            with without_death_reports(), signals_blocked():
                iterator = DataLoader.__iter__(fetching)
            batches = Workers(iterator, self.where, progress, requests).batches(self._until_over(iterator))
        return self._position.track(batches) if self._position else batches

    def end_workers(self) -> None:
        """End the worker processes that are kept between passes. The next pass starts new ones."""
        for copied in (self._fetching and self._fetching[0], self._in_order, self.evaluated):
            if copied is not None:
                end_workers(copied)
        self._fetching = None

    def forget_worker_seed(self) -> None:
        """Have persistent workers that start later draw a seed."""
        if self._fetching is None:
            self._worker_seed = None

    def _warn_of_changes(self, copies: WorkerCopies) -> None:
        """Warn of what was changed in the dataset and does not reach the workers."""
        changes = copies.changes()
        if not changes or self.rank:
            return
        changed = ", ".join(changes)
        what = f"{self.where}: changed after its persistent workers had started: {changed}"
        effect = "the workers keep their copies, so this has no effect on them"
        remedy = "if the batches depend on it, remove persistent_workers, or keep it in shared memory"
        logger.warning(f"{what}; {effect}; {remedy} (torch.Tensor.share_memory_)")

    def _until_over(self, batches: Any) -> Iterator[Any]:
        """The batches, each of which takes one of ``_to_come``; when they are over, so is the pass."""
        # A generator around them would be a call more for each batch.
        to_come = self._to_come = repeat(True, sys.maxsize)
        return compress(chain(batches, self._end(to_come)), to_come)

    def _end(self, to_come: repeat[bool]) -> Iterator[Any]:
        if self._to_come is to_come:
            self._to_come = None
        yield from ()

    def _make_fetching(self) -> tuple[SeededLoader, Progress | None, BatchRequests | None]:
        """This loader as its workers see it: the dataset returns whole batches, and nothing is left to collate.

        Returns:
            And where its workers are, and what they are asked for.
        """
        progress = Progress(self.num_workers) if self.num_workers else None
        if isinstance(self.dataset, IterableDataset):
            settings = self.collate_fn, self.batch_size, self.drop_last, self.seed, self.epoch, self.where
            start = self._position.current if self._position else None
            shares = self.rank, self.size, self.shuffle_buffer
            stream = Stream(self.dataset, *settings, start, self._initial_state, progress, *shares)
            return with_parts(self, dataset=stream, batch_sampler=None, collate_fn=uncollated), progress, None
        batched = self.batch_sampler is not None
        history = self.num_workers * (self.prefetch_factor or 0) + 1 if progress else 0
        hashed, seed = type(order_of(self)) is not EpochSampler, self.seed if _seeds_order(self) else None
        indices: Any = self.batch_sampler if batched else self.sampler
        if not batched and self.size > 1:
            # Each rank takes one of so many.
            indices = BatchSampler(self.sampler, self.size, drop_last=False)
        share = {"rank": self.rank, "size": self.size}
        requests = BatchRequests(indices, self.where, history, hashed, seed, **share, single=not batched)
        dataset = FetchedDataset(self.dataset, self.collate_fn, self.seed, batched, self.where, progress)
        parts = {"dataset": dataset, "batch_sampler" if batched else "sampler": requests}
        return with_parts(self, **parts, collate_fn=uncollated), progress, requests

    def for_evaluation(self, *, every_sample: bool = False) -> SeededLoader:
        """Return the loader of the same samples that neither shuffles nor weights them.

        Args:
            every_sample: whether ``drop_last`` has no effect, and a stream keeps the order of its
                dataset, for which it has one worker at most.
        """
        if self.evaluated is not None:
            return self.evaluated.for_evaluation(every_sample=every_sample)
        parts = self._parts_for_evaluation(every_sample=every_sample)
        if not self.persistent_workers:
            return cast("SeededLoader", with_parts(self, **parts)) if parts else self
        # A training pass may be using the workers of this loader, so the copy has its own.
        if self._in_order is None:
            self._in_order = cast("SeededLoader", with_parts(self, **parts))
        elif isinstance(parts.get("batch_sampler"), FixedBatches):
            # The workers that stay ask this object for their batches.
            cast("FixedBatches", self._in_order.batch_sampler).use_batches_of(parts["batch_sampler"])
        self._in_order.epoch = self.epoch
        return self._in_order

    def _parts_for_evaluation(self, *, every_sample: bool) -> dict[str, Any]:
        """Return the parts that differ in an evaluation."""
        parts: dict[str, Any] = {}
        drop_last = self.drop_last and not every_sample
        if drop_last != self.drop_last:
            parts["drop_last"] = drop_last
        if self.streams:
            if self.shuffle_buffer:
                parts["shuffle_buffer"] = 0
            if every_sample and self.num_workers > 1:
                # Several workers give their batches in turn.
                parts["num_workers"] = 1
            return parts
        # An order that is drawn has the numbers that a pass over this loader would draw.
        seed = self.seed if _seeds_order(self) else None
        with seeding(seed, self.epoch, "order"):
            order = evaluation_order(self, drop_last=drop_last, where=self.where)
        return parts | order

    @property
    def shards(self) -> int:
        """Into how many parts a stream is divided."""
        return self.num_workers or 1

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: all but the pass that is open, and the workers."""
        place = ("_to_come", "_position", "_start")
        left_out = ("_fetching", "_iterator", *place, "_in_order", "_worker_seed", "_copies")
        return {**vars(self), **dict.fromkeys(left_out)}

    def __len__(self) -> int:
        """How many batches there are; exact for a stream that has a length, although each worker has a short last one.

        Of several ranks, it is the number of those that have most.

        Raises:
            TypeError: nobody knows, because the dataset has no length or a ``shard`` of its own.
        """
        if not self.streams:
            return len(range(0, super().__len__(), self.size if self.batch_sampler is None else 1))
        workers, shares = self.shards, self.shards * self.size
        if shares > 1 and has_shard(self.dataset):
            raise TypeError(f"{type(self.dataset).__name__} shares itself out, so its loader has no length")
        samples, counts = range(len(self.dataset)), []  # type: ignore[arg-type]  # a TypeError is right
        for rank in range(self.size):
            size = len(slice_of(self.takes, rank, self.size))
            up, first = 0 if self.drop_last else size - 1, rank * workers
            counts.append(sum((len(samples[first + worker :: shares]) + up) // size for worker in range(workers)))
        return max(counts)


def with_parts(loader: Any, **parts: Any) -> Any:
    """A copy of a loader with other parts, most of which a DataLoader does not allow to assign."""
    other = copy.copy(loader)
    vars(other).update(parts)
    return other


def for_evaluation(loader: Any, *, every_sample: bool = False) -> Any:
    """Return a loader of the same samples that neither shuffles nor weights them.

    A loader of the user's own that is no DataLoader, and a DataLoader whose sampler is not one of
    torch's random samplers, keep their order. The DataLoader does not if one process evaluates every
    sample: then the indices of the samples have to be known.

    Args:
        loader: any iterable of batches.
        every_sample: whether ``drop_last`` has no effect; see ``SeededLoader.for_evaluation``.
    """
    if isinstance(loader, LimitedLoader):
        return LimitedLoader(for_evaluation(loader.loader, every_sample=every_sample), loader.count)
    if isinstance(loader, SeededLoader):
        return loader.for_evaluation(every_sample=every_sample)
    if not isinstance(loader, DataLoader):
        return loader
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return _with_own_workers(loader)
    drop_last = loader.drop_last and not every_sample
    is_random = isinstance(order_of(loader), _RANDOM_SAMPLERS)
    needs_indices = every_sample and current_world().size == 1
    if not (is_random or needs_indices) and drop_last == loader.drop_last:
        return _with_own_workers(loader)
    order = evaluation_order(loader, drop_last=drop_last, where="DataLoader")
    # Workers that stay belong to the loader itself.
    return with_parts(loader, **order, drop_last=drop_last, persistent_workers=False, _iterator=None)


# Of each DataLoader of torch with ``persistent_workers``, the copy that evaluates.
_EVALUATING: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()


def _with_own_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that evaluates without the workers that a training pass may be using.

    To iterate over a loader with ``persistent_workers`` would end the pass over it that is open.
    """
    if not loader.persistent_workers:
        return loader
    if loader not in _EVALUATING:
        _EVALUATING[loader] = with_parts(loader, _iterator=None)
    return _EVALUATING[loader]


_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def evaluation_order(loader: Any, *, drop_last: bool, where: str) -> dict[str, Any]:
    """Return the samplers of a loader that have the order of an evaluation; none if it has it.

    Args:
        loader: a DataLoader of a map-style dataset.
        drop_last: whether the last batch is left out if it is short.
        where: what messages begin with.
    """
    batches, count = loader.batch_sampler, length(loader.dataset) or 0
    if batches is not None and not is_plain_batch_sampler(batches):
        if is_in_order(batches):
            return {}
        return {"batch_sampler": FixedBatches(ordered_batches(batches, count, where))}
    sampler = loader.sampler if batches is None else batches.sampler
    ordered = sampler
    if isinstance(sampler, EpochSampler):
        if sampler.shuffle:
            ordered = EpochSampler(sampler.data_source, shuffle=False, seed=sampler.seed)
    elif not is_in_order(sampler):
        ordered = selected_indices(sampler, count, where)
    if batches is None:
        return {} if ordered is sampler else {"sampler": ordered}
    if ordered is sampler and drop_last == batches.drop_last:
        return {}
    return {"sampler": ordered, "batch_sampler": BatchSampler(ordered, batches.batch_size, drop_last)}


def sample_indices(loader: Any) -> Iterator[Sequence[int]] | None:
    """Return the indices in the dataset of each batch of all ranks, in the order of an evaluation.

    Args:
        loader: what ``for_evaluation`` returned.

    Returns:
        None for streams, for loaders without batches, and for loaders that have no such order.
    """
    loader = whole_loader(loader)
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    if isinstance(loader.dataset, IterableDataset):
        return None
    order = order_of(loader)
    unshuffled = isinstance(order, EpochSampler) and not order.shuffle
    is_fixed = isinstance(order, SequentialSampler | FixedBatches | list | tuple | range)
    return iter(loader.batch_sampler) if unshuffled or is_fixed else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader; if it has none, of its samplers and dataset."""
    for part in [loader] if hasattr(loader, "set_epoch") else _parts(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _parts(loader: Any) -> list[Any]:
    """The samplers and the dataset of a loader."""
    return [*_samplers(loader), getattr(loader, "dataset", None)]


def generators_of(loader: Any) -> list[torch.Generator]:
    """The random generators that only a loader and its samplers use."""
    generators: list[torch.Generator] = []
    for owner in (loader, *_samplers(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, _DrawnSeed):
            # A checkpoint names generators by their places in this list.
            generator = generator.replaced
        if isinstance(generator, torch.Generator):
            generators.append(generator)
    return list(dict.fromkeys(generators))


class _DrawnSeed(torch.Generator):
    """Replaces the generator from which torch would draw a seed that it has drawn before the run was resumed."""

    replaced: torch.Generator | None = None


def keeps_workers(loader: Any) -> bool:
    """Whether the workers of a loader stay from one epoch to the next."""
    loader = whole_loader(loader)
    # Iterating over a pipe draws further numbers from the same generator.
    is_pipe = isinstance(getattr(loader, "dataset", None), IterDataPipe | MapDataPipe)
    return isinstance(loader, DataLoader) and loader.persistent_workers and not is_pipe


def end_workers(loader: Any) -> None:
    """End the worker processes that a loader keeps between passes. The next pass starts new ones.

    Otherwise they live as long as the loader. If the loader is collected in a reference cycle, its queues are closed
    before its workers are told to exit, and torch waits five seconds for each worker.

    Args:
        loader: any object. Nothing happens unless it is a DataLoader with ``persistent_workers``.
    """
    loader = whole_loader(loader)
    if isinstance(loader, SeededLoader):
        loader.end_workers()
    if not isinstance(loader, DataLoader) or not loader.persistent_workers:
        return
    iterator: Any = loader._iterator
    if iterator is not None:
        with without_death_reports():
            iterator._shutdown_workers()
        loader._iterator = None
    if loader in _EVALUATING:
        end_workers(_EVALUATING.pop(loader))


class WorkerSeed:
    """The seed of the workers of a loader that keeps them, with the interface of a random generator.

    torch draws this seed when the workers start. Without an interruption they start once. A resumed run starts them
    again; if they had started before the interruption, the seed must not be drawn a second time.

    Args:
        loader: a DataLoader with ``persistent_workers``.
    """

    def __init__(self, loader: Any) -> None:
        self.loader: Any = whole_loader(loader)

    def get_state(self) -> int | None:
        """Return the seed; None if the workers have not started."""
        loader = self.loader
        if isinstance(loader, SeededLoader):
            iterator: Any = loader._fetching[0]._iterator if loader._fetching else None
            drawn_before: int | None = loader._worker_seed
        else:
            iterator = loader._iterator
            is_drawn = isinstance(loader.generator, _DrawnSeed)
            drawn_before = loader.generator.initial_seed() if is_drawn else None
        started: int | None = None if iterator is None else iterator._base_seed
        # That of the run before the interruption, so that checkpoints do not depend on the interruption.
        return started if drawn_before is None else drawn_before

    def set_state(self, seed: int | None) -> None:
        """Have workers that start later do so without drawing a seed; None has them draw one."""
        if seed is None:
            self._forget()
            return
        if self.get_state() is not None:
            return
        if isinstance(self.loader, SeededLoader):
            self.loader._worker_seed = seed
        else:
            drawn = _DrawnSeed()
            drawn.manual_seed(seed)
            drawn.replaced = self.loader.generator
            self.loader.generator = drawn

    def _forget(self) -> None:
        """Forget a seed for workers that have not started yet."""
        if isinstance(self.loader, SeededLoader):
            self.loader.forget_worker_seed()
        elif isinstance(self.loader.generator, _DrawnSeed) and self.loader._iterator is None:
            self.loader.generator = self.loader.generator.replaced


def _samplers(loader: Any) -> Iterable[Any]:
    """The samplers of a loader, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    return {id(sampler): sampler for sampler in samplers}.values()


def order_of(loader: Any) -> Any:
    """The object that decides the order of a loader's samples: a sampler, a batch sampler, or the loader itself."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler
    return getattr(loader, "sampler", loader) if batch_sampler is None else batch_sampler


def random_sampler_of(loader: Any) -> str:
    """The class of the sampler that draws another order in each epoch, so that a pass cannot be resumed.

    Returns:
        ``""`` where the order is that of the dataset or depends on the epoch alone, and for a loader not of ours with
        ``state_dict`` and ``load_state_dict``. An order that is neither counts as drawn.
    """
    loader = whole_loader(loader)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or has_own_state(loader):
        return ""
    order = order_of(loader)
    certain = isinstance(order, SequentialSampler | list | tuple | range) or hasattr(order, "set_epoch")
    return "" if certain or _seeds_order(loader) else type(order).__name__


def _seeds_order(loader: Any) -> bool:
    """Whether what a sampler draws is seeded with the epoch: it has a length, and neither set_epoch nor a generator."""
    order, seed = order_of(loader), loader.seed if isinstance(loader, SeededLoader) else None
    return seed is not None and isinstance(order, Sized) and not (hasattr(order, "set_epoch") or generators_of(loader))


def has_own_state(loader: Any) -> bool:
    """Whether a loader that is not of ours has ``state_dict`` and ``load_state_dict``."""
    loader = whole_loader(loader)
    return has_state(loader) and not isinstance(loader, SeededLoader)


def whole_loader(loader: Any) -> Any:
    """Return the loader of which another gives a part; any other loader itself."""
    while isinstance(loader, _PartOfLoader):
        loader = loader.loader
    return loader


def length(loader: Any) -> int | None:
    """How many batches a loader has; None if it does not know."""
    try:
        return len(loader)
    except TypeError:
        return None


# The samplers of torch whose length is the number of indices that they give.
_EXACT_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)


def has_exact_length(loader: Any) -> bool:
    """Return whether the length of a loader is certain.

    The length of a stream, and of a loader, sampler or batch sampler of the user's, is what its ``__len__``
    claims. Those with a true attribute ``has_exact_length`` are certain.
    """
    loader = whole_loader(loader)
    if isinstance(loader, list | tuple) or getattr(loader, "has_exact_length", False):
        return True
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__len__ not in (DataLoader.__len__, SeededLoader.__len__):
        return False
    order = order_of(loader)
    return type(order) in _EXACT_SAMPLERS or getattr(order, "has_exact_length", False)


class _PartOfLoader:
    """Some batches of a loader; in all else, the loader."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class LimitedLoader(_PartOfLoader):
    """The first batches of a loader, of each epoch its own; in all else, the loader.

    No batch after them is asked for; workers have made those that the loader prefetches.

    Args:
        loader: any iterable of batches; where it has no length, this has none either.
        count: how many.
    """

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.count)

    def __len__(self) -> int:
        return min(self.count, len(self.loader))


class OverfitLoader(LimitedLoader):
    """The same batches in every epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Stay in the first: the loader never gets the epoch."""


def overfit_batches(loader: Any, count: int) -> OverfitLoader:
    """The first batches of a loader in the order of the dataset, the same in every epoch; the loader stays as it is.

    Args:
        loader: one of ours; or one whose order is that of its dataset anyway.
        count: how many batches.

    Raises:
        DataError: the loader has another order, which cannot be turned off.
    """
    if isinstance(loader, LimitedLoader):
        return overfit_batches(loader.loader, min(count, loader.count))
    order = order_of(loader)
    if isinstance(loader, SeededLoader) and isinstance(order, EpochSampler):
        if len(order) < loader.size:
            what = f"{len(order)} samples cannot be trained on by {loader.size} ranks at once"
            raise DataError(f"overfit_batches: {loader.where}: {what}; start fewer, or leave it out")
        ordered, batches = EpochSampler(order, shuffle=False, seed=order.seed), loader.batch_sampler
        if isinstance(batches, BatchSampler):
            batches = BatchSampler(ordered, batches.batch_size, batches.drop_last)
        return OverfitLoader(with_parts(loader, epoch=0, sampler=ordered, batch_sampler=batches), count)
    stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if stream or isinstance(order, SequentialSampler) or isinstance(loader, list | tuple):
        return OverfitLoader(loader, count)
    what = f"{count} cannot be had of a {type(loader).__name__} whose order a {type(order).__name__} decides"
    raise DataError(f"overfit_batches: {what}; make it without a sampler of its own, or use limit_batches")


def batches_done(remaining: Any, done: int) -> int:
    """How many batches of a pass are done: so many, unless other ranks have taken other batches.

    Args:
        remaining: what ``remaining_batches`` has returned.
        done: how many batches were done, as they were then.
    """
    loader = whole_loader(remaining)
    start = loader._start if isinstance(loader, SeededLoader) and not loader.streams else None
    return start["taken"] if start else done


def remaining_batches(loader: Any, done: int, position: Mapping[str, Any] | None = None) -> Any:
    """The batches of a pass after the first ``done``; ``position_of`` gives the position in them.

    Args:
        loader: of the pass. If it draws its order, the random generators have to be as they were when the pass began.
        done: how many batches of it are done.
        position: what ``position_of`` returned then; without it the batches of a stream are read again.

    Raises:
        DataError: the position is one in other data.
    """
    refuse_unshared(loader, "the training data")
    if isinstance(loader, LimitedLoader):
        remaining = remaining_batches(loader.loader, done, position)
        return LimitedLoader(remaining, max(0, loader.count - batches_done(remaining, done)))
    if isinstance(loader, SeededLoader):
        # A copy, whose place another pass over the same loader leaves alone; but workers that stay belong to the loader.
        loader = loader if loader.persistent_workers else copy.copy(loader)
        if done or position:
            loader.load_state_dict(position or loader.state_after(done))
        return loader
    if done and position and has_own_state(loader):
        loader.load_state_dict(position["loader"])
        return loader
    return FastForward(loader, done) if done else loader


def without_state(loader: Any) -> Any:
    """The same loader for a pass that nobody resumes: a stream is not asked for its state after each batch."""
    refuse_unshared(loader, "the evaluated data")
    if isinstance(loader, LimitedLoader):
        return LimitedLoader(without_state(loader.loader), loader.count)
    return with_parts(loader, _tracks=False) if isinstance(loader, SeededLoader) and loader.streams else loader


def position_of(loader: Any, done: int) -> dict[str, Any] | None:
    """Where a pass is after ``done`` batches, as plain data and tensors; None where that number says it all.

    Args:
        loader: what ``remaining_batches`` returned for it.
        done: how many batches of the pass are done: all that it has given, or all but the last.
    """
    loader = whole_loader(loader)
    if isinstance(loader, SeededLoader):
        return loader.state_after(done)
    return {"loader": state_of(loader, "the training data")} if has_state(loader) else None


class FastForward(_PartOfLoader):
    """Reads and skips the first batches of a loader, and returns the others."""

    def __iter__(self) -> Iterator[Any]:
        self._announce()
        started = time.perf_counter()
        batches: Iterator[Any] = iter(self.loader)
        interruptible = SHUTDOWN.interruptible(batches) if getattr(self.loader, "num_workers", 0) else batches
        count = 0
        for _ in islice(interruptible, self.count):
            count += 1
            # Nothing has to be saved: the run can be resumed from the same checkpoint again.
            SHUTDOWN.raise_if_requested()
        if count < self.count:
            what = f"the epoch has {count} batches, and {self.count} of them were trained on before"
            raise DataError(f"{what}; resume with the data and batch size of the earlier run")
        logger.info(f"read {count} batches again in {time.perf_counter() - started:.1f} s")
        return batches

    def _announce(self) -> None:
        """Log that batches are read again, and how to avoid that."""
        loader = self.loader
        what = f"reading {self.count} batches of the epoch again, to continue after them"
        if not isinstance(loader, SeededLoader):
            remedy = "" if isinstance(loader, Iterator) else "; make the loader with make_loader to avoid that"
            logger.info(f"{what}{remedy}")
        elif loader.resume or not loader.streams:
            logger.info(what)
        else:
            why = "a stream has no index"
            remedy = (
                "give its dataset state_dict and load_state_dict to avoid that, or set `resume: reread` to allow it"
            )
            logger.warning(f"{what}, since {why}; {remedy}")


def refuse_unshared(loader: Any, where: str) -> None:
    """Raise for a loader that would give each of several processes the same batches.

    One that is not ours has to say among how many it shares the samples out: by ``num_replicas`` of itself, of its sampler,
    as torch's DistributedSampler does, or of its dataset.

    Raises:
        ConfigError: it is such a loader.
    """
    ranks, loader = current_world().size, whole_loader(loader)
    shared = [getattr(part, "num_replicas", None) for part in (loader, *_parts(loader))]
    if ranks > 1 and ranks not in ([loader.size] if isinstance(loader, SeededLoader) else shared):
        what = f"a {type(loader).__name__} that was not made for {ranks} ranks gives all the same batches"
        remedy = "make it with make_loader, in a script after ddp_init_group(run_opts), or with a DistributedSampler"
        raise ConfigError(f"{where}: {what}; {remedy}")


def first_batch(loader: Any) -> Any:
    """The first batch of a loader; as ``first_batches``, which says more."""
    return first_batches(loader, 1)[0]


def first_batches(loader: Any, count: int) -> list[Any]:
    """The first batches of a loader, on all ranks those of rank 0.

    Random generators, samplers and streams stay as they are.

    The samples of a map-style dataset are a function of their index, so such a dataset is asked once more. One that is
    iterated may count what it gives: it is asked in another process.

    Args:
        loader: a DataLoader, or any iterable that can be iterated again.
        count: how many; a shorter loader gives fewer.

    Raises:
        DataError: it gives no batch, or can be iterated only once.
    """
    loader = whole_loader(loader)
    states = get_states()
    own = generators_in(getattr(loader, "dataset", loader))
    own_states = states_of(own)
    try:
        batches = iter(_copy(loader) if isinstance(loader, DataLoader) else loader)
        if batches is loader:
            kind = f"a {type(loader).__name__} can be iterated only once"
            raise DataError(f"{kind}, and a batch taken before the training would be missing in it; use a DataLoader")
        first = list(islice(batches, count))
        if not first:
            remedy = "check the dataset, or drop_last with few samples"
            raise DataError(f"the loader gave no batch; {remedy}")
        return first
    finally:
        set_states(states)
        restore_states(own, own_states)


def dataset_digest(loader: Any) -> str:
    """A hash of a map-style dataset, by which processes find out that they have other data.

    It is of the length, of a few samples, and of the indices of the next batch. Random generators, samplers and workers stay
    as they are.

    Returns:
        ``""`` where there is nothing to compare: for streams, loaders without a seed and loaders not of ours, and where a
        sample is not the same when it is asked for twice, or has other things in it than tensors and plain values.
    """
    loader = whole_loader(loader)
    if not isinstance(loader, SeededLoader) or loader.streams or loader.seed is None:
        return ""
    states, count, batched = get_states(), length(loader.dataset), loader.batch_sampler is not None
    other = with_parts(_copy(loader), size=1)
    try:
        first = [request.indices for request in islice(other._make_fetching()[2] or (), 1)]
        places = list(chain(*first) if batched else first)[:FEW]
        if count and loader._epoch_sampler():
            places = [place * (count - 1) // (FEW - 1) for place in range(FEW)]
        other = with_parts(other, sampler=places, batch_sampler=[[place] for place in places] if batched else None)
        files = [b"".join(pack(*flatten([count, first, list(other)]))()) for _ in range(2)]
        return blake2b(files[0], digest_size=16).hexdigest() if files[0] == files[1] else ""
    except CheckpointError:
        return ""
    finally:
        set_states(states)


def _copy(loader: DataLoader[Any]) -> Any:
    """A loader of rank 0 of the same dataset, with copies of its samplers and generator, and at most one worker."""
    memo = {id(loader.dataset): loader.dataset}
    parts = {name: copy.deepcopy(getattr(loader, name), memo) for name in ("generator", "sampler", "batch_sampler")}
    other = with_parts(loader, **parts, _iterator=None, persistent_workers=False, rank=0)
    if loader.num_workers:
        other.num_workers = 1
    elif isinstance(loader.dataset, IterableDataset):
        other.num_workers, other.prefetch_factor = 1, 1
        # Only a forked process has the dataset without its being pickled, as with no worker.
        other.multiprocessing_context = multiprocessing.get_context("fork")
    return other
