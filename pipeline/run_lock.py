"""The lock of a run directory: one process at a time, and free when that process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from pipeline.errors import LockedError, StorageError
from pipeline.storage import no_link, storing

_held: set[FileIO] = set()
"""The locks of this process."""


@contextmanager
def held(path: Path) -> Iterator[FileIO]:
    """Hold the lock that a file is, in which stands who does.

    Raises:
        LockedError: another process holds it.
        StorageError: the file cannot be written, or is on a file system without locks.
    """
    with ExitStack() as stack:
        with storing(path):
            # No buffer: what was refused would be tried again when it is closed.
            lock = stack.enter_context(FileIO(path, "a+", opener=no_link))
        _take(lock, path)
        _held.add(lock)
        try:
            with storing(path):
                lock.truncate(0)
                lock.write(f"host {socket.gethostname()}, pid {os.getpid()}, since {now()}\n".encode())
            yield lock
        finally:
            _held.discard(lock)


def now() -> str:
    """The time, as it is written into files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_at(lock: FileIO, path: Path) -> bool:
    """Whether a lock that is held still is the file at its path."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except OSError:
        return False


def _take(lock: FileIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockedError(f"{path.parent}: is in use by {_holder(lock)}; wait for it, or stop it") from error
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "no number")
        raise StorageError(
            f"{path}: cannot be locked: {error.strerror} ({name}); set output_dir to a file system that has locks"
        ) from error


def _holder(lock: FileIO) -> str:
    """Who holds it: that is written a moment after it was taken, and till then one that was killed may stand there."""
    for _ in range(50):
        lock.seek(0)
        holder = (lock.read(1000) or b"").decode(errors="replace").strip()
        if holder and not _is_over(holder):
            return holder
        time.sleep(0.01)
    return "another process"


def _is_over(holder: str) -> bool:
    """Whether what stands in a lock names a process of this host that has ended."""
    found = re.fullmatch(r"host (\S+), pid (\d+), since \S+", holder)
    if not found or found[1] != socket.gethostname():
        return False
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        # There is one, of somebody else.
        return False
    return False


def _let_go() -> None:
    """Close the locks in a process that was forked, such as a worker of a loader, which may outlive this one."""
    for lock in _held:
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
