"""A checkpoint that several ranks write together: what they tell each other, through the store alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.checkpoint import storage
from pipeline.checkpoint.layout import FileEntry
from pipeline.distributed.world import ANSWER, current_world
from pipeline.errors import StorageError

# All ranks save in the same order, whichever Checkpointer it is.
_numbers = count()


class SharedSave:
    """One save, in two phases: each rank writes its files and reports them, then rank 0 commits the whole and says so.

    It may run in a thread, where no collective may be called: it has a connection of its own to the store.
    """

    def __init__(self) -> None:
        self.world, self.key = current_world().in_thread(), f"save/{next(_numbers)}"

    def run(self, commit: Callable[[], bool], write: Callable[[Path], dict[str, FileEntry]]) -> bool:
        """Save; all ranks return the same, whether the checkpoint is a new one, or raise the same.

        Args:
            commit: for rank 0: writes the checkpoint, for which it calls ``files_of_others``.
            write: for the others: writes their files into a folder.

        Raises:
            StorageError: the storage of one of them refuses.
            PeerError: one of them has failed.
        """
        if self.world.rank:
            return self._take_part(write)
        try:
            is_new = commit()
        except StorageError as error:
            # Those who wait to begin need not; if they have begun, they have reported too.
            self.world.put(f"{self.key}/folder", None)
            self.world.put(f"{self.key}/outcome", str(error))
            raise
        self.world.put(f"{self.key}/outcome", is_new)
        return is_new

    def files_of_others(self, folder: Path) -> dict[str, FileEntry]:
        """Have the others write into a folder; when this returns or raises, they have done so.

        Raises:
            StorageError: the storage of one of them refuses.
        """
        self.world.put(f"{self.key}/folder", str(folder))
        reports = [self.world.get(f"{self.key}/report/{rank}", ANSWER) for rank in range(1, self.world.size)]
        if refusals := [report for report in reports if isinstance(report, str)]:
            raise StorageError(refusals[0])
        return {name: FileEntry(*entry) for files in reports for name, entry in files.items()}

    def _take_part(self, write: Callable[[Path], dict[str, FileEntry]]) -> bool:
        world, key = self.world, self.key
        if folder := world.get(f"{key}/folder", ANSWER):
            try:
                report: Any = write(Path(folder))
            except OSError as error:
                report = f"rank {world.rank}: {storage.refusal(folder, error, '')}"
            world.put(f"{key}/report/{world.rank}", report)
        outcome: str | bool = world.get(f"{key}/outcome", ANSWER)
        if world.store.add(f"{key}/read", 1) == world.size - 1:
            # The last one to read it.
            for name in ("folder", "outcome", "read", *(f"report/{rank}" for rank in range(1, world.size))):
                world.store.delete_key(f"{key}/{name}")
        if isinstance(outcome, str):
            raise StorageError(outcome)
        return outcome
