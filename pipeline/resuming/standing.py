"""How far each runner of a run directory has come: through all its stages, up to a checkpoint, or nowhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.checkpoint import files, manifest, names
from pipeline.errors import CheckpointError, StorageError
from pipeline.run_directory import RunDirectory
from pipeline.storage import storing

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


def begins(directory: RunDirectory, runner: str) -> bool:
    """Whether a runner begins at its beginning: it is not through, and has no checkpoint to go on from."""
    return not is_done(directory, runner) and not names.committed(directory.path / runner / "checkpoints")


def furthest(directory: RunDirectory, runners: Iterable[str]) -> dict[str, int]:
    """The counters of that of these runners which trained furthest; nothing where none is through."""
    noted = [_told(directory.path / runner / DONE) for runner in runners]
    return max(noted, key=lambda counters: int(counters.get("iteration", -1)), default={})


def status(directory: RunDirectory) -> dict[str, Any]:
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
    temporary = path.with_name(f".{DONE}.tmp")
    with storing(path):
        temporary.unlink(missing_ok=True)
        files.write(temporary, json.dumps(dict(train_state), indent=2).encode() + b"\n")
        files.move_into_place(temporary, path)


def is_resumable(directory: RunDirectory) -> bool:
    """Whether there is something to go on from: a runner that is done, or a checkpoint whose files have their sizes."""
    try:
        runners = [each for each in directory.path.iterdir() if each.is_dir()]
        return any((each / DONE).is_file() or _has_checkpoint(each / "checkpoints") for each in runners)
    except (OSError, StorageError):
        return False


def _has_checkpoint(folder: Path) -> bool:
    return any(_is_whole(path) for path in reversed(names.committed(folder)))


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint has the files that it lists; their content, which may be large, is verified when it is read."""
    try:
        manifest.listed(path)
    except (CheckpointError, StorageError):
        return False
    return True
