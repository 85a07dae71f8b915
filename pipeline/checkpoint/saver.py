"""How a checkpoint gets to the disk: whenever the process or the machine stops, there is the one before or this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from loguru import logger

from pipeline.checkpoint import files, manifest, names, saved
from pipeline.checkpoint.files import Buffer, Disk
from pipeline.checkpoint.manifest import Listed
from pipeline.errors import CheckpointError, StorageError

Contents = Mapping[str, Callable[[], list[Buffer]]]
"""Name -> what gives the parts of that file."""


class Saver:
    """Writes the checkpoints of one folder.

    Args:
        folder: where they are; made with the first.
        disk: what writes.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self.disk = disk
        self._tidy = False

    def save(self, name: str, contents: Contents) -> bool:
        """Write a checkpoint; when this returns the disk has it.

        One of the same name stays if it has the same content, and else makes place without a moment in which there is none.

        Returns:
            Whether it is a new one.

        Raises:
            StorageError: the storage refuses; what was saved before is there still.
        """
        final = self.folder / name
        parts = {each: make() for each, make in contents.items()}
        try:
            if not self._tidy:
                self.recover()
            if _same(final, parts):
                return False
            self._tidy = False
            self._write(final, parts)
        except OSError as error:
            raise StorageError(f"{final}: cannot be saved: {error.strerror}; free or repair the storage") from error
        self._tidy = True
        return True

    def recover(self) -> None:
        """Finish or undo what a process that ended, or a save that failed, has left; only whoever saves here may ask for it.

        Raises:
            OSError: the storage refuses.
        """
        files.make_way(self.folder, self.disk)
        # Whoever made these folders and names may have ended before the disk had them.
        files.sync_way(self.folder, self.disk)
        for path in names.committed(self.folder):
            if path.suffix == names.NEW and not saved.problems(path):
                self._take_place(path)
        for path in names.left_behind(self.folder):
            self.disk.remove(path)
        self._tidy = True

    def _write(self, final: Path, parts: Mapping[str, list[Buffer]]) -> None:
        temporary = names.apart(final, "tmp")
        target = final.with_name(final.name + names.NEW) if os.path.lexists(final) else final
        try:
            self.disk.mkdir(temporary)
            written = {}
            for name, content in parts.items():
                written[name] = Listed(*files.write_file(temporary / name, content, self.disk))
            self.disk.fsync(self.disk.write(temporary / manifest.NAME, [manifest.encode(written)]))
            self.disk.fsync_folder(temporary)
            if target != final and os.path.lexists(target):
                self.disk.rename(target, names.apart(target, "bad"))
            files.move_into_place(temporary, target, self.disk)
        except BaseException:
            self._discard(temporary, target)
            raise
        if target != final:
            self._take_place(target)

    def _take_place(self, new: Path) -> None:
        """Give a new checkpoint the name of the one whose place it takes: one of the two is there at every moment."""
        final = new.with_name(new.name.removesuffix(names.NEW))
        old = names.apart(final, "del")
        if os.path.lexists(final):
            self.disk.rename(final, old)
        files.move_into_place(new, final, self.disk)
        if os.path.lexists(old):
            self.disk.remove(old)

    def _discard(self, temporary: Path, target: Path) -> None:
        """Leave nothing of an attempt that failed, as far as the storage lets us; the rest is removed by ``recover``."""
        try:
            if not os.path.lexists(temporary):
                # It got its name, but the disk does not have that for sure, and asked again it would say yes.
                self.disk.rename(target, temporary)
            self.disk.remove(temporary)
        except OSError as error:
            with suppress(FileNotFoundError):
                temporary.lstat()
                logger.warning(f"{temporary}: cannot be removed ({error.strerror}); the next save removes it")


def _same(path: Path, parts: Mapping[str, list[Buffer]]) -> bool:
    """Whether a checkpoint is there and has this content."""
    if not os.path.lexists(path):
        return False
    try:
        return manifest.listed(path) == {name: _listed(content) for name, content in parts.items()}
    except CheckpointError:
        return False


def _listed(content: list[Buffer]) -> Listed:
    return Listed(files.DISK.sha256(content), sum(map(len, content)))
