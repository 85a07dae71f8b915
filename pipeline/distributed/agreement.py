"""What all processes of a training do after one and the same iteration: rank 0 puts it into the store, the others read it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from typing import Any, TypeVar

from pipeline.context import Context
from pipeline.distributed.world import World
from pipeline.signals import SHUTDOWN

_T = TypeVar("_T")

# Seconds between two looks, by the clock of rank 0, and the most iterations: steps may become slower.
INTERVAL, LONGEST_STRIDE = 0.1, 50

# One for each training of this process; all processes begin theirs in the same order.
_numbers = count()


def share_wishes(world: World, context: Context) -> None:
    """From now on, what was asked for on one process counts on all; all of them call this at the same place."""
    for wish in chain(*world.all_gather(context.wishes())):
        context.grant(*wish)


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
        self._name, self._number = f"training/{next(_numbers)}", 0
        # On rank 0: where and when the last look was, and how many iterations there are between two.
        self._last, self._stride = (0, time.monotonic()), 1

    @contextmanager
    def ruling(self) -> Iterator[None]:
        """In the block, what is asked for on a process counts once a look says so; what was before, counts on all."""
        share_wishes(self.world, self.context)
        with self.context.asking_first(self.ask):
            SHUTDOWN.ask_by(self.ask)
            try:
                yield
            finally:
                SHUTDOWN.ask_by(None)

    def ask(self, what: str, value: Any) -> None:
        """Tell rank 0 that something is asked for; it may be called in a handler of a signal."""
        # Where the store is gone, the next look fails.
        with suppress(RuntimeError):
            self.world.store.queue_push(f"{self._name}/asked", json.dumps([what, value]))

    def look(self, position: int, *answers: Any) -> list[Any]:
        """Take what rank 0 says: what was asked for counts from now on.

        Args:
            position: the iteration; in a validation, one that goes on from there by batches.
            answers: plain values by which this process would go on.

        Returns:
            Those of rank 0, by which all go on.

        Raises:
            PeerError: another process has failed.
        """
        world, context, store, key = self.world, self.context, self.world.store, f"{self._name}/{self._number}"
        if context.peek("is_exit") and not context.exits:
            self.ask(*context.exit_wish()[0])
        if world.is_main:
            queue = f"{self._name}/asked"
            asked = [json.loads(store.queue_pop(queue)) for _ in range(store.queue_len(queue))]
            said = asked, answers, self._pace(position)
            world.put(key, said)
        else:
            said = world.get(key)
            if store.add(f"{key}/read", 1) == world.size - 1:
                store.delete_key(key)
                store.delete_key(f"{key}/read")
        self._number += 1
        # Where it was last, should it hang.
        store.set(f"seen/{world.rank}", str(context.peek("train_state")["iteration"]))
        self.next = position + said[2]
        for what, value in said[0]:
            if what == "signal":
                SHUTDOWN.heed(value)
            else:
                context.grant(what, value)
        return list(said[1])

    def watched(self, batches: Iterable[_T]) -> Iterator[_T]:
        """The batches of a validation, with looks among them; each process has as many."""
        first = self.next
        for position, batch in enumerate(batches, first):
            if position >= self.next:
                self.look(position)
            yield batch
        self.next = first

    def _pace(self, position: int) -> int:
        """On rank 0, in how many iterations the next look is, by the speed of the last ones."""
        (last, since), self._last = self._last, (position, time.monotonic())
        if position != last:
            # After a validation it goes back, and begins anew.
            likely = int(INTERVAL * (position - last) / (self._last[1] - since))
            self._stride = max(1, min(LONGEST_STRIDE, 2 * self._stride, likely))
        return self._stride
