"""Going back to a chosen checkpoint of a run: all that came after it is taken away, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from pipeline.checkpoint import names
from pipeline.checkpoint.rewind import after, set_aside, verify
from pipeline.errors import ConfigError, one_of
from pipeline.resuming.before import Before
from pipeline.resuming.standing import DONE
from pipeline.run_directory import RunDirectory
from pipeline.storage import storing

_NUMBERS = ("metrics.jsonl", "timing.jsonl")


def rewind(directory: RunDirectory, checkpoint: Path, runners: Sequence[str], before: Before) -> None:
    """Make a checkpoint the newest of the run, as if the run had been interrupted there.

    The runners after that of the checkpoint begin again. If the process ends on the way, what is left is the run as it
    was interrupted at a later moment.

    Args:
        directory: the run directory, which is locked.
        checkpoint: ``<run directory>/<runner>/checkpoints/step-…``.
        runners: those of the run, in order.
        before: takes what came after it, but for checkpoints, which may be on another disk.

    Raises:
        ConfigError: the run has no such runner.
        NoCheckpointError: the checkpoint is damaged; nothing has changed.
        StorageError: the storage refuses.
    """
    runner = checkpoint.parent.parent.name
    if runner not in runners:
        raise ConfigError(f"{checkpoint}: the run has no runner '{runner}'{one_of(runner, runners)}")
    verify(checkpoint)
    # From the end on: what is left at any moment goes together.
    for later in reversed(runners[runners.index(runner) + 1 :]):
        _begin_again(directory, later, before)
    newer = after(checkpoint)
    if newer or (directory.path / runner / DONE).exists():
        for name in _NUMBERS:
            before.copy(Path(runner, name))
    for name in (DONE, "results.json"):
        before.move(Path(runner, name))
    _set_aside(newer)
    if before.folder:
        logger.warning(f"going back to {checkpoint}: numbers and results of what came after it are in {before.folder}")


def _begin_again(directory: RunDirectory, runner: str, before: Before) -> None:
    """Take away what a runner has made: first that it is done, so that it is never left out without it."""
    folder = directory.path / runner
    with storing(folder):
        made = [each for each in folder.iterdir() if each.name != "checkpoints"] if folder.is_dir() else []
    for each in sorted(made, key=lambda path: path.name != DONE):
        before.move(each.relative_to(directory.path))
    _set_aside(names.committed(folder / "checkpoints"))


def _set_aside(checkpoints: Sequence[Path]) -> None:
    """The newest first, so that those that are left have no gap."""
    for path in reversed(checkpoints):
        logger.warning(f"{path}: comes after what the run goes on from; it is now {set_aside(path).name}")
