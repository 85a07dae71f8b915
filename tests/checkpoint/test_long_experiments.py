"""Short versions of the experiments in ``tests/faults`` that need processes, strace or a small disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import checkpoint_kills as kills
import checkpoint_syscalls as syscalls
import pytest

FAULTS = Path(__file__).parents[1] / "faults"
pytestmark = pytest.mark.slow


def test_whatever_a_process_reported_before_it_was_killed_is_there(tmp_path: Path) -> None:
    counts = kills.experiment(tmp_path / "checkpoints", kills=5)
    assert counts["kills"] == 5
    faults = ("wrong", "lost", "set aside", "left", "incomplete")
    assert [counts[what] for what in faults] == [0] * len(faults)


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_whatever_system_call_fails_or_is_the_last_one_nothing_is_lost(tmp_path: Path) -> None:
    counts = syscalls.experiment(tmp_path, most=30)
    assert counts["runs"] >= 30
    assert counts["ended with -9"] > 0 < counts["ended with 74"]
    assert [counts[what] for what in ("wrong", "lost", "left", "traceback")] == [0] * 4


def run(name: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-W", "ignore", FAULTS / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_hostile_and_absurd_files_are_refused_and_run_no_code_ours_within_little_memory() -> None:
    found = run("checkpoint_malicious.py")
    assert found["cases"] == found["refused"]
    assert found["code ran"] == 0
    assert found["largest"]["MiB"] < 200  # type: ignore[index]


def test_on_a_full_disk_the_save_fails_the_last_one_stays_and_it_goes_on_when_there_is_space() -> None:
    found = run("checkpoint_full_disk.py")
    assert found["refused"] == found["tried"] != 0
    assert found["lost"] == found["left"] == 0
