"""Where the checkpoints of a runner are: in the run directory, or where ``save_checkpoint_path`` says and a link leads."""

from __future__ import annotations

import os
from pathlib import Path

from loguru import logger

from pipeline.checkpoint import files
from pipeline.config.schema import RunnerSchema
from pipeline.errors import StorageError

NAME = "checkpoints"


def own_folder(path: str, run_dir: Path, runner: RunnerSchema) -> Path | None:
    """The folder of one runner of one run, below one that other runs may be given too.

    Returns:
        None for a debug run of which nothing is kept: all of it is in its temporary run directory.
    """
    kept = not runner.debug or runner.debug_persistently
    return Path(path) / run_dir.name / runner.name if kept else None


def place(run_dir: Path, runner: RunnerSchema) -> None:
    """Have ``<run_dir>/<runner>/checkpoints`` lead to where the runner's checkpoints go, if that is elsewhere.

    A run that was begun goes on where it began.

    Raises:
        StorageError: the folder cannot be made, is not there any more, or belongs to another run.
    """
    path = runner.save_checkpoint_path
    wanted = own_folder(path, run_dir, runner) if path else None
    link = run_dir / runner.name / NAME
    try:
        if link.is_symlink():
            _go_on(link, wanted, run_dir.name)
        elif wanted and os.path.lexists(link):
            logger.warning(f"save_checkpoint_path has changed, and the run goes on where it began: in {link}")
        elif wanted:
            _make(wanted, link)
    except OSError as error:
        what = f"{error.filename or wanted}: the checkpoints cannot go there: {error.strerror}"
        raise StorageError(f"{what}; free or repair the storage, or choose another save_checkpoint_path") from error


def refuse_copy(run_dir: Path, original: Path, runner_name: str) -> None:
    """See that a run directory is not the copy of another one whose checkpoints it would write into.

    Args:
        run_dir: the run directory.
        original: where the run was when it last began or went on; the same, if nobody has moved or copied it.
        runner_name: of the runner.

    Raises:
        StorageError: it is.
    """
    link, its = (each / runner_name / NAME for each in (run_dir, original))
    if not (link.is_symlink() and its.exists()) or os.path.samefile(run_dir, original):
        return
    if link.exists() and os.path.samefile(link, its):
        raise StorageError(
            f"{link}: leads to {os.readlink(link)}, into which the run in {original} writes, and {run_dir} is a copy of "
            f"that; go on with {original}, or put a copy of the folder in the place of the link"
        )


def _go_on(link: Path, wanted: Path | None, run: str) -> None:
    there = Path(os.readlink(link))
    if not link.is_dir():
        raise StorageError(
            f"{link}: leads to {there}, which is not there; mount its disk or bring it back, or begin a new run"
        )
    if there.parent.name != run:
        raise StorageError(
            f"{link}: leads to {there}, the folder of the run {there.parent.name}; give the run directory that name "
            "again, or put a copy of the folder in the place of the link"
        )
    if there != wanted:
        logger.warning(f"save_checkpoint_path has changed, and the run goes on where it began: in {there}")


def _make(folder: Path, link: Path) -> None:
    """First the folder, and then what leads to it: where there is a link, the disk has the folder."""
    files.make_way(folder, files.DISK)
    files.sync_way(folder, files.DISK)
    link.symlink_to(folder)
    files.sync_way(link.parent, files.DISK)
