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


def last_line(name: str, *arguments: str) -> str:
    """What an experiment that everything holds of prints last."""
    command = [sys.executable, "-W", "ignore", str(FAULTS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_of_two_processes_on_one_run_directory_one_runs_and_the_other_names_it() -> None:
    told = last_line("run_races.py", "4")
    assert told.startswith("4 races: in 4 exactly one won, the other left with 73 and named it")
    assert re.search(
        r"1 of 1 stopped holders kept the run; 1 of 1 killed ones were free at once, while 2 workers", told
    )


@pytest.mark.slow
def test_code_that_fails_is_told_and_closed_and_once_mended_the_run_goes_on_where_it_was() -> None:
    counts = json.loads(last_line("run_failures.py", *POINTS))
    assert counts["faults"] == len(POINTS)
    assert counts["do not hold"] == 0


@pytest.mark.slow
def test_storage_that_refuses_is_told_in_one_line_and_nothing_is_lost() -> None:
    counts = json.loads(last_line("run_storage.py"))
    assert counts["cases"] >= 11
    assert counts["do not hold"] == 0


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
