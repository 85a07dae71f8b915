"""What all processes of a training do after one and the same iteration: rank 0 puts it into the store, the others read it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, TypeVar

from pipeline.context import Context
from pipeline.distributed.world import World
from pipeline.signals import SHUTDOWN

_T = TypeVar("_T")

# Seconds between two looks, by the clock of rank 0, and the most iterations: steps may become slower.
INTERVAL, LONGEST_STRIDE = 0.1, 50

# Looks after which those are deleted that all have read.
KEPT = 100

# One for each training of this process; all processes begin theirs in the same order.
_numbers = count()


class Agreement:
    """What all processes of a training do after one and the same iteration.

    At an agreed iteration, about every 0.1 seconds, rank 0 puts into the store what happens now and when the next look is,
    and the others read it. Between two looks nothing is said, and no process waits for another. All processes make the
    same looks in the same order.

    What is asked for on one process, by a signal, ``context.stop``, ``context.request`` or ``is_exit``, goes to rank 0, and
    counts on all of them, that one included, once a look says so.

    Args:
        world: the processes; several.
        context: of the training.

    Attributes:
        next: the iteration of the next look.
    """

    def __init__(self, world: World, context: Context) -> None:
        self.world, self.context, self.next = world, context, 0
        self._name = f"training/{next(_numbers)}"
        self._number = self._taken = self._oldest = 0
        self._asked: list[tuple[str, Any]] = []
        self._exit_asked = False
        # Where and when the last look was that measured how fast it goes, and the iterations to the next.
        self._measured, self._stride = (0, time.monotonic()), 1

    @contextmanager
    def ruling(self) -> Iterator[None]:
        """In the block, what is asked for on a process counts once a look says so; what was before, counts on all."""
        context, wishes = self.context, self.context.wishes()
        context.stop_reason, self._measured = None, (context.peek("train_state")["iteration"], time.monotonic())
        for what, value in dict.fromkeys(wish for wishes in self.world.all_gather(wishes) for wish in wishes):
            context.grant(what, value)
        context.ask = self.ask
        try:
            with SHUTDOWN.asking(self.ask):
                yield
        finally:
            context.ask = None

    def ask(self, what: str, value: Any) -> None:
        """Tell rank 0 that something is asked for; it may be called in a handler of a signal."""
        if self.world.is_main:
            self._asked.append((what, value))
            return
        # Where the store is gone, the next look fails.
        with suppress(RuntimeError):
            number = self.world.store.add(f"{self._name}/asked", 1)
            self.world.put(f"{self._name}/asked/{number}", (what, value))

    def look(self, position: int, *answers: Any) -> list[Any]:
        """Take what rank 0 says: what was asked for counts from now on.

        Args:
            position: the iteration, or the number of the batch of a validation.
            answers: plain values by which this process would go on.

        Returns:
            Those of rank 0, by which all go on.

        Raises:
            PeerError: another process has failed.
        """
        world, context, key = self.world, self.context, f"{self._name}/{self._number}"
        if context.peek("is_exit") and not self._exit_asked:
            self._exit_asked = True
            self.ask(*context.exit_wish()[0])
        if world.is_main:
            said: list[Any] = [self._take(), answers, self._pace(position)]
            world.put(key, said)
        else:
            said = world.get(key)
        self._number += 1
        # Where it was last, should it hang.
        world.store.set(f"seen/{world.rank}", str(context.peek("train_state")["iteration"]))
        self._forget()
        self.next = position + said[2]
        for what, value in said[0]:
            if what == "signal":
                SHUTDOWN.heed(value)
            else:
                context.grant(what, value)
        return list(said[1])

    def watched(self, batches: Iterable[_T]) -> Iterator[_T]:
        """The batches of a validation, with looks among them; each process has as many."""
        training, measured, stride, due = self.next, self._measured, self._stride, 1
        self._measured, self._stride = (0, time.monotonic()), 1
        for number, batch in enumerate(batches):
            if number >= due:
                self.look(number)
                due = self.next
            yield batch
        self.next, self._measured, self._stride = training, (measured[0], time.monotonic()), stride

    def _take(self) -> list[tuple[str, Any]]:
        """On rank 0, what was asked for since the last look."""
        first, self._taken = self._taken, self.world.store.add(f"{self._name}/asked", 0)
        keys = [f"{self._name}/asked/{number + 1}" for number in range(first, self._taken)]
        asked = [self.world.get(key) for key in keys]
        for key in keys:
            self.world.store.delete_key(key)
        own, self._asked = self._asked, []
        return own + asked

    def _pace(self, position: int) -> int:
        """On rank 0, in how many iterations the next look is, by the speed of the last ones."""
        (last, since), now = self._measured, time.monotonic()
        if position > last:
            likely = int(INTERVAL * (position - last) / (now - since))
            self._stride = max(1, min(LONGEST_STRIDE, 2 * self._stride, likely))
            self._measured = position, now
        return self._stride

    def _forget(self) -> None:
        """Once in a while, delete the looks that all have read."""
        read, (past, since) = f"{self._name}/read", divmod(self._number, KEPT)
        if not self.world.is_main:
            if since == 0:
                self.world.store.add(read, 1)
        elif since == KEPT - 1 and self.world.store.add(read, 0) == past * (self.world.size - 1):
            for number in range(self._oldest, past * KEPT):
                self.world.store.delete_key(f"{self._name}/{number}")
            self._oldest = past * KEPT
