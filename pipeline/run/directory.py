"""The run directory: its lock, its ``status.json``, and which runners are done."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.checkpoint import layout, storage
from pipeline.checkpoint.storage import no_link, storing
from pipeline.errors import CheckpointError, ConfigError, LockedError, StorageError

# Those that this process holds.
_locks: set[FileIO] = set()


@contextmanager
def lock_held(path: Path) -> Iterator[FileIO]:
    """Hold the lock of a file, which names its holder.

    Raises:
        LockedError: another process holds it.
        StorageError: the file cannot be written, or is on a file system without locks.
    """
    with ExitStack() as stack:
        with storing(path):
            # No buffer: what was refused would be tried again when it is closed.
            lock = stack.enter_context(FileIO(path, "a+", opener=no_link))
        _acquire(lock, path)
        _locks.add(lock)
        try:
            with storing(path):
                lock.truncate(0)
                lock.write(f"host {socket.gethostname()}, pid {os.getpid()}, since {now()}\n".encode())
            yield lock
        finally:
            _locks.discard(lock)


def now() -> str:
    """The current time, as text for files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_at(lock: FileIO, path: Path) -> bool:
    """Whether the file of a lock is still at its path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    return False


def _acquire(lock: FileIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockedError(f"{path.parent}: is in use by {_holder(lock)}; wait for it, or stop it") from error
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "no number")
        what = f"{path}: cannot be locked: {error.strerror} ({name})"
        raise StorageError(f"{what}; set output_dir to a file system that has locks") from error


def _holder(lock: FileIO) -> str:
    """The holder, who writes its name a moment after it has the lock: till then, the name may be of one that was killed."""
    for _ in range(50):
        lock.seek(0)
        holder = (lock.read(1000) or b"").decode(errors="replace").strip()
        if holder and not has_ended(holder):
            return holder
        time.sleep(0.01)
    return "another process"


def has_ended(holder: str) -> bool:
    """Whether the holder that a lock names is a process of this host that has ended."""
    match = re.fullmatch(r"host (\S+), pid (\d+), since \S+", holder)
    if not match or match[1] != socket.gethostname():
        return False
    try:
        os.kill(int(match[2]), 0)
    except OSError as error:
        # A process of another user raises PermissionError.
        return isinstance(error, ProcessLookupError)
    return False


def _close_in_child() -> None:
    """A process that was forked, such as a worker of a loader, may outlive this one, and would hold its locks."""
    for lock in _locks:
        lock.close()
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


# Seconds to wait for shared storage. It may show a lock later than another host has taken it.
PATIENCE = 5.0

STAMP = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")

# By one of these, and its lock, a run directory is known: one may be damaged.
_FILES = ("config.yaml", "command.txt", "environment.json", "status.json")

# What a run has left that was interrupted before it had written the first of them.
_LEFT = {"lock", "log.txt", ".command.txt.tmp"}

# In the folder of a config's runs, for those of its sweeps: each has a folder with a run directory for each trial.
SWEEPS = "sweeps"

# Names the command that made the run for a purpose of its own; there is none where a user did.
MADE_BY = "made_by.txt"


# In the folder of a runner that has been through all its stages: the counters with which it ended, and why it was stopped.
DONE = "done.json"


class RunDirectory:
    """The folder of one run.

    Attributes:
        path: absolute; ``<output_dir>/<config name>/<UTC stamp>-<id>``.
        about: what else ``status.json`` says: the label, tags and note of the run; of several processes, how many and which failed.
        follows: whether another process, that of rank 0, writes what is in it; this one writes nothing.
        volatile: what two equal runs need not have alike.
    """

    volatile = ("lock", "log.txt", "ranks", "context.json", "before-*")

    def __init__(self, path: Path, *, follows: bool = False) -> None:
        self.path, self.follows = path, follows
        self.about: dict[str, Any] = {}
        self._lock: FileIO | None = None

    def describe(self, about: Mapping[str, Any], **more: Any) -> None:
        """Set what ``status.json`` says of the run.

        Args:
            about: the label, tags and note; what is empty stays as it was before a resume.
            more: of several processes, how many.
        """
        before = self.read_status()
        self.about = {name: value or before.get(name, value) for name, value in about.items()} | more

    @classmethod
    def new(cls, output_dir: Path, config_name: str) -> RunDirectory:
        """Make the folder, and the link ``latest`` to it.

        Raises:
            StorageError: the storage refuses.
        """
        parent = output_dir.resolve() / config_name
        with storing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            directory = cls(new_folder(parent))
            _link(parent / "latest", directory.path.name)
        return directory

    @classmethod
    def newest(
        cls, output_dir: Path, config_name: str, predicate: Callable[[Path], bool] = Path.is_dir
    ) -> RunDirectory | None:
        """The newest run directory under a config's name for which the predicate holds; None: there is none.

        The newest of all is where ``latest`` points; without that link the names tell, and the link is made again.

        Raises:
            StorageError: the storage refuses.
        """
        parent = output_dir.resolve() / config_name
        runs = [path for path in parent.glob("*") if STAMP.fullmatch(path.name) and not path.is_symlink()]
        runs.sort(reverse=True)
        latest = (parent / "latest").resolve()
        if latest.parent == parent and latest.is_dir():
            runs.insert(0, latest)
        elif runs:
            # Somebody has removed the link, or a run was killed before it had one.
            with storing(parent):
                _link(parent / "latest", runs[0].name)
        return next((cls(path) for path in runs if predicate(path)), None)

    @classmethod
    def at(cls, path: Path) -> RunDirectory:
        """The directory of an earlier run, or an empty folder, in which one is to begin.

        Raises:
            ConfigError: it is neither.
        """
        if not is_run_directory(path) and not cls(path).is_empty():
            run = next((parent for parent in path.absolute().parents if (parent / "lock").is_file()), None)
            other = f", or name {run} or {run}/<runner>/checkpoints/step-…" if run else ""
            raise ConfigError(f"{path}: is no run directory, which has a config.yaml and a lock; check the path{other}")
        return cls(path.resolve())

    def add(self, runners: Iterable[str]) -> None:
        """Make the folders of the runners.

        Raises:
            StorageError: the storage refuses.
        """
        for name in runners:
            with storing(self.path / name):
                (self.path / name).mkdir(exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder; the system frees it when the process ends, however it ends.

        Raises:
            LockedError: another process holds it.
            StorageError: the storage refuses, or has no locks.
        """
        with lock_held(self.path / "lock") as self._lock:
            yield

    def holder(self) -> str:
        """Who holds the lock, and since when; empty where there is none."""
        with suppress(OSError):
            return (self.path / "lock").read_text(errors="replace")
        return ""

    def wait_for(self, holder: str, rank: int) -> None:
        """Wait until this process sees the lock of rank 0, which the storage may take seconds to show.

        Raises:
            ConfigError: it does not see it.
        """
        end = time.monotonic() + PATIENCE
        while self.holder() != holder:
            if time.monotonic() > end:
                what = f"rank {rank} on {socket.gethostname()}: {self.path} is not the folder that rank 0 has there"
                raise ConfigError(f"{what} ({holder.strip()}); set output_dir to a folder that all hosts share")
            time.sleep(0.1)

    def write(self, name: str, content: str) -> None:
        """Replace a file as a whole: a reader sees the old one or the new one.

        Raises:
            StorageError: the storage refuses.
        """
        if self.may_write():
            storage.write(self.path / name, content)

    def write_json(self, name: str, content: Any) -> None:
        """The same, as JSON."""
        if self.may_write():
            storage.write_json(self.path / name, content)

    def write_status(
        self,
        state: str,
        *,
        train_state: Mapping[str, int],
        exit_code: int | None = None,
        reason: str = "",
        resumable: bool = True,
        error: str | None = None,
    ) -> None:
        """Write ``status.json``; ``resumable``: whether the run can be resumed, if there is something to resume from."""
        resumable = resumable and self.is_resumable()
        status = {"state": state, "exit_code": exit_code, "reason": reason, "resumable": resumable}
        counters = {name: train_state.get(name, 0) for name in ("iteration", "epoch")}
        self.write_json("status.json", {**status, **counters, "error": error, **self.about})

    def is_empty(self) -> bool:
        """Whether the folder is there, and no run has begun in it."""
        # One with a NUL in its name is none.
        with suppress(OSError, ValueError):
            return {*os.listdir(self.path)} <= _LEFT
        return False

    def may_write(self) -> bool:
        """Whether this process writes into the folder.

        Raises:
            StorageError: it is no longer the one that was locked.
        """
        if self._lock and not self._lock.closed and not is_at(self._lock, self.path / "lock"):
            raise StorageError(f"{self.path}: was removed or replaced while the run was going on; begin a new run")
        return not self.follows

    def is_done(self, runner: str) -> bool:
        """Whether a runner has been through all its stages; a damaged mark counts as none, and is logged."""
        path = self.path / runner / DONE
        try:
            return isinstance(json.loads(path.read_bytes()), dict)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RecursionError) as error:
            logger.warning(f"{path}: is damaged ({error}); {runner} goes through its stages again")
            return False

    def mark_done(self, runner: str, train_state: Mapping[str, int], why: str | None = None) -> None:
        """Mark a runner that has been through all its stages: a resumed run skips it. The disk has the mark then.

        Args:
            runner: its name.
            train_state: the counters with which it ended.
            why: what ``stop`` has ended its training for; None: it has not.

        Raises:
            StorageError: the storage refuses.
        """
        mark = dict(train_state) if why is None else {**train_state, "stopped": why}
        if self.may_write():
            storage.replace_durably(
                self.path / runner / DONE, json.dumps(storage.finite(mark), indent=2).encode() + b"\n"
            )

    def begins_anew(self, runner: str) -> bool:
        """Whether a runner starts from the beginning: it is not done, and has no checkpoint."""
        return not self.is_done(runner) and not layout.committed_checkpoints(self.path / runner / "checkpoints")

    def furthest_counters(self, runners: Iterable[str]) -> dict[str, int]:
        """The counters of that of these runners which trained furthest; nothing where none is done."""
        marks = [_read_json(self.path / runner / DONE) for runner in runners]
        return max(marks, key=lambda counters: int(counters.get("iteration", -1)), default={})

    def stop_reasons(self, runners: Iterable[str]) -> str:
        """Why ``stop`` has ended the training of these runners; empty where it has ended none."""
        marks = [_read_json(self.path / runner / DONE) for runner in runners]
        return "; ".join(mark["stopped"] for mark in marks if "stopped" in mark)

    def read_status(self) -> dict[str, Any]:
        """The content of ``status.json``; empty if it cannot be read."""
        return _read_json(self.path / "status.json")

    def is_resumable(self) -> bool:
        """Whether there is something to resume from: a finished runner, or a checkpoint whose files have the right sizes."""
        with suppress(OSError, StorageError):
            runners = [path for path in self.path.iterdir() if path.is_dir()]
            checkpoints = (path for runner in runners for path in layout.committed_checkpoints(runner / "checkpoints"))
            return any((runner / DONE).is_file() for runner in runners) or any(map(_is_complete, checkpoints))
        return False


def is_run_directory(path: Path) -> bool:
    """Whether a folder is the directory of a run."""
    # Of os.path, which says of a name too long that nothing is there.
    return os.path.isfile(path / "lock") and any(os.path.isfile(path / name) for name in _FILES)


def parse_command(text: str) -> dict[str, str]:
    """What a ``command.txt`` says, by name."""
    return {name: value for name, colon, value in (line.partition(": ") for line in text.split("\n")) if colon}


def new_folder(parent: Path, prefix: str = "") -> Path:
    """Make a new folder named after the time; two of the same second get two names."""
    while True:
        folder = parent / f"{prefix}{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def _link(link: Path, target: str) -> None:
    temporary = link.with_name(f".latest-{target}")
    # A process that was killed here has left it.
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint has the files that its manifest lists; their content is verified when it is read."""
    with suppress(CheckpointError, StorageError):
        layout.listed_files(checkpoint)
        return True
    return False


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        if isinstance(content := json.loads(path.read_bytes()), dict):
            return content
    return {}
