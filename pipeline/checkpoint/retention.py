"""Which checkpoints are kept, and how the others go."""

from __future__ import annotations

from pathlib import Path

from loguru import logger

from pipeline.checkpoint import manifest, names, saved
from pipeline.checkpoint.files import Disk
from pipeline.errors import CheckpointError, StorageError

FEWEST = 2
"""So many of the newest are always kept: if one turns out damaged, there is another."""


class Retention:
    """Removes checkpoints that are no longer wanted.

    Args:
        keep_last: how many of the newest stay, ``FEWEST`` at least; None: all.
        disk: what removes.
    """

    def __init__(self, keep_last: int | None, disk: Disk) -> None:
        self.keep_last = keep_last
        self.disk = disk
        self._verified: set[str] = set()

    def apply(self, saved_now: Path, protected: frozenset[Path]) -> None:
        """Remove what is older than the newest valid ones; what is not valid neither counts nor goes.

        Args:
            saved_now: the checkpoint that was just committed, which stays.
            protected: those that stay besides.
        """
        if self.keep_last is None:
            return
        self._verified.add(saved_now.name)
        try:
            valid = [path for path in reversed(names.committed(saved_now.parent)) if self._is_valid(path)]
        except StorageError as error:
            # The save is done: that nothing can be removed now is no failure of it.
            logger.warning(f"{error}; no checkpoint is removed this time")
            return
        for path in valid[self.keep_last :]:
            if path != saved_now and path not in protected:
                self._remove(path)

    def _is_valid(self, path: Path) -> bool:
        """Whether a checkpoint is verified; all of it is read once, its sizes every time."""
        try:
            if path.name in self._verified:
                manifest.listed(path)
            elif saved.problems(path):
                return False
        except (CheckpointError, StorageError):
            return False
        self._verified.add(path.name)
        return True

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint: first its name, so that one of which half is gone is never seen."""
        apart = names.apart(path, "del")
        try:
            self.disk.rename(path, apart)
            self.disk.fsync_folder(path.parent)
            self.disk.remove(apart)
        except OSError as error:
            logger.warning(f"{path}: cannot be removed ({error.strerror}); what is left of it goes with a later start")
