"""Short versions of the experiments in ``tests/faults`` that kill, stop and resume whole runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import alone_kills
import own_runners
import pytest
import run_clock
import run_kills
import run_resumes
import run_signals
import sweep_kills
from forked_runs import Zygote

# All twelve are interrupted by signals and errors in tests/stages.
FEW_RUNNERS = ("two_phases", "self_training", "k_fold", "until_metric")


def sizes(few: Any, many: Any) -> pytest.MarkDecorator:
    """Parametrize the size: a few for each change, and many before a release."""
    cases = [
        pytest.param(few, marks=pytest.mark.slow, id="few"),
        pytest.param(many, marks=pytest.mark.release, id="many"),
    ]
    return pytest.mark.parametrize("size", cases)


@sizes(1, 5)
@pytest.mark.parametrize("data", ["noisy", "text", "cache"])
def test_killed_at_random_moments_runs_end_like_one_that_was_not(
    tmp_path: Path, zygote: Zygote, data: str, size: int
) -> None:
    found, faults = run_kills.experiment(tmp_path, [zygote], size, 0, data)
    assert faults == []
    assert (found["kills"], found["unlike"]) == (size, 0)


@sizes(FEW_RUNNERS, ())
def test_runners_of_ones_own_that_are_killed_end_like_ones_that_were_not(tmp_path: Path, size: tuple[str, ...]) -> None:
    found, faults = own_runners.experiment(tmp_path, 1, 0, *size)
    assert faults == []
    number = len(size) or 12
    assert (found["runners"], found["kills"], found["unlike"]) == (number, number, 0)


@sizes(2, 4)
@pytest.mark.parametrize("program", alone_kills.PROGRAMS)
def test_killed_at_random_moments_a_fit_and_an_experiment_alone_end_like_ones_that_were_not(
    tmp_path: Path, program: str, size: int
) -> None:
    found, faults = alone_kills.kill(program, tmp_path, size, random.Random(f"{program} 0"))
    assert faults == []
    assert (found["kills"], found["unlike"]) == (size, 0)


@sizes(3, 8)
def test_stopped_by_signals_at_random_moments_runs_leave_with_the_right_code_and_go_on(
    tmp_path: Path, zygote: Zygote, size: int
) -> None:
    found, faults = run_signals.experiment(tmp_path, [zygote], size)
    assert faults == []
    assert found["signals"] >= size
    assert found["unlike"] == 0


@sizes(((7, 2), (10, 0)), ((7, 0), (7, 1), (7, 2)))
def test_resumed_in_every_way_a_run_ends_like_one_that_was_not(
    tmp_path: Path, size: tuple[tuple[int, int], ...]
) -> None:
    """The first are inside an accumulation window and at the end of an epoch."""
    found, faults = run_resumes.experiment(tmp_path, size)
    assert faults == []
    assert (found["combinations"], found["unlike"]) == (5 * len(size), 0)


@pytest.mark.slow
def test_a_clock_a_year_back_changes_nothing(tmp_path: Path) -> None:
    assert run_clock.experiment(tmp_path, 1) == (1, [])


@sizes(sweep_kills.SMALL, sweep_kills.KINDS)
@pytest.mark.parametrize("kind", sweep_kills.KINDS)
def test_killed_at_random_moments_a_sweep_ends_like_one_that_was_not(
    tmp_path: Path, kind: str, size: dict[str, list[str]]
) -> None:
    found, faults = sweep_kills.experiment(tmp_path, 1, 0, {kind: size[kind]})
    assert faults == []
    assert (found["kills"], found["unlike"]) == (1, 0)
