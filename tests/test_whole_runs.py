"""Short versions of the experiments in ``tests/faults`` that kill, stop and resume whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAULTS = Path(__file__).parent / "faults"
pytestmark = pytest.mark.slow


def counts(script: str, *arguments: object) -> dict[str, Any]:
    """What an experiment printed last; it has found no fault."""
    command = [sys.executable, "-W", "ignore", str(FAULTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("data", ["noisy", "text", "cache"])
def test_killed_at_random_moments_runs_end_like_one_that_was_not(data: str) -> None:
    found = counts("run_kills.py", 5, 0, data)
    assert (found["kills"], found["unlike"]) == (5, 0)


def test_runners_of_ones_own_that_are_killed_end_like_ones_that_were_not() -> None:
    found = counts("own_runners.py", 1)
    assert (found["runners"], found["kills"], found["unlike"]) == (12, 12, 0)


def test_killed_at_random_moments_a_fit_and_an_experiment_alone_end_like_ones_that_were_not() -> None:
    found = counts("alone_kills.py", 4)
    assert [(found[name]["kills"], found[name]["unlike"]) for name in ("fit", "experiment")] == [(4, 0), (4, 0)]


def test_stopped_by_signals_at_random_moments_runs_leave_with_the_right_code_and_go_on() -> None:
    found = counts("run_signals.py", 8)
    assert found["signals"] >= 8
    assert found["unlike"] == 0


def test_resumed_in_every_way_a_run_ends_like_one_that_was_not() -> None:
    found = counts("run_resumes.py", 7)
    assert (found["combinations"], found["unlike"]) == (15, 0)


def test_a_clock_a_year_back_changes_nothing() -> None:
    found = counts("run_clock.py", 1)
    assert (found["runs"], found["unlike"]) == (1, 0)


@pytest.mark.parametrize("kind", ["grid", "tpe"])
def test_killed_at_random_moments_a_sweep_ends_like_one_that_was_not(kind: str) -> None:
    found = counts("sweep_kills.py", 1, 0, kind)
    assert (found["kills"], found["unlike"]) == (1, 0)
