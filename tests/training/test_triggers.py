"""When something is due."""

from __future__ import annotations

import time

import pytest

from pipeline.config.schema import Interval
from pipeline.training.triggers import NEVER, Trigger, Triggers


@pytest.mark.parametrize(("length", "start", "due"), [(3, 0, [3, 6, 9]), (3, 4, [6, 9]), (1, 8, [9, 10]), (11, 0, [])])
def test_an_interval_of_iterations_is_due_at_its_multiples(length: int, start: int, due: list[int]) -> None:
    trigger = Trigger(Interval(length, "iteration"), start)
    assert [iteration for iteration in range(start + 1, 11) if trigger.fires(iteration)] == due


def test_whoever_asks_only_when_told_to_look_misses_nothing() -> None:
    triggers = Triggers([Interval(4, "iteration"), Interval(6, "iteration")])
    looked = []
    while (iteration := triggers.next_look()) <= 20:
        assert triggers.fires(iteration)
        looked.append(iteration)
    assert looked == [4, 6, 8, 12, 16, 18, 20]


def test_an_interval_of_epochs_is_due_after_them_and_never_at_an_iteration() -> None:
    trigger = Trigger(Interval(2, "epoch"))
    assert [epochs for epochs in range(1, 7) if trigger.fires_after(epochs)] == [2, 4, 6]
    assert trigger.next_look() == NEVER
    assert not trigger.fires(2)


@pytest.mark.parametrize("unit", ["iteration", "second", "minute"])
def test_no_other_interval_is_due_after_an_epoch(unit: str) -> None:
    assert not Triggers([Interval(1, unit)]).fires_after(1)


def test_an_interval_of_seconds_is_due_once_after_them() -> None:
    trigger = Trigger(Interval(1, "second"))
    assert not trigger.fires(1)
    time.sleep(1.01)
    assert trigger.fires(2)
    assert not trigger.fires(3)


def test_the_clock_is_looked_at_the_more_rarely_the_faster_iterations_are() -> None:
    fast, slow = Trigger(Interval(100, "second")), Trigger(Interval(1, "second"))
    fast.fires(1)
    time.sleep(0.3)
    slow.fires(1)
    assert fast.next_look() == 1 + 100
    assert slow.next_look() == 1 + 1


def test_a_minute_is_sixty_seconds() -> None:
    assert Trigger(Interval(2, "minute")).seconds == 120


def test_without_intervals_nothing_is_ever_due() -> None:
    triggers = Triggers([])
    assert triggers.next_look() == NEVER
    assert not triggers.fires(1)
    assert not triggers.fires_after(1)


def test_each_of_several_intervals_keeps_its_own_count() -> None:
    triggers = Triggers([Interval(2, "iteration"), Interval(3, "iteration"), Interval(5, "epoch")])
    assert [iteration for iteration in range(1, 10) if triggers.fires(iteration)] == [2, 3, 4, 6, 8, 9]
    assert [epochs for epochs in range(1, 11) if triggers.fires_after(epochs)] == [5, 10]
