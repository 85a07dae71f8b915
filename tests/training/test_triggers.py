"""When something is due."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pipeline.config.schema import Interval, RunnerSchema
from pipeline.training.triggers import NEVER, Schedule, Trigger


@pytest.mark.parametrize(("length", "start", "due"), [(3, 0, [3, 6, 9]), (3, 4, [6, 9]), (1, 8, [9, 10]), (11, 0, [])])
def test_an_interval_of_iterations_is_due_at_its_multiples(length: int, start: int, due: list[int]) -> None:
    trigger = Trigger([Interval(length, "iteration")], start)
    assert [iteration for iteration in range(start + 1, 11) if trigger.fires(iteration)] == due


def test_whoever_asks_only_when_told_to_look_misses_nothing() -> None:
    triggers = Trigger([Interval(4, "iteration"), Interval(6, "iteration")])
    looked = []
    while (iteration := triggers.next_check()) <= 20:
        assert triggers.fires(iteration)
        looked.append(iteration)
    assert looked == [4, 6, 8, 12, 16, 18, 20]


def test_an_interval_of_epochs_is_due_after_them_and_never_at_an_iteration() -> None:
    trigger = Trigger([Interval(2, "epoch")])
    assert [epochs for epochs in range(1, 7) if trigger.fires_after(epochs)] == [2, 4, 6]
    assert trigger.next_check() == NEVER
    assert not trigger.fires(2)


@pytest.mark.parametrize("unit", ["iteration", "second", "minute"])
def test_no_other_interval_is_due_after_an_epoch(unit: str) -> None:
    assert not Trigger([Interval(1, unit)]).fires_after(1)


def test_an_interval_of_seconds_is_due_once_after_them() -> None:
    trigger = Trigger([Interval(1, "second")])
    assert not trigger.fires(1)
    time.sleep(1.01)
    assert trigger.fires(2)
    assert not trigger.fires(3)


def test_the_clock_is_looked_at_the_more_rarely_the_faster_iterations_are() -> None:
    fast, slow = Trigger([Interval(100, "second")]), Trigger([Interval(1, "second")])
    fast.fires(1)
    time.sleep(0.3)
    slow.fires(1)
    assert fast.next_check() == 1 + 100
    assert slow.next_check() == 1 + 1


def test_a_minute_is_sixty_seconds() -> None:
    assert Trigger([Interval(2, "minute")]).clocks[0].seconds == 120


def test_without_intervals_nothing_is_ever_due() -> None:
    triggers = Trigger([])
    assert triggers.next_check() == NEVER
    assert not triggers.fires(1)
    assert not triggers.fires_after(1)


def test_each_of_several_intervals_keeps_its_own_count() -> None:
    triggers = Trigger([Interval(2, "iteration"), Interval(3, "iteration"), Interval(5, "epoch")])
    assert [iteration for iteration in range(1, 10) if triggers.fires(iteration)] == [2, 3, 4, 6, 8, 9]
    assert [epochs for epochs in range(1, 11) if triggers.fires_after(epochs)] == [5, 10]


def agenda(iteration: int = 0, **runner: Any) -> Schedule:
    """Of a runner that has nothing to do but what it is told."""
    idle = {"print_interval": None, "valid_interval": None, "save_interval": None}
    return Schedule.of_runner(
        RunnerSchema.model_validate({"name": "train", "class": "train", **idle, **runner}), iteration
    )


def looks(what: Schedule, last: int, update_every: int = 1) -> dict[int, tuple[bool, ...]]:
    """Iteration -> what is due there, for those at which it asks to be looked at."""
    found, state = {}, {"iteration": 0, "update": 0, "epoch": 0}
    while (iteration := what.next_check(state)) <= last:
        state |= {"iteration": iteration, "update": iteration // update_every}
        found[iteration] = (*what.due(iteration), what.over(state))
        if what.over(state):
            break
    return found


def test_it_is_looked_at_only_where_something_is_due() -> None:
    intervals = {"print_interval": 4, "valid_interval": 6, "save_interval": [5, 12]}
    found = looks(agenda(**intervals, save_inference_interval="7 iteration"), 12)
    printing, validating, saving, exporting = [[at for at, due in found.items() if due[index]] for index in range(4)]
    assert list(found) == [4, 5, 6, 7, 8, 10, 12]
    assert (printing, validating, saving, exporting) == ([4, 8, 12], [6, 12], [5, 10, 12], [7])


def test_with_nothing_to_do_it_is_never_looked_at() -> None:
    assert agenda().next_check({"iteration": 5, "update": 5}) >= NEVER


def test_max_steps_ends_training_at_that_iteration() -> None:
    assert looks(agenda(max_steps=7), 100) == {7: (False, False, False, False, True)}


@pytest.mark.parametrize("update_every", [1, 3])
def test_a_limit_of_updates_ends_training_with_the_last_of_them_and_is_looked_for_ever_more_closely(
    update_every: int,
) -> None:
    found = looks(agenda(optimizer_step_limit=4), 100, update_every)
    assert [at for at, due in found.items() if due[-1]] == [4 * update_every]
    assert len(found) <= 2 * update_every


def test_intervals_of_iterations_go_on_where_training_went_on() -> None:
    assert agenda(iteration=10, print_interval=4).next_check({"iteration": 10, "update": 0}) == 12


def test_epochs_and_minutes_are_no_iterations() -> None:
    found = agenda(valid_interval="2 epoch", save_interval="3 epoch")
    assert found.next_check({"iteration": 0, "update": 0}) >= NEVER
    assert [epochs for epochs in range(1, 7) if found.validating.fires_after(epochs)] == [2, 4, 6]
    assert [epochs for epochs in range(1, 7) if found.saving.fires_after(epochs)] == [3, 6]
