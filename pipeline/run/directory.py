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
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.checkpoint import layout, storage
from pipeline.checkpoint.storage import no_link, storing
from pipeline.errors import CheckpointError, ConfigError, LockedError, StorageError

_held: set[FileIO] = set()

"""The locks of this process."""


@contextmanager
def lock_held(path: Path) -> Iterator[FileIO]:
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


def is_running(lock: FileIO, path: Path) -> bool:
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


_STAMP = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")

_KEPT = ("config.yaml", "command.txt", "environment.json", "status.json")

"""By one of these, and its lock, a run directory is known: if one is damaged, there are the others."""

MADE_BY = "made_by.txt"

"""Names the command that made the run for a purpose of its own; there is none where a user did."""


class RunDirectory:
    """One run's folder.

    Attributes:
        path: absolute; ``<output_dir>/<config name>/<UTC stamp>-<id>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileIO | None = None

    @classmethod
    def new(cls, output_dir: Path, config_name: str, runners: Iterable[str] = ()) -> RunDirectory:
        """Make the folder, with one for each runner in it, and point ``latest`` beside it at it.

        Raises:
            StorageError: the storage refuses.
        """
        parent = output_dir.resolve() / config_name
        with storing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            directory = cls(new_folder(parent))
            directory.add(runners)
            _point(parent / "latest", directory.path.name)
        return directory

    @classmethod
    def newest(
        cls, output_dir: Path, config_name: str, wanted: Callable[[Path], bool] = Path.is_dir
    ) -> RunDirectory | None:
        """The newest run directory under a config's name, of those that are wanted; None: there is none.

        What ``latest`` points at is the newest, else the names tell; then it points at that again.

        Raises:
            StorageError: the storage refuses.
        """
        parent = output_dir.resolve() / config_name
        by_name = [each for each in parent.glob("*") if _STAMP.fullmatch(each.name) and not each.is_symlink()]
        found = sorted(by_name, reverse=True)
        latest = (parent / "latest").resolve()
        if latest.parent == parent and latest.is_dir():
            found.insert(0, latest)
        elif found:
            # Somebody has removed the link, or a run was killed before it had one.
            with storing(parent):
                _point(parent / "latest", found[0].name)
        return next((cls(each) for each in found if wanted(each)), None)

    @classmethod
    def at(cls, path: Path) -> RunDirectory:
        """That of an earlier run.

        Raises:
            ConfigError: it is none.
        """
        # Of os.path, which says of a name too long that nothing is there.
        if not os.path.isfile(path / "lock") or not any(os.path.isfile(path / name) for name in _KEPT):
            what = "is no run directory, which has a config.yaml and a lock"
            raise ConfigError(f"{path}: {what}; check the path{_run_above(path)}")
        return cls(path.resolve())

    def add(self, runners: Iterable[str]) -> None:
        """Make the folders of runners that have none.

        Raises:
            StorageError: the storage refuses.
        """
        for name in runners:
            with storing(self.path / name):
                (self.path / name).mkdir(exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which the system frees when the process ends, however it ends.

        Raises:
            LockedError: another process holds it.
            StorageError: the storage refuses, or has no locks.
        """
        with lock_held(self.path / "lock") as lock:
            self._lock = lock
            try:
                yield
            finally:
                self._lock = None

    def write(self, name: str, content: str) -> None:
        """Put a whole file in place: a reader sees the old one or the new one.

        Raises:
            StorageError: the storage refuses.
        """
        self.check_there()
        storage.write(self.path / name, content)

    def write_json(self, name: str, content: Any) -> None:
        """The same, as JSON."""
        self.check_there()
        storage.write_json(self.path / name, content)

    def write_status(
        self,
        state: str,
        *,
        exit_code: int | None = None,
        reason: str = "",
        resumable: bool = False,
        train_state: Mapping[str, int],
        error: str | None = None,
    ) -> None:
        """``status.json``: how the run stands."""
        self.write_json(
            "status.json",
            {
                "state": state,
                "exit_code": exit_code,
                "reason": reason,
                "resumable": resumable,
                "iteration": train_state.get("iteration", 0),
                "epoch": train_state.get("epoch", 0),
                "error": error,
            },
        )

    def check_there(self) -> None:
        """See that the folder is the one that was locked: somebody may remove it, and something make it anew.

        Raises:
            StorageError: it is not.
        """
        if self._lock and not is_running(self._lock, self.path / "lock"):
            raise StorageError(f"{self.path}: was removed or replaced while the run was going on; begin a new run")


def _run_above(path: Path) -> str:
    """The remedy for the path of something in a run directory."""
    run = next((each for each in path.absolute().parents if (each / "lock").is_file()), None)
    return f", or name {run} or {run}/<runner>/checkpoints/step-…" if run else ""


def new_folder(parent: Path, prefix: str = "") -> Path:
    """A folder that nobody has, named after the time: two of the same second get two."""
    while True:
        folder = parent / f"{prefix}{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".latest-{target}")
    # One that was killed here has left it.
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


DONE = "done.json"


def is_done(directory: RunDirectory, runner: str) -> bool:
    """Whether a runner has been through all its stages; a note of that which is damaged is none, and the log says so."""
    path = directory.path / runner / DONE
    try:
        noted = json.loads(path.read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as error:
        logger.warning(f"{path}: is damaged ({error}); {runner} goes through its stages again")
        return False
    return isinstance(noted, dict)


def begins_anew(directory: RunDirectory, runner: str) -> bool:
    """Whether a runner begins at its beginning: it is not through, and has no checkpoint to go on from."""
    return not is_done(directory, runner) and not layout.committed_checkpoints(directory.path / runner / "checkpoints")


def furthest_runner(directory: RunDirectory, runners: Iterable[str]) -> dict[str, int]:
    """The counters of that of these runners which trained furthest; nothing where none is through."""
    noted = [_told(directory.path / runner / DONE) for runner in runners]
    return max(noted, key=lambda counters: int(counters.get("iteration", -1)), default={})


def read_status(directory: RunDirectory) -> dict[str, Any]:
    """What ``status.json`` says; nothing where it cannot be read."""
    return _told(directory.path / "status.json")


def _told(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def mark_done(directory: RunDirectory, runner: str, train_state: Mapping[str, int]) -> None:
    """Note that a runner has been through all its stages: a resumed run leaves it out. The disk has it then.

    Raises:
        StorageError: the storage refuses.
    """
    directory.check_there()
    path = directory.path / runner / DONE
    with storing(path):
        storage.replace_durably(path, json.dumps(dict(train_state), indent=2).encode() + b"\n")


def is_resumable(directory: RunDirectory) -> bool:
    """Whether there is something to go on from: a runner that is done, or a checkpoint whose files have their sizes."""
    try:
        runners = [each for each in directory.path.iterdir() if each.is_dir()]
        return any((each / DONE).is_file() or _has_checkpoint(each / "checkpoints") for each in runners)
    except (OSError, StorageError):
        return False


def _has_checkpoint(folder: Path) -> bool:
    return any(_is_whole(path) for path in reversed(layout.committed_checkpoints(folder)))


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint has the files that it lists; their content, which may be large, is verified when it is read."""
    try:
        layout.listed_files(path)
    except (CheckpointError, StorageError):
        return False
    return True
