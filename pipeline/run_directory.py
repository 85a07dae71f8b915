"""The folder that a run leaves: what was run, where, with what, and how it ended."""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import NoneType
from typing import Any

from pipeline import run_lock, storage
from pipeline.errors import ConfigError, StageError, StorageError
from pipeline.storage import storing

_STAMP = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_PLAIN = frozenset({int, str, bool, NoneType})
"""What JSON has a form for, beside floats."""
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
        with run_lock.held(self.path / "lock") as lock:
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
        if self._lock and not run_lock.is_at(self._lock, self.path / "lock"):
            raise StorageError(f"{self.path}: was removed or replaced while the run was going on; begin a new run")


def finite(value: Any, where: str = "") -> Any:
    """Plain data for JSON, which has no nan and no inf: those become null.

    Args:
        value: what is to be written.
        where: it stands, for the error; ``""`` leaves what is no plain data as it is.

    Raises:
        StageError: some of it is none.
    """
    # The usual cases, on the way of every printed step.
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        return {name: finite(each, where and f"{where}[{name!r}]") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, where) for each in value]
    try:
        number = as_number(value, where)
    except StageError:
        if where:
            raise
        return value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def as_number(value: Any, where: str) -> Any:
    """A number as a file keeps it: that of a tensor or an array with one element, as a plugin may report it.

    Raises:
        StageError: it has several, or is something else; ``where`` it is.
    """
    if type(value) is float or type(value) in _PLAIN:
        return value
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError) as error:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        message = f"{where} is a {type(value).__name__}{shape}, which is no number; put a number there"
        raise StageError(message) from error


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
