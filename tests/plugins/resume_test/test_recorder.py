"""The counters that kill the process, and which files are volatile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from pipeline_plugins.resume_test.recorder import Counters, volatile_patterns
from torch import nn

from pipeline.brain.checkpointer import Checkpointer
from pipeline.check.checker import check_or_raise
from pipeline.errors import PluginError


def status(folder: Path, iteration: int) -> int:
    """How a process ends that counts so far while it is saving a checkpoint."""
    # Made here: torch's threads are not there in a process that was forked.
    models, training = {"p": {"model": nn.Linear(9, 9)}}, {"large": torch.zeros(10**6)}
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    checkpointer = Checkpointer(folder, asynchronous=True)
    checkpointer.save(models, {"iteration": 1}, {}, training)
    Counters({}, 5, checkpointer)["iteration"] = iteration
    os._exit(0)


@pytest.mark.parametrize(("iteration", "expected"), [(4, 0), (5, -signal.SIGKILL), (6, 0)])
def test_the_process_is_killed_as_soon_as_the_iteration_is_over(tmp_path: Path, iteration: int, expected: int) -> None:
    assert status(tmp_path, iteration) == expected


def test_a_checkpoint_that_is_being_saved_is_there_after_the_kill(tmp_path: Path) -> None:
    assert status(tmp_path / "checkpoints", 5) == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000000001"]


def test_counters_that_are_restored_kill_nothing(tmp_path: Path) -> None:
    counters = Counters({"iteration": 0}, 5, Checkpointer(tmp_path))
    counters.update(iteration=5)
    counters["update"] = 5
    assert counters == {"iteration": 5, "update": 5}


VOLATILE = """
from pipeline import hookimpl, stages
class Plugin:
    volatile = {volatile}
    @hookimpl
    def before_epoch(self): pass
class Terminal(stages.Terminal):
    volatile = ["end.txt"]
"""


def patterns(linear: Path, volatile: str) -> dict[str, list[str]]:
    """The volatile files of a config with a plugin and a terminal stage that name some."""
    (linear.parent / "own.py").write_text(VOLATILE.replace("{volatile}", volatile), encoding="utf-8")
    terminal = "runner.train_runner.terminal_class_path={workspace}/own.py"
    return volatile_patterns(check_or_raise(linear, ['plugins=["{workspace}/own.py"]', terminal]), "train_runner")


def test_plugins_and_stages_name_their_volatile_files(linear: Path) -> None:
    expected = {"MetricLog": ["timing.jsonl", "*_timing.jsonl"], "Plugin": ["a.png", "b/*"], "Terminal": ["end.txt"]}
    assert patterns(linear, "('a.png', 'b/*')") == expected


@pytest.mark.parametrize("volatile", ["'a.png'", "('/tmp/a.png',)", "(3,)", "('',)"])
def test_volatile_files_are_names_relative_to_the_runners_folder(linear: Path, volatile: str) -> None:
    what = (
        f"own:Plugin: volatile is {volatile}; write a tuple of file names or patterns relative to the runner's folder"
    )
    with pytest.raises(PluginError) as error:
        patterns(linear, volatile)
    assert what in str(error.value)
