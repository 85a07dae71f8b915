"""A short version of the experiment that kills ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_kills

# Two processes without data workers, one of which is killed inside a save.
SEED = 94


@pytest.mark.parametrize(
    ("kills", "seed"), [pytest.param(1, SEED, marks=pytest.mark.slow), pytest.param(3, 3, marks=pytest.mark.release)]
)
def test_a_run_whose_ranks_are_killed_comes_to_what_an_unbroken_one_does(tmp_path: Path, kills: int, seed: int) -> None:
    counts, faults = rank_kills.experiment(tmp_path, kills, seed)
    assert faults == []
    assert counts["kills"] == kills
