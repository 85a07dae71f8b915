"""How a run was made: its command, its environment, and copies of the user code."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from pipeline.checkpoint.storage import replacing, storing
from pipeline.config import yaml_tree
from pipeline.config.load import Config
from pipeline.distributed.device import describe_hardware
from pipeline.run.directory import RunDirectory, now
from pipeline.user_code import class_path

# A line of the ``RECORD`` of a distribution, for what can be imported; a namespace package has no ``__init__.py``.
_MODULE = re.compile(r"^(\w+)(?:/[^,\n]+\.py|(?:/__init__)?\.[\w.-]+),", re.MULTILINE)

# The environment variables that are kept; no others, since they hold secrets.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG",
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "LANG", "TZ",
)  # fmt: skip


# In the run directory, for copies of files that are not in the workspace.
ELSEWHERE = Path("workspace", "_elsewhere")


@dataclass(frozen=True)
class Provenance:
    """How a run was made.

    Attributes:
        config: the config, resolved, as YAML; ``config.yaml``.
        command: name -> value, the command line, and what a resume needs to find the code again; ``command.txt``.
        environment: versions, hardware, the state of the workspace's repository, some variables; ``environment.json``.
        swaps: what changes where a stage is not the default; ``swaps.txt``.
        sources: the place of a file of user code in the run directory -> the file; its neighbours in the workspace are
            under ``workspace/``, others under ``workspace/_elsewhere/``.
        volatile: those of the files that name the time and the command line.
    """

    volatile: ClassVar = ("command.txt", "environment.json")

    config: str
    command: dict[str, str]
    environment: dict[str, Any]
    swaps: str
    sources: dict[Path, Path]

    @classmethod
    def capture(
        cls, config: Config, directory: RunDirectory, devices: Mapping[str, object], processes: Sequence[Any] = ()
    ) -> Provenance:
        """That of a run that starts now.

        Args:
            config: what is run.
            directory: where.
            devices: runner name -> device.
            processes: of several, the host, number and devices of each, by rank.
        """
        workspace, hardware = config.workspace, {"cpus": os.cpu_count(), **describe_hardware()}
        return cls(
            saved_text(config),
            {
                "command": shlex.join(getattr(sys, "argv", ())),
                "folder": os.getcwd(),
                "run_dir": str(directory.path),
                "config": str(config.path and config.path.resolve()),
                "name": config.settings.name or "",
                "workspace": str(workspace),
                "overrides": json.dumps(config.overrides),
                "links": json.dumps(config.link_targets()),
            },
            {
                "time": now(),
                "host": socket.gethostname(),
                "platform": platform.platform(),
                "python": sys.version,
                "packages": imported_packages(),
                "hardware": {**hardware, "devices": {name: str(device) for name, device in devices.items()}},
                # The runs beside this one are no part of the workspace's repository.
                "git": _git_state(workspace, directory.path.parents[1]) if workspace else None,
                "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
                **({"ranks": processes} if processes else {}),
            },
            config.swaps or "every stage is the default\n",
            {_copy_name(file, workspace): file for file in config.sources},
        )

    def write(self, directory: RunDirectory, only: Container[Path] | None = None) -> None:
        """Write the files, and copy those of user code.

        Args:
            directory: where they go.
            only: their names in it; None: all.

        Raises:
            StorageError: the storage refuses.
        """
        texts = {
            # First, since by it the run is found again.
            "command.txt": "".join(f"{name}: {value}\n" for name, value in self.command.items()),
            "config.yaml": self.config,
            "environment.json": json.dumps(self.environment, indent=2, default=str) + "\n",
            "swaps.txt": self.swaps,
        }
        for name, text in texts.items():
            if only is None or Path(name) in only:
                directory.write(name, text)
        for copy, file in self.sources.items():
            if only is None or copy in only:
                _copy(file, directory.path / copy)


def saved_text(config: Config) -> str:
    """Return the text of ``config.yaml`` in a run directory: the resolved config with all defaults.

    It leaves out the keys that a later layer switches off. In one file, a key and what switches it
    off are a fault.
    """
    tree = config.tree.copy()
    for address in config.switched_off:
        section, _, key = address.rpartition(".")
        if (node := tree.find(section)) is not None:
            del node.value[key]
    return yaml_tree.dump(_as_text(tree.plain(expanded=False)))


def digests(config: Config) -> dict[str, str]:
    """What several processes must have alike: a part of the config, a file of user code -> digest; package -> version."""
    parts = _as_text(config.plain(expanded=False))
    contents = {f"'{name}' of the config": yaml_tree.dump(part).encode() for name, part in parts.items()}
    contents |= {str(_copy_name(file, config.workspace)): file.read_bytes() for file in config.sources}
    shas = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in contents.items()}
    return {"Python": platform.python_version(), **imported_packages(), **shas}


def _as_text(value: Any) -> Any:
    """A config whose classes and other Python objects are text."""
    if isinstance(value, dict):
        return {str(name): _as_text(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(child) for child in value]
    if isinstance(value, type | FunctionType):
        return class_path.describe(value)
    # The address of an object in memory differs between processes.
    plain = isinstance(value, str | int | float | bool | None)
    return value if plain else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _copy_name(file: Path, workspace: Path | None) -> Path:
    if workspace is not None and file.is_relative_to(workspace):
        return Path("workspace") / file.relative_to(workspace)
    return ELSEWHERE.joinpath(*file.parts[1:])


def _copy(file: Path, target: Path) -> None:
    """Copy a file as a whole; a link at its place is replaced, not followed."""
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            shutil.copyfile(file, temporary)


def imported_packages() -> dict[str, str]:
    """Distribution -> version, for each of which something is imported."""
    imported, changed = set(sys.modules), [os.stat(path).st_mtime_ns for path in sys.path if os.path.isdir(path)]
    return {name: version for name, (version, modules) in _installed(*changed).items() if modules & imported}


@cache
def _installed(*_changed: int) -> dict[str, tuple[str, frozenset[str]]]:
    """Distribution -> its version, and its modules; ``packages_distributions`` takes 30 times as long.

    Args:
        _changed: when each folder of ``sys.path`` has changed: packages may be installed while a notebook is open.
    """
    installed: dict[str, tuple[str, frozenset[str]]] = {}
    for distribution in distributions():
        read = distribution.read_text
        about = dict(re.findall(r"^(Name|Version): (.*)", read("METADATA") or read("PKG-INFO") or "", re.MULTILINE))
        modules = (read("top_level.txt") or "").split() or _MODULE.findall(read("RECORD") or "")
        # The first of a name is the one that Python imports.
        installed.setdefault(about.get("Name", ""), (about.get("Version", ""), frozenset(modules)))
    return installed


def _git_state(folder: Path, outputs: Path) -> dict[str, Any] | None:
    """Commit and whether anything but the outputs is uncommitted; None outside a repository, or without git."""
    try:
        commit, top = _git(folder, "rev-parse", "HEAD"), Path(_git(folder, "rev-parse", "--show-toplevel"))
        inside = outputs.is_relative_to(top) and not folder.is_relative_to(outputs)
        excluded = [f":(exclude,top,literal){outputs.relative_to(top)}"] if inside else []
        return {"commit": commit, "dirty": bool(_git(top, "status", "--porcelain", "--", ".", *excluded))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
