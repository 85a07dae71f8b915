"""Short versions of the experiments in ``tests/faults`` on whole runs whose code, storage or neighbours fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import failing_workspace
import pytest
import run_failures
import run_races

FAULTS = Path(__file__).parent / "faults"

POINTS = (
    "Startup.startup at first raise",
    "Plugin.before_batch raise",
    "Data.__getitem__ in a worker raise",
    "collate raise",
    "Net.forward in validation raise",
    "Own_updater.update raise",
    "Own_schedule.update_lr nan",
    "Own.compute_objectives None",
    "Startup writes train_state None",
    "Network.build_network at last hang",
    "Net.forward hang in C",
)


FEW_STORAGES = (
    "full before the run",
    "full before startup",
    "full within a save",
    "full at a number",
    "full at the last save",
    "full for a while, warn",
    "full when resumed",
    "read-only at a save",
    "files may not grow, from the second save on",
    "run directory renamed",
    "a file in the place of the checkpoints",
    "output_dir is a file",
    "output_dir belongs to somebody else",
)


@pytest.mark.parametrize("races", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.release)])
def test_of_two_processes_on_one_run_directory_one_runs_and_the_other_names_it(
    races: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_races.main(races)
    told = capsys.readouterr().out
    assert code == 0, told
    assert f"{races} races: in {races} exactly one won, the other left with 73 and named it" in told
    assert "1 of 1 stopped holders kept the run; 1 of 1 killed ones were free at once, while 2 workers" in told


@pytest.mark.slow
def test_code_that_fails_is_told_and_closed_and_once_mended_the_run_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAULT", run_failures.NONE)
    run_failures.main(list(POINTS))
    told = capsys.readouterr().out
    counts = json.loads(told.splitlines()[-1])
    assert counts["faults"] == len(POINTS)
    assert counts["do not hold"] == 0, told


@pytest.mark.parametrize(
    "names", [pytest.param(FEW_STORAGES, marks=pytest.mark.slow), pytest.param((), marks=pytest.mark.release)]
)
def test_storage_that_refuses_is_told_in_one_line_and_nothing_is_lost(names: tuple[str, ...]) -> None:
    """It is a program of its own, which mounts a disk."""
    command = [sys.executable, "-W", "ignore", str(FAULTS / "run_storage.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    # Where no disk may be mounted, and for others than root, there are fewer.
    assert counts["cases"] >= (4 if names else 11)
    assert counts["do not hold"] == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("loss|raise|5", 1, r"runner \(stages\.Runner, \S+/config\.yaml:17\) failed in run \(stages\.py:\d+\): ValueError: fault in loss \(phase\.net\)\nTraceback"),
        ("collate|None|5", 1, r"phase\.net: a batch is None with no tensor to count samples by; define count_samples"),
        ("import.stages|raise|0", 2, r"config\.yaml:14: runner\.train\.instance_class_path: .+: fault in import\.stages; mend the file"),
    ],
)  # fmt: skip
def test_the_command_itself_says_so_and_leaves_with_the_code(
    process: Callable[..., subprocess.CompletedProcess[str]], fault: str, code: int, told: str
) -> None:
    config = failing_workspace.write(Path.cwd())
    done = process("run", config, FAULT=fault)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.search(told, done.stderr), done.stderr
