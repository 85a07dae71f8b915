"""The lock of a run directory: one holder, who is named, whatever state it is in."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ExitCode, LockedError, StorageError
from pipeline.run.directory import is_running, lock_held

HOLDER = """
import sys
from pathlib import Path
from pipeline.run.directory import lock_held
with lock_held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(lock: Path) -> subprocess.Popen[str]:
    """Another process that holds a lock."""
    command = [sys.executable, "-c", HOLDER, str(lock)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("stopped", [False, True])
def test_a_holder_is_named_also_when_it_is_stopped(stopped: bool) -> None:
    with holder(Path("lock")) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
        named = rf"{Path.cwd()}: is in use by host \S+, pid {process.pid}, since 20\S+; wait for it, or stop it"
        with pytest.raises(LockedError, match=named) as caught, lock_held(Path("lock").absolute()):
            pass
        process.kill()
    assert caught.value.exit_code == ExitCode.LOCKED == 73


def test_the_lock_of_a_killed_process_is_free() -> None:
    with holder(Path("lock")) as process:
        process.kill()
    with lock_held(Path("lock")):
        assert f"pid {os.getpid()}, since 20" in Path("lock").read_text()


def test_a_lock_whose_holder_has_not_written_yet_is_in_use_all_the_same() -> None:
    with open("lock", "w", encoding="utf-8") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="is in use by another process; wait for it"), lock_held(Path("lock")):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_holder(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = (
        rf"lock: cannot be locked: {os.strerror(number)} \({errno.errorcode[number]}\); set output_dir to a file system"
    )
    with pytest.raises(StorageError, match=message), lock_held(Path("lock")):
        pass


def test_a_lock_that_cannot_be_made_is_a_storage_error() -> None:
    with (
        pytest.raises(StorageError, match=r"gone/lock: cannot be written: No such file or directory"),
        lock_held(Path("gone/lock")),
    ):
        pass


def test_nothing_is_written_through_a_link() -> None:
    Path("precious").write_text("all I have")
    Path("lock").symlink_to("precious")
    with pytest.raises(StorageError, match="lock: cannot be written"), lock_held(Path("lock")):
        pass
    assert Path("precious").read_text() == "all I have"


def test_a_lock_knows_when_its_file_is_gone_or_another() -> None:
    with lock_held(Path("lock")) as lock:
        assert is_running(lock, Path("lock"))
        Path("lock").unlink()
        assert not is_running(lock, Path("lock"))
        Path("lock").touch()
        assert not is_running(lock, Path("lock"))
