"""Power lost at every moment of saving; the long version is ``tests/faults/checkpoint_power.py``."""

from __future__ import annotations

from pathlib import Path

import checkpoint_power as power
import pytest


def test_after_power_is_lost_at_any_moment_nothing_reported_is_lost_and_nothing_wrong_is_loaded(tmp_path: Path) -> None:
    result, _ = power.all_states([(stop,) for stop in range(-1, 50, 3)], tmp_path)
    assert result.states > result.distinct > 100
    assert (result.wrong, result.lost, result.incomplete, result.left) == (0, 0, 0, 0)


@pytest.fixture
def record(tmp_path: Path) -> power.Record:
    (tmp_path / "whole").mkdir()
    return power.scenario(tmp_path / "whole", [-1], power.Stopping)


@pytest.mark.slow
def test_leaving_out_any_fsync_rename_or_hash_is_caught(record: power.Record, tmp_path: Path) -> None:
    count, left = power.survivors(record, [(-1,), (1,), (14,), (38,), (40,)], tmp_path)
    assert count > 50
    assert left == []
