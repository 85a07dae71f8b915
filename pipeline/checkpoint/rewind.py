"""Going back to a chosen checkpoint: those after it are set aside as ``.later-step-…``, which nothing reads or removes."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint import names, saved
from pipeline.checkpoint.files import DISK, Disk
from pipeline.errors import NoCheckpointError, StorageError


def verify(path: Path) -> None:
    """See that a checkpoint is as it was written.

    Raises:
        NoCheckpointError: it is damaged; the first fault is named.
        StorageError: the storage refuses for a reason that may pass.
    """
    if problems := saved.problems(path):
        raise NoCheckpointError(problems[0])


def after(path: Path) -> list[Path]:
    """The checkpoints that come after one in its folder, by step."""
    there = names.committed(path.parent)
    return there[there.index(path) + 1 :]


def set_aside(path: Path, disk: Disk = DISK) -> Path:
    """Give a checkpoint a name that nothing reads, in the same folder; the disk has it when this returns.

    Returns:
        The new path; to have the checkpoint again, rename it back.

    Raises:
        StorageError: the storage refuses.
    """
    target = names.apart(path, "later")
    try:
        disk.rename(path, target)
        disk.fsync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot be set aside: {error.strerror}; free or repair the storage") from error
    return target
