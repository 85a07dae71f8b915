"""A short version of the experiment that kills ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_kills


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_comes_to_what_an_unbroken_one_does(tmp_path: Path) -> None:
    counts, faults = rank_kills.experiment(tmp_path, kills=3, seed=3)
    assert faults == []
    assert counts["kills"] == 3
