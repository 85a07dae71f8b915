"""Finding the newest checkpoint that is whole; what is not is set aside under a name that nothing reads."""

from __future__ import annotations

from pathlib import Path

from loguru import logger

from pipeline.checkpoint import names, saved
from pipeline.checkpoint.files import Disk
from pipeline.checkpoint.saved import Saved
from pipeline.checkpoint.saver import Saver
from pipeline.errors import CheckpointError, NoCheckpointError


def newest_valid(saver: Saver, disk: Disk, with_training: bool = True) -> Saved | None:
    """The verified checkpoint of the highest step; None where none was ever committed.

    Args:
        saver: of the folder, which nobody else is writing to.
        disk: what renames those that are not valid.
        with_training: False reads and verifies the weights and numbers alone.

    Raises:
        NoCheckpointError: some were committed, and none is valid.
        StorageError: the storage refuses for a reason that may pass.
    """
    folder = saver.folder
    _recover(saver)
    for path in reversed(names.committed(folder)):
        try:
            return saved.read(path, with_training)
        except CheckpointError as error:
            _set_aside(path, error, disk)
    if damaged := names.committed(folder) + names.bad(folder):
        raise NoCheckpointError(
            f"{folder}: none of its {len(damaged)} checkpoints is valid; bring one back from a copy, or begin a new run"
        )
    return None


def _recover(saver: Saver) -> None:
    """Tidy up where anything is; on storage that can only be read, what can be read is used as it is."""
    if not saver.folder.is_dir():
        return
    try:
        saver.recover()
    except OSError as error:
        logger.warning(f"{saver.folder}: cannot be tidied up ({error.strerror}); what is valid in it is used")


def _set_aside(path: Path, reason: CheckpointError, disk: Disk) -> None:
    apart = names.apart(path, "bad")
    try:
        disk.rename(path, apart)
        disk.fsync_folder(path.parent)
    except OSError as error:
        logger.warning(f"{reason}; the one before it is used; it cannot be renamed ({error.strerror})")
        return
    logger.warning(f"{reason}; it is now {apart.name}, and the one before it is used")
