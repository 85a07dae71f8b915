"""The folder of checkpoints: commit, by one or several ranks, recovery, quarantine of damaged ones, retention."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from loguru import logger

from pipeline.checkpoint import layout, reader, storage
from pipeline.checkpoint.layout import FOLDER, FileEntry
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.storage import DISK, Buffer, Disk
from pipeline.config.schema import RunnerSchema
from pipeline.distributed.world import ANSWER, current_world
from pipeline.errors import CheckpointError, NoCheckpointError, StorageError


def own_folder(path: str | None, run_dir: Path, runner: RunnerSchema) -> Path | None:
    """The folder of one runner of one run, below a folder that several runs may share.

    Returns:
        None without a path, and for a debug run of which nothing is kept: all of it is in its temporary run directory.
    """
    kept = not runner.debug or runner.debug_persistently
    return Path(path) / run_dir.name / runner.name if path and kept else None


def link_checkpoint_dir(run_dir: Path, runner: RunnerSchema) -> None:
    """Link ``<run_dir>/<runner>/checkpoints`` to the runner's checkpoint folder, if that is elsewhere.

    A run that was begun goes on where it began.

    Raises:
        StorageError: the folder cannot be made, is not there any more, or belongs to another run.
    """
    wanted = own_folder(runner.save_checkpoint_path, run_dir, runner)
    link = run_dir / runner.name / FOLDER
    with storage.storing(wanted or link, "choose another save_checkpoint_path"):
        if link.is_symlink():
            _go_on(link, wanted, run_dir.name)
        elif wanted and os.path.lexists(link):
            logger.warning(f"save_checkpoint_path has changed, and the run goes on where it began: in {link}")
        elif wanted:
            # First the folder, and then what leads to it: where there is a link, the disk has the folder.
            storage.make_folder(wanted, storage.DISK)
            link.symlink_to(wanted)
            storage.sync_folders(link.parent, storage.DISK)


def refuse_copy(run_dir: Path, original: Path, runner_name: str) -> None:
    """Raise if a run directory is a copy that would write into the checkpoints of the original.

    Args:
        run_dir: the run directory.
        original: where the run was when it last began or went on; the same, if nobody has moved or copied it.
        runner_name: of the runner.

    Raises:
        StorageError: it is.
    """
    link, its = (folder / runner_name / FOLDER for folder in (run_dir, original))
    if not (link.is_symlink() and its.exists()) or os.path.samefile(run_dir, original):
        return
    if link.exists() and os.path.samefile(link, its):
        what = f"{link}: leads to {os.readlink(link)}, into which the run in {original} writes, and {run_dir} is a copy of that"
        raise StorageError(f"{what}; go on with {original}, or put a copy of the folder in the place of the link")


def _go_on(link: Path, wanted: Path | None, run: str) -> None:
    target = Path(os.readlink(link))
    # Raises if it is not there.
    layout.committed_checkpoints(link)
    if target.parent.name != run:
        what = f"{link}: leads to {target}, the folder of the run {target.parent.name}"
        raise StorageError(f"{what}; give the run directory that name again, or put a copy in the place of the link")
    if target != wanted:
        logger.warning(f"save_checkpoint_path has changed, and the run goes on where it began: in {target}")


# Gives the paths of some checkpoints.
Choose: TypeAlias = Callable[[], Iterable[Path]] | None


def newest_valid(
    writer: CheckpointWriter, with_training: bool = True, choose: Choose = None
) -> LoadedCheckpoint | None:
    """The valid checkpoint of the highest step; None if none was ever committed.

    Of several processes all call it: rank 0 looks for it, and the others read what it has found.

    Args:
        writer: of the folder, which nobody else is writing to.
        with_training: False reads and verifies the weights and numbers alone.
        choose: gives the paths of those to look at, the best first, in a folder to which others may write; None: all
            from which a training can go on.

    Raises:
        NoCheckpointError: some were committed, and none is valid.
        StorageError: the storage refuses for a reason that may pass.
    """
    world = current_world()
    checkpoint = world.attempt(lambda: None if world.rank else _find_valid(writer, with_training, choose))
    path = world.broadcast(checkpoint and checkpoint.path)
    # Nobody goes on, and changes what is in the folder, before all have read it.
    return world.attempt(lambda: reader.read_checkpoint(path, with_training) if path and world.rank else checkpoint)


def _find_valid(writer: CheckpointWriter, with_training: bool, choose: Choose) -> LoadedCheckpoint | None:
    folder = writer.folder
    try:
        if folder.is_dir() and not choose:
            writer.recover()
    except OSError as error:
        # On storage that can only be read, what can be read is used as it is.
        logger.warning(f"{folder}: cannot be tidied up ({error.strerror}); what is valid in it is used")
    committed = layout.committed_checkpoints(folder)
    paths = [*(choose() if choose else filter(layout.is_resumable, reversed(committed)))]
    for path in paths:
        try:
            return reader.read_checkpoint(path, with_training)
        except CheckpointError as error:
            _set_aside(path, error, writer.disk)
    bad = layout.bad_checkpoints(folder)
    if paths or (bad and not (choose and committed)):
        what = f"{folder}: none of its {len(layout.committed_checkpoints(folder) + bad)} checkpoints is valid"
        raise NoCheckpointError(f"{what}; bring one back from a copy, or begin a new run")
    return None


def _set_aside(path: Path, reason: CheckpointError, disk: Disk) -> None:
    apart = layout.temporary_name(path, "bad")
    now = f"is now {apart.name}"
    try:
        storage.move_into_place(path, apart, disk)
    except OSError as error:
        now = f"cannot be renamed ({error.strerror})"
    logger.warning(f"{reason}; it {now}, and the one before it is used")


# So many of the newest are always kept: if one turns out damaged, there is another.
FEWEST = 2


def verify(path: Path) -> None:
    """Raise unless a checkpoint is as it was written.

    Raises:
        NoCheckpointError: it is damaged; the first fault is named.
        StorageError: the storage refuses for a reason that may pass.
    """
    if problems := reader.problems_of(path):
        raise NoCheckpointError(problems[0])


def later_checkpoints(path: Path) -> list[Path]:
    """The checkpoints that come after one in its folder, by step."""
    paths = layout.committed_checkpoints(path.parent)
    return paths[paths.index(path) + 1 :]


def quarantine(path: Path, disk: Disk = DISK) -> Path:
    """Rename a checkpoint, durably, to a name that nothing reads.

    Returns:
        The new path; to have the checkpoint again, rename it back.

    Raises:
        StorageError: the storage refuses.
    """
    target = layout.temporary_name(path, "later")
    with storage.storing(path, ""):
        storage.move_into_place(path, target, disk)
    return target


# Name -> the parts of that file, and what gives them.
Parts = Mapping[str, list[Buffer]]
Contents = Mapping[str, Callable[[], list[Buffer]]]


# All ranks save in the same order, whichever Checkpointer it is.
_numbers = count()


class SharedSave:
    """One save, in two phases: each rank writes its files and reports them, then rank 0 commits the whole and says so.

    It may run in a thread, where no collective may be called: it has a connection of its own to the store.
    """

    def __init__(self) -> None:
        self._lender = current_world()
        self.world, self.key = self._lender.in_thread(), f"save/{next(_numbers)}"

    def run(self, commit: Callable[[], bool], write: Callable[[Path], dict[str, FileEntry]]) -> bool:
        """Save; all ranks return the same, whether the checkpoint is a new one, or raise the same.

        Args:
            commit: for rank 0: writes the checkpoint, for which it calls ``files_of_others``.
            write: for the others: writes their files into a folder.

        Raises:
            StorageError: the storage of one of them refuses.
            PeerError: one of them has failed.
        """
        is_new = self._take_part(write) if self.world.rank else self._lead(commit)
        self._lender.reuse(self.world)
        return is_new

    def _lead(self, commit: Callable[[], bool]) -> bool:
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


class CheckpointWriter:
    """Writes the checkpoints of one folder, and removes old ones.

    Args:
        folder: where they are; made with the first.
        disk: what writes.
        keep_last: how many of the newest stay, ``FEWEST`` at least; None: all.
    """

    def __init__(self, folder: Path, disk: Disk = DISK, keep_last: int | None = None) -> None:
        self.folder, self.disk, self.keep_last = folder, disk, keep_last
        self._tidy = False
        self._verified: set[str] = set()

    def save(self, name: str, contents: Contents, shared: SharedSave | None = None) -> bool:
        """Write a checkpoint durably.

        One of the same name stays if it has the same content, and else makes place without a moment in which there is none.

        Args:
            name: of its folder.
            contents: of its files, but for those of other ranks.
            shared: with the other ranks, which write their own files; None: there are none.

        Returns:
            Whether it is a new one.

        Raises:
            StorageError: the storage refuses; what was saved before is there still.
        """
        parts = {name: make() for name, make in contents.items()}
        commit = partial(self._save, self.folder / name, parts, shared)
        return shared.run(commit, partial(self._write_files, parts)) if shared else commit()

    def _save(self, final: Path, parts: Parts, shared: SharedSave | None) -> bool:
        with storage.storing(final, ""):
            if not self._tidy:
                self.recover()
            self._tidy = False
            written = self._write(final, parts, shared)
        self._tidy = True
        return written

    def recover(self) -> None:
        """Finish or undo what a killed process or a failed save has left; only the owner of the folder may call it.

        Raises:
            OSError: the storage refuses.
        """
        # Those that are there too: whoever made these folders and names may have ended before the disk had them.
        storage.make_folder(self.folder, self.disk)
        for path in layout.committed_checkpoints(self.folder):
            if path.suffix == layout.NEW and not reader.problems_of(path):
                self._take_place(path)
        for path in layout.leftovers(self.folder):
            self.disk.remove(path)
        self._tidy = True

    def remove_old(self, saved_now: Path, protected: frozenset[Path]) -> None:
        """Remove what is older than the newest valid ones; invalid ones neither count nor are removed.

        Args:
            saved_now: the checkpoint that was just committed, which stays.
            protected: those that stay besides.
        """
        self._verified.add(saved_now.name)
        if self.keep_last is None:
            return
        try:
            valid = [path for path in reversed(layout.committed_checkpoints(self.folder)) if self.is_valid(path)]
        except StorageError as error:
            # The save is done: that nothing can be removed now is no failure of it.
            logger.warning(f"{error}; no checkpoint is removed this time")
            return
        for path in valid[self.keep_last :]:
            if path != saved_now and path not in protected:
                self.remove(path)

    def is_valid(self, path: Path) -> bool:
        """Whether a checkpoint is valid; it is read once, its sizes are checked every time."""
        with suppress(CheckpointError, StorageError):
            if layout.listed_files(path) and (path.name in self._verified or not reader.problems_of(path)):
                self._verified.add(path.name)
                return True
        return False

    def remove(self, path: Path) -> None:
        """Remove a checkpoint; it is renamed first, so that a half-removed one is never seen."""
        apart = layout.temporary_name(path, "del")
        try:
            storage.move_into_place(path, apart, self.disk)
            self.disk.remove(apart)
        except OSError as error:
            logger.warning(f"{path}: cannot be removed ({error.strerror}); what is left of it goes with a later start")

    def _write(self, final: Path, parts: Parts, shared: SharedSave | None) -> bool:
        """Write a checkpoint; False: there is an equal one."""
        temporary = layout.temporary_name(final, "tmp")
        target = final.with_name(final.name + layout.NEW) if os.path.lexists(final) else final
        try:
            self.disk.mkdir(temporary)
            others = shared.files_of_others(temporary) if shared else {}
            if target != final and _is_of(final, parts, others):
                self._discard(temporary, target)
                return False
            written = {**others, **self._write_files(parts, temporary)}
            self.disk.fsync(self.disk.write(temporary / layout.MANIFEST, [layout.encode_manifest(written)]))
            self.disk.fsync_folder(temporary)
            if target != final and os.path.lexists(target):
                self.disk.rename(target, layout.temporary_name(target, "bad"))
            storage.move_into_place(temporary, target, self.disk)
        except BaseException:
            self._discard(temporary, target)
            raise
        if target != final:
            self._take_place(target)
        return True

    def _write_files(self, parts: Parts, folder: Path) -> dict[str, FileEntry]:
        return {
            name: FileEntry(*storage.write_file(folder / name, content, self.disk)) for name, content in parts.items()
        }

    def _take_place(self, new: Path) -> None:
        """Rename a new checkpoint to the name of the one that it replaces; one of the two exists at every moment."""
        final = new.with_name(new.name.removesuffix(layout.NEW))
        old = layout.temporary_name(final, "del")
        if os.path.lexists(final):
            self.disk.rename(final, old)
        storage.move_into_place(new, final, self.disk)
        if os.path.lexists(old):
            self.disk.remove(old)

    def _discard(self, temporary: Path, target: Path) -> None:
        """Remove what a failed save has written, as far as the storage allows; ``recover`` removes the rest."""
        try:
            if not os.path.lexists(temporary):
                # It got its name, but the disk does not have that for sure, and asked again it would say yes.
                self.disk.rename(target, temporary)
            self.disk.remove(temporary)
        except OSError as error:
            with suppress(FileNotFoundError):
                temporary.lstat()
                logger.warning(f"{temporary}: cannot be removed ({error.strerror}); the next save removes it")


def _is_of(path: Path, parts: Parts, others: Mapping[str, FileEntry]) -> bool:
    """Whether a checkpoint has this content."""
    with suppress(CheckpointError):
        own = {name: FileEntry(DISK.sha256(content), sum(map(len, content))) for name, content in parts.items()}
        return layout.listed_files(path) == {**own, **others}
    return False
