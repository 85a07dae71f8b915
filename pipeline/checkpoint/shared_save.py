"""A checkpoint that several ranks write together: what they tell each other, through the store alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.checkpoint import storage
from pipeline.checkpoint.layout import FileEntry
from pipeline.checkpoint.storage import Buffer, Disk
from pipeline.distributed.world import current_world
from pipeline.errors import StorageError

# Name -> what gives the parts of that file.
Contents = Mapping[str, Callable[[], list[Buffer]]]

# All ranks save in the same order, whichever Checkpointer it is.
_numbers = count()


class SharedSave:
    """One save, in two phases: each rank writes its files and reports them, then rank 0 commits the whole and says so.

    It may run in a thread, where no collective may be called: it has a connection of its own to the store.

    Args:
        name: of the checkpoint.
    """

    def __init__(self, name: str) -> None:
        self.world, self._key = current_world().in_thread(), f"save/{next(_numbers)}/{name}"

    def save(self, commit: Callable[[], bool], folder: Path, contents: Contents, disk: Disk) -> bool:
        """Save; all ranks return the same, whether the checkpoint is a new one, or raise the same.

        Args:
            commit: for rank 0: writes the checkpoint, with ``others_write`` around its own files.
            folder: of the checkpoints.
            contents: for the others: of their files.
            disk: what writes those.

        Raises:
            StorageError: the storage of one of them refuses.
            PeerError: one of them has failed.
        """
        if self.world.rank:
            return self._take_part(folder, contents, disk)
        try:
            is_new = commit()
        except StorageError as error:
            # Those who wait to begin need not; if they have begun, they have reported too.
            self._put("folder", None)
            self._put("outcome", [str(error), False])
            raise
        self._put("outcome", [None, is_new])
        return is_new

    @contextmanager
    def others_write(self, folder: Path) -> Iterator[dict[str, FileEntry]]:
        """In the block, the others write into a folder; afterwards nobody does, and the files have theirs too.

        Raises:
            StorageError: the storage of one of them refuses.
        """
        files: dict[str, FileEntry] = {}
        self._put("folder", folder.name)
        try:
            yield files
        finally:
            # Also where this rank has failed: what another is writing, nobody may remove.
            reports = [self._get(f"report/{rank}") for rank in range(1, self.world.size)]
        for error, written in reports:
            if error:
                raise StorageError(error)
            files |= {name: FileEntry(*entry) for name, entry in written.items()}

    def _take_part(self, folder: Path, contents: Contents, disk: Disk) -> bool:
        world, error, written = self.world, None, dict[str, tuple[str, int]]()
        if temporary := self._get("folder"):
            try:
                for name, make in contents.items():
                    written[name] = storage.write_file(folder / temporary / name, make(), disk)
            except OSError as refusal:
                error = f"rank {world.rank}: {storage.refusal(folder / temporary, refusal, '')}"
            self._put(f"report/{world.rank}", [error, written])
        error, is_new = self._get("outcome")
        if world.store.add(f"{self._key}/read", 1) == world.size - 1:
            for name in ("folder", "outcome", "read", *(f"report/{rank}" for rank in range(1, world.size))):
                world.store.delete_key(f"{self._key}/{name}")
        if error:
            raise StorageError(error)
        return bool(is_new)

    def _put(self, name: str, value: Any) -> None:
        self.world.put(f"{self._key}/{name}", value)

    def _get(self, name: str) -> Any:
        return self.world.get(f"{self._key}/{name}")
