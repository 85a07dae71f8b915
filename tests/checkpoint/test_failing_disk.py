"""A disk that fails, or a process that ends, at every operation of saving and removing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoint_disks import Failing, Recorder, Stopped
from checkpoint_power import models, number_of

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint.storage import Disk
from pipeline.errors import StorageError


def save(checkpointer: Checkpointer, step: int, number: int) -> None:
    checkpointer.save(models(number), {"iteration": step}, {"main": {"number": number}}, {"number": number})
    checkpointer.store.wait()


def prepared(folder: Path) -> None:
    """Three checkpoints, so that the next save removes one."""
    for step in range(1, 4):
        save(Checkpointer(folder, disk=Recorder()), step, step)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("three")
    prepared(folder)
    return folder


def fail(folder: Path, disk: Disk, step: int, asynchronous: bool) -> int:
    """Save number 9; the number that has been reported afterwards."""
    checkpointer = Checkpointer(folder, keep_last=2, disk=disk, asynchronous=asynchronous)
    try:
        save(checkpointer, step, 9)
    except (StorageError, Stopped):
        return 9 if checkpointer.store.poll() else 3
    return 9


def operations(three: Path, folder: Path, step: int) -> int:
    shutil.copytree(three, folder)
    disk = Recorder()
    save(Checkpointer(folder, keep_last=2, disk=disk), step, 9)
    return len(disk.operations)


def error(number: int) -> Callable[[], OSError]:
    return lambda: OSError(number, os.strerror(number))


FAULTS: dict[str, Callable[[int], Disk]] = {
    "EIO": lambda at: Failing(at, error(errno.EIO)),
    "ENOSPC half way": lambda at: Failing(at, error(errno.ENOSPC), half=True),
    "ENOSPC from there on": lambda at: Failing(at, error(errno.ENOSPC), lasting=True, half=True),
    "EROFS from there on": lambda at: Failing(at, error(errno.EROFS), lasting=True),
    "process killed": lambda at: Failing(at, Stopped, lasting=True),
    "process killed half way": lambda at: Failing(at, Stopped, lasting=True, half=True),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 3], ids=["new", "replaced"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_fails_the_newest_valid_is_the_old_or_the_new_and_never_older_than_reported(
    three: Path, tmp_path: Path, fault: str, step: int, asynchronous: bool
) -> None:
    for at in range(operations(three, tmp_path / "counted", step)):
        folder = shutil.copytree(three, tmp_path / f"{at}")
        reported = fail(folder, FAULTS[fault](at), step, asynchronous)
        found = number_of(Checkpointer(folder, disk=Recorder()))
        assert found in {3, 9}
        assert found is not None
        assert found >= reported
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("step", [4, 3], ids=["new", "replaced"])
def test_after_a_save_that_failed_the_next_one_succeeds_and_leaves_nothing_else(
    three: Path, tmp_path: Path, step: int
) -> None:
    for at in range(operations(three, tmp_path / "counted", step)):
        folder = shutil.copytree(three, tmp_path / f"{at}")
        checkpointer = Checkpointer(folder, keep_last=2, disk=Failing(at, error(errno.EIO)))
        with suppress(StorageError):
            save(checkpointer, step, 9)
        save(checkpointer, step, 9)
        assert number_of(checkpointer) == 9
        assert all(path.name.startswith("step-") for path in folder.iterdir())


def test_where_a_save_could_write_nothing_the_log_does_not_say_that_something_is_left(
    three: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    whole, folder = shutil.copytree(three, tmp_path / "whole"), shutil.copytree(three, tmp_path / "copy")
    recorder = Recorder()
    save(Checkpointer(whole, disk=recorder), 4, 9)
    first = [operation.name for operation in recorder.operations].index("mkdir")
    with pytest.raises(StorageError):
        save(Checkpointer(folder, disk=Failing(first, error(errno.EROFS), lasting=True)), 4, 9)
    assert not [line for line in log_lines if "cannot be removed" in line]


class BadFsync(Recorder):
    """Fails at one fsync of a file."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def at(self, name: str, path: Path, detail: object = None) -> bool:
        super().at(name, path, detail)
        if name == "fsync" and sum(each == "fsync" for each, _ in self.done) == self.number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return True


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_after_an_fsync_that_failed_the_attempt_is_discarded_and_no_file_is_fsynced_again(
    tmp_path: Path, number: int
) -> None:
    disk = BadFsync(number)
    with pytest.raises(StorageError, match="step-000000000001: cannot be written: Input/output error; free or repair"):
        save(Checkpointer(tmp_path / "checkpoints", disk=disk), 1, 1)
    synced = [path for name, path in disk.done if name == "fsync"]
    assert len(synced) == len(set(synced)) == number
    assert list((tmp_path / "checkpoints").iterdir()) == []
