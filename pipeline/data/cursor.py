"""DataCursor: a place in one epoch of a loader, and the batches that are left after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from loguru import logger
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.data.batch import EmptySlice, on_device, to_device
from pipeline.data.loader import (
    FastForward,
    LimitedLoader,
    SeededLoader,
    batches_done,
    generators_of,
    has_exact_length,
    has_own_state,
    keeps_workers,
    length,
    order_of,
    position_of,
    random_sampler_of,
    remaining_batches,
    set_epoch,
    whole_loader,
    with_parts,
)
from pipeline.distributed.world import World
from pipeline.errors import DataError

# Random generators by name, beside those of Python, torch and numpy.
Generators = Mapping[str, Any]

# The samplers that draw the whole order of an epoch before its first index, or from a generator of their own.
_DRAWN_AT_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class DataCursor:
    """A place in one epoch of a loader, and the batches that are left after it.

    A SeededLoader, and any loader with ``state_dict`` and ``load_state_dict``, reports its position itself. For other
    loaders, and for an order that a sampler draws at random, the cursor keeps the states of the random generators before
    the first batch. To continue, it restores them, starts the epoch again in the same order, and skips the batches that
    were taken.

    ``open`` returns all batches that are left, for a loop that counts itself and gives its count to ``state_dict``. ``over``
    and ``take`` give them out one at a time, and count; so does iterating over the cursor. Use one of the two ways.

    Example::

        loader = torch.utils.data.DataLoader([0, 1, 2, 3], batch_size=2)
        cursor = DataCursor(loader, epoch=0, generators=dict)
        first = cursor.take()
        state = cursor.state_dict()

        resumed = DataCursor(loader, epoch=0, generators=dict)
        resumed.load_state_dict(state)
        second = resumed.take()
        assert second.tolist() == [2, 3]

    Args:
        source: a loader; or, with ``begun``, an iterator that user code has made for this epoch.
        epoch: the number of the epoch, from 0; -1 if no epoch has started.
        generators: returns the random generators that the loader may draw from, beside the global ones.
        taken: after how many batches to continue, if nothing else is known.
        begun: the states of all these generators before user code made the iterator; None for a loader.
        device: where the batches go; None leaves them where they are.
        world: the ranks that take their batches in step, by ``over`` and ``take``; None if this process reads alone.
        name: what messages call the loader.

    Attributes:
        taken: how many batches were taken, stand-ins included, as far as the cursor counts them.
        stand_ins: how many of them were stand-ins, because other ranks had more batches than this one.
        has_more: whether this rank has another batch after the one that was taken last; None if all ranks have as many.
        is_own: whether ``source`` is an iterator that user code has made.
        length: how many batches the epoch has, if that is certain; None if only reading tells.
    """

    def __init__(
        self,
        source: Any,
        epoch: int,
        generators: Callable[[], Generators],
        *,
        taken: int = 0,
        begun: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        world: World | None = None,
        name: str = "the loader",
    ) -> None:
        self.source = source
        self.epoch = epoch
        self.taken = taken
        self.stand_ins = 0
        self.has_more: bool | None = None
        self.is_own = begun is not None
        self._generators = generators
        self._begun = None if begun is None else {"own": {}, **begun}
        self._device = device
        self._world = world
        self._name = name
        if not self.is_own and epoch >= 0:
            # The length may depend on the epoch.
            set_epoch(source, epoch)
        self.length = self._certain_length()
        # What the sampler claims. The loader is read one batch ahead to see whether that is true.
        self._claimed = length(source) if self.length is None and _has_indices(source) else None
        # Whether continuing means to start the epoch again and to skip what was taken.
        self._replays = self.is_own or not _knows_its_place(source)
        self._order: HashedOrder | None = None
        self._reading: Any = None
        self._batches: Iterator[Any] | None = None
        # Where to continue reading, until the reading has started; with a batch read ahead, the place before that batch.
        self._place: Mapping[str, Any] | None = None
        self._restores = False
        self._ahead: list[Any] = []
        self._before_ahead: Mapping[str, Any] | None = None
        # A rank that has fewer batches than others gets its last one again, as a stand-in.
        self._last: list[Any] = []
        self._ahead_is_stand_in = False

    def _certain_length(self) -> int | None:
        if isinstance(self.source, _BaseDataLoaderIter):
            # Of other iterators the length is a hint, which may be wrong. Batches that user code has taken are no part
            # of the epoch.
            return (length_hint(self.source) - self.source._num_yielded) or None
        if not has_exact_length(self.source) or generators_of(self.source):
            # A sampler of torch draws from a generator of its own once more when it ends, so it has to be read to its end.
            return None
        return length(self.source)

    def open(self) -> Iterator[Any]:
        """Return the batches that are left. The caller counts those that it takes.

        Creating the iterator of a loader draws random numbers. A caller that continues from a state restores the random
        generators after this call.

        Raises:
            DataError: the data are not those of the saved place.
        """
        if self._batches is None:
            done = self.taken - self.stand_ins
            self._note_start()
            if not self._replays:
                self._reading = remaining_batches(self.source, done, self._place)
                # Other ranks may have taken other batches.
                self.taken = batches_done(self._reading, done) + self.stand_ins
            else:
                # Ranks share what user code gives as it likes.
                begun = self.source if self.is_own else remaining_batches(self._hashed(self.source), 0)
                self._reading = FastForward(begun, done) if done else begun
            self._batches = iter(self._reading)
            self._check_order(done)
            if self._device is not None:
                self._batches = iter(on_device(self._batches, self._device))
        return self._batches

    @property
    def reading(self) -> Any:
        """The loader that is read; None before ``open``."""
        return self._reading

    def _note_start(self) -> None:
        """Keep how the random generators are before the first batch, or restore how they were then."""
        if self.is_own or not self._replays:
            return
        if self._begun is None:
            if self.taken and (sampler := random_sampler_of(self.source)):
                what = f"{self._name}: {sampler} draws another order than the one of the batches that were taken"
                logger.warning(f"{what}, since only their number is known; load a whole state, or use make_loader")
            self._begun = self._generator_states()
        elif self._restores:
            restore_random_state(self._begun, self._generators())

    def _generator_states(self) -> dict[str, Any]:
        return {"own": {}, **random_state(self._generators())}

    def over(self) -> bool:
        """Return whether all batches were taken. Unless the length is certain, one batch is read ahead for this.

        Raises:
            DataError: the loader has fewer batches than its sampler claims.
        """
        if self.length is not None:
            return self.taken >= self.length
        if not self._ahead:
            is_first = self._batches is None
            batches = self.open()
            self._place = self._place_after(self.taken)
            if self._replays:
                self._before_ahead = self._generator_states()
            self._ahead = list(islice(batches, 1))
            if not self._ahead and self.taken < (self._claimed or 0):
                raise self._too_short(self._claimed)
            if self._world and self._world.size > 1:
                self._fill_in(self._world, is_first=is_first)
        return not self._ahead

    def _fill_in(self, world: World, *, is_first: bool) -> None:
        """If this rank has no batch left and another one has, read a stand-in ahead. All ranks call this."""
        of_ranks = world.all_gather((bool(self._ahead), self._ahead if is_first else []))
        self._last = self._ahead or self._last or next((batch for _, batch in of_ranks if batch), [])
        if not self._ahead and any(has_one for has_one, _ in of_ranks):
            self._ahead = [EmptySlice(self._last[0])]
            self._ahead_is_stand_in = True

    def take(self) -> Any:
        """Return the next batch, which there has to be. A stand-in is an ``EmptySlice``.

        Raises:
            DataError: the loader ends before its length says so.
        """
        for batch in self._ahead or islice(self.open(), 1):
            self._ahead = []
            self._before_ahead = None
            self.taken += 1
            self.stand_ins += self._ahead_is_stand_in
            self._ahead_is_stand_in = False
            return batch
        raise self._too_short(self.length)

    def _too_short(self, claimed: int | None) -> DataError:
        what = f"{self._name}: an epoch had {self.taken} batches, and its length is {claimed}"
        return DataError(f"{what}; correct its __len__, or that of its batch_sampler")

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.over():
            raise StopIteration
        return self.take()

    def in_step(
        self, batches: Iterator[Any], world: World, any_has_more: Callable[..., bool], device: torch.device
    ) -> Iterator[Any]:
        """Return batches of a rank that may have fewer than others, then stand-ins until no rank has more.

        Args:
            batches: those of this rank.
            world: the ranks; all of them call this.
            any_has_more: called with `has_more` on all ranks after each batch; returns whether any rank has another one.
            device: where a stand-in goes that another rank provides.
        """
        end = object()
        batch = None
        ahead = next(batches, end)
        have = world.all_gather(ahead is not end)
        more = any(have)
        if more and not all(have):
            # What a rank without any batch shows to code that looks at its batch.
            source = have.index(True)
            batch = to_device(world.all_gather(ahead if world.rank == source else None)[source], device)
        while more:
            is_own = ahead is not end
            if is_own:
                batch = ahead
                ahead = next(batches, end)
            else:
                self.stand_ins += 1
            self.has_more = ahead is not end
            yield batch if is_own else EmptySlice(batch)
            more = any_has_more(has_more=self.has_more)
        self.has_more = None

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the place after the batches that were taken.

        Args:
            taken: how many these are, if the caller has counted those from ``open``.
        """
        taken = self.taken if taken is None else taken
        place = self._place if self._ahead or self._batches is None else self._place_after(taken)
        return {
            "epoch": self.epoch,
            "taken": taken,
            "stand_ins": self.stand_ins,
            "place": place,
            "begun": self._begun,
            "ahead": self._before_ahead,
            "is_own": self.is_own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that were taken; nothing is read before ``open``."""
        self.taken = state["taken"]
        self.stand_ins = state["stand_ins"]
        self._place = state["place"]
        self._before_ahead = state["ahead"]
        if not self.is_own:
            self._begun = state["begun"]
            self._restores = self._begun is not None

    def close(self) -> None:
        """Let go of the batches that are left, so that the workers that make them end."""
        self._batches = iter(())

    def reopen(self) -> None:
        """Read up to the place that was loaded, and the batch after it if that was read ahead.

        A caller restores the random generators afterwards.
        """
        ahead = self._before_ahead
        is_over = self.length is not None and self.over()
        if ahead is not None or (self.taken and not is_over):
            self.open()
        if ahead is not None:
            restore_random_state(ahead, self._generators())
            self.over()

    def _place_after(self, taken: int) -> Mapping[str, Any] | None:
        if self.is_own:
            return None
        done = taken - self.stand_ins
        if self._order is not None:
            return {"hash": self._order.hash_after(done)}
        return position_of(self._reading, done)

    def _hashed(self, loader: Any) -> Any:
        """Return a loader that also hashes the indices of its batches, if its sampler may draw while the training draws.

        Only the hash shows then whether the order is the same after a resume.
        """
        if isinstance(loader, LimitedLoader):
            return LimitedLoader(self._hashed(loader.loader), loader.count)
        is_plain = isinstance(loader, DataLoader) and not isinstance(loader, SeededLoader)
        if not is_plain or not random_sampler_of(loader) or isinstance(order_of(loader), _DRAWN_AT_ONCE):
            return loader
        if keeps_workers(loader):
            # The workers stay with the loader as it is.
            return loader
        part = "sampler" if loader.batch_sampler is None else "batch_sampler"
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._order = HashedOrder(getattr(loader, part), ahead + 2)
        return with_parts(loader, **{part: self._order})

    def _check_order(self, done: int) -> None:
        """Raise if the batches that were skipped are not those that were taken before.

        Raises:
            DataError: the sampler has drawn another order.
        """
        expected = (self._place or {}).get("hash") if self._replays and done else None
        if expected is None or (self._place_after(self.taken) or {}).get("hash") == expected:
            return
        what = f"{self._name}: {random_sampler_of(self.source)} has drawn another order than before the resume"
        effect = "so samples would come twice, and others not at all"
        remedy = (
            "have it draw the order of an epoch at once or from its own generator, or make the loader with make_loader"
        )
        raise DataError(f"{what}, {effect}; {remedy}; a checkpoint between two epochs can be resumed")


class HashedOrder:
    """The indices of a sampler or batch sampler, hashed as they are drawn.

    Args:
        indices: the sampler.
        history: how many of the last hashes are kept, since workers fetch ahead.
    """

    def __init__(self, indices: Any, history: int) -> None:
        self._order = indices
        self._hashes: deque[tuple[int, str]] = deque(maxlen=history)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        self._hashes.clear()
        hashed = ""
        for number, indices in enumerate(self._order, 1):
            # A long tensor shows only some of its numbers.
            shown = indices.tolist() if hasattr(indices, "tolist") else indices
            hashed = blake2b(f"{hashed}{shown}".encode(), digest_size=16).hexdigest()
            self._hashes.append((number, hashed))
            yield indices

    def hash_after(self, count: int) -> str | None:
        """Return the hash of the first ``count`` items; None if it is too long ago."""
        return dict(self._hashes).get(count)


def _knows_its_place(source: Any) -> bool:
    """Return whether a loader reports its position itself, and continues there in the same order."""
    loader = whole_loader(source)
    is_ours = isinstance(loader, SeededLoader) and not random_sampler_of(loader)
    return is_ours or has_own_state(loader)


def _has_indices(source: Any) -> bool:
    return isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset)
