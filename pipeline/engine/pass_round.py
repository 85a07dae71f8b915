"""PassRound: one round over the data of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch.utils.data import IterableDataset

from pipeline.compute.trainable import Trainable
from pipeline.data.batch import EmptySlice
from pipeline.data.cursor import DataCursor
from pipeline.data.loader import LimitedLoader, has_exact_length, has_own_state, length
from pipeline.data.workers import supervise_workers
from pipeline.distributed.strategy import Strategy, require_equal_weights
from pipeline.distributed.world import current_world
from pipeline.signals import SHUTDOWN


class PassRound:
    """One round over the data of a pass, and what ``measure`` finds out about the number of its batches.

    Args:
        loader: has the batches.
        number: decides their order, with the seed.
        generators: returns the random generators by name.
        trainable: trains on the batches.
        phase: the name of the phase, for messages.

    Attributes:
        cursor: the place in the data.
        announced: the number of batches that the loader announces; 0 if it has no length.
        certain_length: the number of batches, if it is exact and the same on all ranks; else None.
        limit: the largest number of batches, if the loader is limited; else None.
        is_stand_in: whether the batch is a stand-in, because only other ranks have samples.
    """

    def __init__(
        self,
        loader: Any,
        number: int,
        generators: Callable[[], dict[str, Any]],
        trainable: Trainable,
        phase: str,
    ) -> None:
        self.cursor = DataCursor(loader, number, generators, device=trainable.device, name=f"phase.{phase}")
        self.announced = 0
        self.certain_length: int | None = None
        self.limit = loader.count if isinstance(loader, LimitedLoader) else None
        self.is_stand_in = False
        self._loader = loader
        self._trainable = trainable
        self._phase = phase
        self._is_equal_on_ranks = True
        self._batches: Iterator[Any] = iter(())

    def measure(self) -> None:
        """Find out how many batches there are. All ranks call this together."""
        is_exact = has_exact_length(self._loader)
        self.announced = length(self._loader) or 0
        # Without equal lengths, the ranks would close their last windows after different batches.
        self._is_equal_on_ranks = current_world().size == 1 or (has_as_many_on_all(self._loader) and is_exact)
        if self._is_equal_on_ranks and is_exact:
            self.certain_length = self.announced

    def open(self, resources: ExitStack, on_signal: Callable[[], object] | None) -> Iterator[Any]:
        """Return the batches that are left, on their device.

        Args:
            resources: closes the loader.
            on_signal: is called if a signal arrives while workers make a batch; None lets the signal wait.
        """
        cursor = self.cursor
        batches = cursor.open()
        resources.callback(cursor.close)
        workers = getattr(cursor.reading, "num_workers", 0)
        # An interrupted wait may lose a batch, and a loader that saves its state itself would not read it again after a resume.
        if on_signal and workers and not has_own_state(self._loader):
            batches = SHUTDOWN.interruptible(batches, on_signal)
        resources.enter_context(supervise_workers(batches))
        strategy = self._trainable.strategy
        if strategy:
            if not self._is_equal_on_ranks:
                batches = cursor.in_step(batches, strategy.world, strategy.any_has_more, self._trainable.device)
            batches = self._slices(batches, strategy)
        self._batches = batches
        return batches

    def _slices(self, batches: Iterator[Any], strategy: Strategy) -> Iterator[Any]:
        """Yield the slices of this rank, and a stand-in for each that is empty.

        After the first update it checks once that all ranks have the same weights.
        """
        trainable = self._trainable
        is_checked = False
        for batch in batches:
            self.is_stand_in = type(batch) is EmptySlice
            yield batch.batch if self.is_stand_in else batch
            if not is_checked and trainable.counters["update"]:
                is_checked = True
                require_equal_weights({self._phase: trainable.modules}, strategy.world)
        self.is_stand_in = False

    def has_ended(self, done: int) -> bool | None:
        """Return whether a round with so many batches is over; None if only the request of the next batch can tell.

        Args:
            done: the number of batches that were given out in this round.
        """
        if self.limit is not None and done >= self.limit:
            return True
        return None if self.certain_length is None else done >= self.certain_length

    def has_more(self) -> bool:
        """Request the next batch, which is lost, and return whether there was one."""
        end = object()
        return next(self._batches, end) is not end


def has_as_many_on_all(loader: Any) -> bool:
    """Return whether each rank has the same number of batches of a loader. For a stream that is unknown."""
    dataset = getattr(loader, "dataset", None)
    counts = current_world().all_gather(None if isinstance(dataset, IterableDataset) else length(loader))
    return None not in counts and len(set(counts)) == 1
