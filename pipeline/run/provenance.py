"""What a run directory keeps of how the run was made: the command, the environment, the files of user code."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.checkpoint.storage import storing
from pipeline.run.directory import RunDirectory, now

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


@dataclass(frozen=True)
class Provenance:
    """What is kept.

    Attributes:
        config: the config, resolved, as YAML; ``config.yaml``.
        command: name -> value, the command line, and what a resume needs to find the code again; ``command.txt``.
        environment: versions, hardware, the state of the workspace's repository, some variables; ``environment.json``.
        swaps: what changes where a stage is not the default; ``swaps.txt``.
        sources: where a file of user code is kept, relative to the run directory -> where it is.
    """

    config: str
    command: dict[str, str]
    environment: dict[str, Any]
    swaps: str
    sources: dict[Path, Path]

    def texts(self) -> dict[str, str]:
        """The content of each file that is written."""
        return {
            "config.yaml": self.config,
            "command.txt": "".join(f"{name}: {value}\n" for name, value in self.command.items()),
            "environment.json": json.dumps(self.environment, indent=2, default=str) + "\n",
            "swaps.txt": self.swaps,
        }

    def keep(self, directory: RunDirectory, only: Container[Path] | None = None) -> None:
        """Write the files, and copy those of user code.

        Args:
            directory: where they go.
            only: their names in it; None: all.

        Raises:
            StorageError: the storage refuses.
        """
        for name, text in self.texts().items():
            if only is None or Path(name) in only:
                directory.write(name, text)
        for kept, file in self.sources.items():
            if only is None or kept in only:
                _copy(file, directory.path / kept)


def command_text(
    config: Path | None,
    workspace: Path | None,
    overrides: Sequence[str] = (),
    *,
    run_dir: Path,
    name: str | None = None,
    links: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The ``command`` of a record; ``name``: the one that the config gives itself; ``links``: where its links lead."""
    return {
        "command": shlex.join(getattr(sys, "argv", ())),
        "folder": os.getcwd(),
        "run_dir": str(run_dir),
        "config": str(config and config.resolve()),
        "name": name or "",
        "workspace": str(workspace),
        "overrides": json.dumps(list(overrides)),
        "links": json.dumps(dict(links or {})),
    }


def parsed_command(text: str) -> dict[str, str]:
    """The ``command`` of a record, from its ``command.txt``; what a command line of several lines adds comes first."""
    return {name: value for name, colon, value in (line.partition(": ") for line in text.split("\n")) if colon}


def environment_of(directory: RunDirectory, workspace: Path | None, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """The ``environment`` of a record; of the workspace's repository the runs beside this one are no part."""
    return {
        "time": now(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version,
        "packages": {name: _version(name) for name in _PACKAGES},
        "hardware": {"cpus": os.cpu_count(), **hardware},
        "git": _git_state(workspace, directory.path.parents[1]) if workspace else None,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def source_copies(files: Iterable[Path], workspace: Path | None) -> dict[Path, Path]:
    """The ``sources`` of a record: under ``workspace/`` by the same names, those elsewhere under ``_elsewhere`` in it."""
    return {_kept_name(file, workspace): file for file in files}


def _kept_name(file: Path, workspace: Path | None) -> Path:
    if workspace is not None and file.is_relative_to(workspace):
        return Path("workspace") / file.relative_to(workspace)
    return Path("workspace", "_elsewhere", *file.parts[1:])


def _copy(file: Path, kept: Path) -> None:
    """Copy a file whole; what is at its place, such as a link, is not written through."""
    with storing(kept):
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f".{kept.name}.tmp")
        temporary.unlink(missing_ok=True)
        shutil.copyfile(file, temporary)
        temporary.replace(kept)


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
