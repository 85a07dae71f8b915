"""Saving beside the training."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from checkpoint_disks import Failing, Recorder
from checkpoint_power import models, number_of
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.storage import Buffer, Disk, Written
from pipeline.errors import StorageError


class Slow(Disk):
    """Writes once it is allowed to."""

    def __init__(self) -> None:
        self.allowed = threading.Event()

    def write(self, path: Path, parts: Iterable[Buffer]) -> Written:
        self.allowed.wait()
        return super().write(path, parts)


def save(checkpointer: Checkpointer, step: int, number: int | None = None) -> Path:
    number = step if number is None else number
    return checkpointer.save(models(number), {"iteration": step}, {"main": {"number": number}}, {"number": number})


def test_a_save_returns_before_the_disk_has_it_and_wait_when_it_has(tmp_path: Path) -> None:
    disk = Slow()
    checkpointer = Checkpointer(tmp_path, asynchronous=True, disk=disk)
    path = save(checkpointer, 1)
    assert not path.exists()
    assert checkpointer.poll() == []
    disk.allowed.set()
    checkpointer.wait()
    assert checkpointer.poll() == [path]
    assert checkpointer.verify(path) == []


def test_what_is_saved_is_the_moment_of_the_save_whatever_changes_meanwhile(tmp_path: Path) -> None:
    disk, model = Slow(), nn.Linear(2, 2)
    wanted = model.weight.detach().clone()
    training = {"moments": torch.ones(3), "steps": [1, 2], "same memory": model.weight.data.T}
    checkpointer = Checkpointer(tmp_path, asynchronous=True, disk=disk)
    checkpointer.save({"main": {"model": model}}, {"iteration": 1}, {}, training)
    with torch.no_grad():
        model.weight.zero_()
    training["moments"].zero_()  # type: ignore[attr-defined]
    training["steps"].append(3)  # type: ignore[attr-defined]
    disk.allowed.set()
    found = checkpointer.newest_valid()
    assert found
    assert found.training
    assert torch.equal(found.weights["main"]["weight"], wanted)
    assert torch.equal(found.training["same memory"], wanted.T)
    assert (found.training["moments"].tolist(), found.training["steps"]) == ([1, 1, 1], [1, 2])


def test_save_after_save_each_has_its_own_content_though_the_memory_is_used_again(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    for step in range(1, 6):
        save(checkpointer, step)
    found = [number_of(Checkpointer(tmp_path)) for _ in checkpointer.all()]
    weights = [torch.zeros(2, 2) for _ in found]
    for path, weight in zip(checkpointer.all(), weights, strict=True):
        model = nn.Linear(2, 2)
        checkpointer.load_weights(path, {"main": {"model": model}})
        weight.copy_(model.weight.detach())
    assert [int(weight[0, 0]) for weight in weights] == [1, 2, 3, 4, 5]


def test_the_memory_of_a_snapshot_is_taken_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    places = set()
    for step in range(1, 4):
        save(checkpointer, step)
        places.add(tuple(memory.data_ptr() for memory in checkpointer._buffers._memory.values()))
    checkpointer.wait()
    assert len(places) == 1


def failing() -> Failing:
    return Failing(12, lambda: OSError(28, "No space left on device"), lasting=True)


@pytest.mark.parametrize("asked", ["wait", "save", "poll", "newest"])
def test_a_failure_in_the_background_is_raised_wherever_one_asks_next(tmp_path: Path, asked: str) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True, disk=failing())
    save(checkpointer, 1)
    if checkpointer._background._thread:
        checkpointer._background._thread.join()
    actions = {"save": lambda: save(checkpointer, 2)}
    with pytest.raises(
        StorageError, match="step-000000000001: cannot be saved: No space left on device; free or repair"
    ):
        actions.get(asked, getattr(checkpointer, asked))()
    assert checkpointer.poll() == []


UNASKED = """
import sys
sys.path[:0] = {folders!r}
from test_asynchronous import failing, save
from pipeline.checkpoint.checkpointer import Checkpointer
checkpointer = Checkpointer(__import__("pathlib").Path({folder!r}), asynchronous=True, disk=failing())
save(checkpointer, 1)
if {asked}:
    try:
        checkpointer.wait()
    except Exception:
        pass
"""


@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failure_that_nobody_asks_for_is_logged_when_the_process_ends(tmp_path: Path, asked: bool) -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "faults")]
    code = UNASKED.format(folders=folders, folder=str(tmp_path / "c"), asked=asked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = "in the background: " in done.stderr and "cannot be saved: No space left on device" in done.stderr
    assert told == (not asked)


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {faults!r})
from checkpoint_power import models
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.storage import Disk

class Slow(Disk):
    def write(self, path, parts):
        time.sleep(0.2)
        return super().write(path, parts)

Checkpointer(Path("checkpoints"), asynchronous=True, disk=Slow()).save(
    models(3), {{"iteration": 3}}, {{"main": {{"number": 3}}}}, {{"number": 3}})
"""


def test_the_interpreter_ends_only_when_the_disk_has_what_was_saved() -> None:
    script = SCRIPT.format(faults=str(Path(__file__).parents[1] / "faults"))
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
    assert number_of(Checkpointer(Path("checkpoints"), disk=Recorder())) == 3
