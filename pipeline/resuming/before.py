"""``before-<UTC stamp>-<id>/``: what stood in a run directory before a resumption put something else in its place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.checkpoint import files
from pipeline.run_directory import RunDirectory, new_folder
from pipeline.storage import storing


class Before:
    """The folder for what one resumption replaces; it is made with the first thing that goes there.

    Args:
        directory: the run directory, which is locked.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.folder: Path | None = None

    def copy(self, name: Path) -> None:
        """Keep a copy of a file that is about to be replaced; one that is not there is none.

        Raises:
            StorageError: the storage refuses.
        """
        source = self.directory.path / name
        if source.is_file() and not source.is_symlink():
            with storing(source):
                shutil.copyfile(source, self._place(name))

    def move(self, name: Path) -> None:
        """Take a file or folder away, whatever it is, if it is there; the disk has it when this returns.

        Raises:
            StorageError: the storage refuses.
        """
        source = self.directory.path / name
        if not os.path.lexists(source):
            return
        with storing(source):
            target = self._place(name)
            files.DISK.rename(source, target)
            # First where it went: between the two it may be in both places, but never in none.
            files.DISK.fsync_folder(target.parent)
            files.DISK.fsync_folder(source.parent)

    def _place(self, name: Path) -> Path:
        if self.folder is None:
            self.folder = new_folder(self.directory.path, "before-")
        target = self.folder / name
        files.make_folder(target.parent)
        return target
