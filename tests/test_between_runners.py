"""Signals that come where no stage runs, and runs that were killed at their very beginning or end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoint.storage import write
from pipeline.run.directory import RunDirectory

AT_IMPORT = """
import os, signal
from pipeline import hookimpl
os.kill(os.getpid(), signal.{name})

class Plugin:
    @hookimpl
    def before_epoch(self):
        pass
"""
AT_FORK = """
import os, signal
from pipeline import hookimpl
asked = [True]

def ask():
    if not asked:
        asked.append(True)  # Before the signal, which may end this function.
        os.killpg(0, signal.{name})

os.register_at_fork(after_in_parent=ask)

class Plugin:
    @hookimpl
    def before_validation(self):
        asked.clear()
"""


Process = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_before_the_first_stage_ends_the_run_with_its_code(
    process: Process, linear: Path, name: str, code: int
) -> None:
    (linear.parent / "ask.py").write_text(AT_IMPORT.format(name=name), encoding="utf-8")
    done = process("run", linear, 'plugins=["{workspace}/ask.py"]')
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_to_the_group_while_workers_are_started_is_the_runs_to_heed(
    process: Process, linear: Path, name: str, code: int
) -> None:
    (linear.parent / "ask.py").write_text(AT_FORK.format(name=name), encoding="utf-8")
    workers = "dataset.train_data.num_workers=2"
    done = process("run", linear, 'plugins=["{workspace}/ask.py"]', workers)
    assert done.returncode == code, done.stderr
    assert json.loads(Path("runs/workspace/latest/status.json").read_bytes())["exit_code"] == code


def test_a_run_that_was_killed_right_before_it_said_that_it_is_done_says_so_when_resumed(
    process: Process, linear: Path
) -> None:
    assert process("run", linear).returncode == 0
    status = Path("runs/workspace/latest/status.json")
    done = status.read_bytes()
    status.write_bytes(done.replace(b'"done"', b'"running"'))
    assert process("run", linear, "--resume", "auto").returncode == 0
    assert status.read_bytes() == done


def test_a_run_that_was_killed_before_latest_named_it_is_named_when_it_goes_on(
    tmp_path: Path,
) -> None:
    path = RunDirectory.new(tmp_path, "job").path
    (tmp_path / "job" / "latest").rename(tmp_path / "job" / f".latest-{path.name}")
    assert RunDirectory.newest(tmp_path, "job")
    assert sorted(os.listdir(tmp_path / "job")) == [path.name, "latest"]
    assert (tmp_path / "job" / "latest").resolve() == path


def test_nothing_of_a_file_stays_whose_writing_a_signal_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "status.json", "{}")
    assert list(tmp_path.glob(".*")) == []
