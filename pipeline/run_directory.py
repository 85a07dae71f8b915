"""The folder that a run leaves: what was run, where, with what, and how it ended."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from pipeline.errors import ConfigError, LockedError, StorageError

_STAMP = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_PACKAGES = (
    "five-stage-pipeline",
    "torch",
    "pyyaml",
    "pluggy",
    "loguru",
    "pydantic",
    "click",
    "rich",
    "safetensors",
    "numpy",
)
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG",
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "LANG", "TZ",
)  # fmt: skip
"""The environment variables that are kept; no others, since they hold secrets."""


class RunDirectory:
    """One run's folder.

    Attributes:
        path: absolute; ``<output_dir>/<config name>/<UTC stamp>-<id>``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def new(cls, output_dir: Path, config_name: str, runners: Iterable[str] = ()) -> RunDirectory:
        """Make the folder, with one for each runner in it, and point ``latest`` beside it at it.

        Raises:
            StorageError: the storage refuses.
        """
        parent = output_dir.resolve() / config_name
        with _storing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            directory = cls(_new_folder(parent))
            directory.add(runners)
            _point(parent / "latest", directory.path.name)
        return directory

    @classmethod
    def newest(cls, output_dir: Path, config_name: str) -> RunDirectory | None:
        """The one of the last run of a config; None: it was never run."""
        parent = output_dir.resolve() / config_name
        newest = (parent / "latest").resolve()
        if newest.parent == parent and newest.is_dir():
            return cls(newest)
        # Somebody has removed the link; the names tell the second.
        found = sorted(each for each in parent.glob("*") if _STAMP.fullmatch(each.name) and not each.is_symlink())
        return cls(found[-1]) if found else None

    @classmethod
    def at(cls, path: Path) -> RunDirectory:
        """That of an earlier run.

        Raises:
            ConfigError: it is none.
        """
        if not (path / "lock").is_file() or not (path / "config.yaml").is_file():
            raise ConfigError(f"{path}: is no run directory, which has a config.yaml and a lock; check the path")
        return cls(path.resolve())

    def add(self, runners: Iterable[str]) -> None:
        """Make the folders of runners that have none."""
        for name in runners:
            (self.path / name).mkdir(exist_ok=True)

    def state(self) -> str:
        """How the run stands, as ``status.json`` says; ``""`` where it says nothing."""
        try:
            return str(json.loads((self.path / "status.json").read_bytes())["state"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def is_done(self, runner: str) -> bool:
        """Whether a runner has been through all its stages."""
        return (self.path / runner / "done.json").is_file()

    def mark_done(self, runner: str, train_state: Mapping[str, int]) -> None:
        """Note that a runner has been through all its stages: a resumed run leaves it out."""
        self.write_json(f"{runner}/done.json", dict(train_state))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which the system frees when the process ends, however it ends.

        Raises:
            LockedError: another process holds it.
        """
        with open(self.path / "lock", "a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                raise LockedError(
                    f"{self.path}: is in use by {lock.read().strip()}; wait for it, or stop it"
                ) from error
            lock.truncate(0)
            lock.write(f"host {socket.gethostname()}, pid {os.getpid()}, since {_now()}\n")
            lock.flush()
            _held.add(lock)
            try:
                yield
            finally:
                _held.discard(lock)

    def write(self, name: str, content: str) -> None:
        """Put a whole file in place: a reader sees the old one or the new one.

        Raises:
            StorageError: the storage refuses.
        """
        final = self.path / name
        temporary = final.with_name(f".{final.name}.tmp")
        with _storing(final):
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(final)

    def write_json(self, name: str, content: Any) -> None:
        """The same, as JSON."""
        self.write(name, json.dumps(content, indent=2, default=str) + "\n")

    def keep_command(self, config: Path | None, workspace: Path | None, overrides: Sequence[str] = ()) -> None:
        """``command.txt``: the command line, and what a resume needs to find the code again."""
        lines = {
            "command": shlex.join(sys.argv),
            "folder": os.getcwd(),
            "config": config and config.resolve(),
            "workspace": workspace,
            "overrides": json.dumps(list(overrides)),
        }
        self.write("command.txt", "".join(f"{name}: {value}\n" for name, value in lines.items()))

    def keep_environment(self, workspace: Path | None, hardware: Mapping[str, Any]) -> None:
        """``environment.json``: versions, hardware, the state of the workspace's repository, some variables."""
        self.write_json(
            "environment.json",
            {
                "time": _now(),
                "host": socket.gethostname(),
                "platform": platform.platform(),
                "python": sys.version,
                "packages": {name: _version(name) for name in _PACKAGES},
                "hardware": {"cpus": os.cpu_count(), **hardware},
                "git": _git_state(workspace, self.path.parents[1]) if workspace else None,
                "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
            },
        )

    def keep_sources(self, files: Iterable[Path], workspace: Path | None) -> None:
        """Copy files of user code to ``workspace/``, under the same names; those elsewhere to ``workspace/_elsewhere``."""
        for file in files:
            inside = workspace is not None and file.is_relative_to(workspace)
            kept = (
                self.path
                / "workspace"
                / (file.relative_to(workspace or "/") if inside else Path("_elsewhere", *file.parts[1:]))
            )
            with _storing(kept):
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, kept)

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


_held: set[TextIO] = set()
"""The locks of this process."""


def _let_go() -> None:
    """Close the locks in a process that was forked, such as a worker of a loader, which may outlive this one."""
    for lock in _held:
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def finite(value: Any) -> Any:
    """Plain data for JSON, which has no nan and no inf: those become null."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    """Say of what the storage refuses that it did."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or path}: cannot be written: {error.strerror}"
        raise StorageError(f"{what}; free or repair the storage, or set output_dir") from error


def _new_folder(parent: Path) -> Path:
    """A folder that nobody has: two runs of the same second get two."""
    while True:
        folder = parent / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".latest-{target}")
    temporary.symlink_to(target)
    temporary.replace(link)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(folder: Path, outputs: Path) -> dict[str, Any] | None:
    """Commit and whether anything but the outputs is uncommitted; None outside a repository, or without git."""
    try:
        commit, top = _git(folder, "rev-parse", "HEAD"), Path(_git(folder, "rev-parse", "--show-toplevel"))
        apart = outputs.is_relative_to(top) and not folder.is_relative_to(outputs)
        kept_out = [f":(exclude,top,literal){outputs.relative_to(top)}"] if apart else []
        return {"commit": commit, "dirty": bool(_git(top, "status", "--porcelain", "--", ".", *kept_out))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
