"""What the folders of checkpoints are called: order and state are read off the name, never off a clock.

``step-000000000012`` is a checkpoint, ``step-000000000012.new`` the one that is about to take its place, ``.bad-…`` one
that was found damaged; ``.later-…`` came after a checkpoint that the run went back to; ``.tmp-…`` and ``.del-…`` were
being written and removed when a process ended.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from pipeline.errors import StorageError

NEW = ".new"
_STEP = re.compile(r"step-(\d{12,15})(\.new)?")
_LEFT = re.compile(r"\.(tmp|del)-step-\d{12,15}(\.new)?-[0-9a-f]{8}")
_BAD = re.compile(r"\.bad-step-\d{12,15}(\.new)?-[0-9a-f]{8}")


def name_of(iteration: int) -> str:
    """The name of the checkpoint of an iteration."""
    return f"step-{iteration:012d}"


def step_of(path: Path) -> int | None:
    """The iteration that a folder is named after; None for anything else."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def apart(path: Path, kind: str) -> Path:
    """A free name for a checkpoint that is ``tmp``, ``del`` or ``bad``."""
    return path.with_name(f".{kind}-{path.name}-{uuid.uuid4().hex[:8]}")


def committed(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by step; a new one comes after the one whose place it is to take."""
    found = [path for path in _entries(folder) if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_of(path), path.name))


def left_behind(folder: Path) -> list[Path]:
    """What a process that ended was writing or removing."""
    return [path for path in _entries(folder) if _LEFT.fullmatch(path.name)]


def bad(folder: Path) -> list[Path]:
    """The checkpoints that were found damaged."""
    return [path for path in _entries(folder) if _BAD.fullmatch(path.name)]


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except FileNotFoundError:
        if folder.is_symlink():
            what = f"{folder}: leads to {os.readlink(folder)}, which is not there"
            raise StorageError(f"{what}; mount its disk or bring it back") from None
        return []
    except OSError as error:
        raise StorageError(f"{folder}: cannot be listed: {error.strerror}; free or repair the storage") from error
