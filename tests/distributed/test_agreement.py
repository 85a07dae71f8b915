"""What all processes do after one and the same iteration."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from pipeline.context import Context
from pipeline.distributed.agreement import INTERVAL, Agreement
from pipeline.distributed.world import current_world
from pipeline.signals import SHUTDOWN, StoppedError, exit_requested
from tests.distributed.ranks import Ranks

LIMIT = 200_000


class Steps:
    """A training without a model, by iteration; ``pause``: seconds of a step by rank."""

    def __init__(self, *pauses: float) -> None:
        self.world = current_world()
        self.context = Context(train_state={"iteration": 0}, is_exit=False)
        self.agreement = Agreement(self.world, self.context)
        self.pause = pauses[self.world.rank % len(pauses)] if pauses else 0.0
        self.looks = 0

    def __iter__(self) -> Iterator[int]:
        """The iterations, up to the one after which the processes agree to end."""
        counters = self.context.peek("train_state")
        while counters["iteration"] < LIMIT:
            time.sleep(self.pause)
            counters["iteration"] += 1
            yield counters["iteration"]
            if counters["iteration"] >= self.agreement.next:
                self.looks += 1
                self.agreement.look(counters["iteration"])
                if self.context.stop_reason is not None or self.context.requests or exit_requested(self.context):
                    return


@contextmanager
def later(seconds: float, call: Any) -> Iterator[None]:
    timer = threading.Timer(seconds, call)
    timer.start()
    yield
    timer.join()


def stop_at_random(seed: int, trials: int) -> list[tuple[int, str | None]]:
    """Of each trial: the iteration after which this process ended, and why."""
    chance, ends = random.Random(seed), []
    for _ in range(trials):
        steps, who, when = Steps(0.0002, 0.0003, 0.0004), chance.randrange(3), chance.uniform(0.0, 0.05)
        stop = steps.context.stop if current_world().rank == who else str
        with steps.agreement.ruling(), later(when, lambda stop=stop, who=who: stop(f"rank {who}")):
            last = list(steps)[-1]
        ends.append((last, steps.context.stop_reason))
    return ends


def test_all_end_after_the_iteration_that_was_agreed_on(three_ranks: Ranks) -> None:
    first, *others = three_ranks(stop_at_random, 0, 6)
    assert all(own == first for own in others)
    assert {why for _, why in first} == {"rank 0", "rank 1", "rank 2"}


@pytest.mark.slow
def test_all_end_after_the_iteration_that_was_agreed_on_often(three_ranks: Ranks) -> None:
    first, *others = three_ranks(stop_at_random, 1, 25)
    assert all(own == first for own in others)
    assert len({last for last, _ in first}) > 5


def ask(rank: int, what: str) -> tuple[int, Any]:
    steps = Steps(0.001)
    context = steps.context
    with steps.agreement.ruling():
        for iteration in steps:
            if iteration == 10 and current_world().rank == rank:
                if what == "exit":
                    context["is_exit"] = True
                else:
                    context.request("checkpoint")
                # Nobody acts on his own wish.
                assert not exit_requested(context)
                assert not context.requests
    return steps.agreement.world.rank, [context.peek("train_state")["iteration"], context["is_exit"], context.requests]


@pytest.mark.parametrize("rank", [0, 2])
def test_is_exit_on_one_rank_counts_on_all(rank: int, three_ranks: Ranks) -> None:
    (_, first), *others = three_ranks(ask, rank, "exit")
    assert first[1]
    assert all(own == first for _, own in others)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_on_one_rank_counts_on_all(rank: int, three_ranks: Ranks) -> None:
    (_, first), *others = three_ranks(ask, rank, "checkpoint")
    assert first[1:] == [False, {"checkpoint"}]
    assert all(own == first for _, own in others)


def hear(senders: dict[int, int]) -> tuple[int, Any, Any]:
    steps = Steps(0.001)
    with suppress(StoppedError, KeyboardInterrupt), SHUTDOWN.handling(), steps.agreement.ruling():
        with SHUTDOWN.defer(lambda: None):
            for iteration in steps:
                if iteration == 10 and (number := senders.get(current_world().rank)):
                    os.kill(os.getpid(), number)
                    os.kill(os.getpid(), number)
            # The deadline counts on all of them.
            time.sleep(0.05)
            requested, arrived = SHUTDOWN.requested, SHUTDOWN.arrived
        SHUTDOWN.raise_if_requested()
    return steps.context.peek("train_state")["iteration"], requested, arrived


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize("senders", [{0: TERM}, {1: TERM}, {0: TERM, 1: TERM, 2: TERM}, {2: signal.SIGINT}])
def test_a_signal_counts_on_all(senders: dict[int, int], three_ranks: Ranks) -> None:
    first, *others = three_ranks(hear, senders)
    assert all(own == first for own in others)
    assert first[1:] == (number := next(iter(senders.values())), number)


def test_of_two_signals_one_counts_on_all(three_ranks: Ranks) -> None:
    ends = three_ranks(hear, {1: TERM, 2: USR1})
    assert len({end[:2] for end in ends}) == 1


def answer(rank: int) -> list[Any]:
    steps = Steps()
    with steps.agreement.ruling():
        return steps.agreement.look(1, current_world().rank == rank, current_world().rank)


def test_rank_0_answers_for_all(three_ranks: Ranks) -> None:
    assert three_ranks(answer, 0) == [[True, 0]] * 3
    assert three_ranks(answer, 1) == [[False, 0]] * 3


def ask_before(why: list[str | None]) -> tuple[str | None, bool]:
    steps = Steps()
    if reason := why[current_world().rank]:
        steps.context.stop(reason)
    with steps.agreement.ruling():
        return steps.context.stop_reason, steps.context.ask is not None


def test_what_was_asked_before_counts_on_all_from_the_beginning(three_ranks: Ranks) -> None:
    assert three_ranks(ask_before, [None, None, "no data"]) == [("no data", True)] * 3
    # Rank 0's is the one that is told.
    assert three_ranks(ask_before, [None, "first", "second"])[0] == ("first", True)


def count_looks(pause: float) -> tuple[int, int, float]:
    """How many looks there are in how many iterations, and seconds."""
    steps, began = Steps(pause), time.monotonic()
    with steps.agreement.ruling(), later(1.0, lambda: steps.context.stop("enough")):
        last = list(steps)[-1]
    return steps.looks, last, time.monotonic() - began


def test_looks_are_a_tenth_of_a_second_apart(three_ranks: Ranks) -> None:
    (looks, iterations, seconds), *_ = three_ranks(count_looks, 0.005)
    # The first ones are nearer to each other; a busy machine moves them further apart.
    assert 2 < looks < 5 + 1.5 * seconds / INTERVAL
    assert iterations > 2 * looks


def look_often(looks: int) -> int:
    steps = Steps()
    store, before = steps.world.store, steps.world.store.num_keys()
    with steps.agreement.ruling():
        for _ in range(looks):
            steps.context.request("checkpoint")
            steps.agreement.look(1)
        steps.world.all_gather(None)
        kept = store.num_keys() - before
        # Before this process adds what it says next.
        steps.world.all_gather(None)
    return kept


def test_what_all_have_read_is_deleted(three_ranks: Ranks) -> None:
    assert max(three_ranks(look_often, 500)) < 20


def seen() -> list[int]:
    steps = Steps()
    steps.context.peek("train_state")["iteration"] = 40 + steps.world.rank
    with steps.agreement.ruling():
        steps.agreement.look(1)
    steps.world.all_gather(None)
    return [steps.world.get(f"seen/{rank}") for rank in range(3)]


def test_the_store_has_where_each_rank_was_seen(three_ranks: Ranks) -> None:
    assert three_ranks(seen) == [[40, 41, 42]] * 3


def validate(rank: int) -> tuple[int, int]:
    steps, done = Steps(), 0
    with steps.agreement.ruling(), SHUTDOWN.handling(), SHUTDOWN.defer(lambda: None), suppress(StoppedError):
        for number in steps.agreement.watched(range(LIMIT)):
            SHUTDOWN.raise_if_requested()
            done = number
            time.sleep(0.001)
            if number == 10 and current_world().rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)
    return done, steps.agreement.next


@pytest.mark.parametrize("rank", [0, 1])
def test_a_validation_ends_at_one_batch(rank: int, three_ranks: Ranks) -> None:
    first, *others = three_ranks(validate, rank)
    assert all(own == first for own in others)
    assert 10 <= first[0] < LIMIT - 1


def time_looks(count: int) -> float:
    steps = Steps()
    with steps.agreement.ruling():
        began = time.perf_counter()
        for _ in range(count):
            steps.agreement.look(1)
        return (time.perf_counter() - began) / count


def test_a_look_takes_less_than_five_milliseconds(three_ranks: Ranks) -> None:
    assert max(three_ranks(time_looks, 200)) < 0.005
