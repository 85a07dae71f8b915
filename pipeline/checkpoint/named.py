"""Which checkpoints, or which file of weights, ``init_model_path`` names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from pipeline.checkpoint import foreign, manifest, names, numbers, quarantine, saved
from pipeline.checkpoint.files import DISK
from pipeline.checkpoint.location import NAME
from pipeline.checkpoint.saved import Saved
from pipeline.checkpoint.saver import Saver
from pipeline.config.values import BestSettings
from pipeline.errors import CheckpointError, NoCheckpointError


@dataclass(frozen=True)
class Trained:
    """A train runner of this run that is over.

    Attributes:
        name: its name.
        folder: of its checkpoints, in which nobody writes any more.
        keep_best: which of them is the best; None: nobody has asked.
    """

    name: str
    folder: Path
    keep_best: BestSettings | None

    def newest(self, with_training: bool = False) -> Saved:
        """Its newest checkpoint that is valid; damaged ones are set aside.

        Raises:
            NoCheckpointError: it has saved some, and none is valid.
            CheckpointError: it has saved none.
        """
        found = quarantine.newest_valid(Saver(self.folder, DISK), DISK, with_training)
        if found is None:
            none = f"{self.folder}: the runner '{self.name}' saved no checkpoint"
            raise CheckpointError(f"{none}; let its runner stage save one, or set init_model_path")
        return found

    def best(self) -> Saved:
        """The best of its checkpoints that is valid.

        Raises:
            CheckpointError: nothing says which is the best, or none of the best is valid.
        """
        if self.keep_best is None:
            raise CheckpointError(
                f"runner.{self.name}: has no keep_best, so none of its checkpoints is the best; add it"
            )
        known = self._best()
        if not known:
            metric = self.keep_best.metric
            raise CheckpointError(f"{self.folder}: '{metric}' was never a number, so none is the best; name `last`")
        return first_valid(known)

    def _best(self) -> list[Path]:
        """Those that were kept as the best, best first; of a runner stage that keeps none so, that with the best number."""
        assert self.keep_best
        loop = (self.newest(with_training=True).training or {}).get("loop") or {}
        if best := loop.get("validation", {}).get("best"):
            return [self.folder / names.name_of(iteration) for _, iteration in best["kept"]]
        found = numbers.best(names.committed(self.folder), self.keep_best.metric, self.keep_best.mode)
        return [found] if found else []


def read(path: Path) -> Saved:
    """A checkpoint without what only training needs, or a file of weights, which counts nothing.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if path.is_dir():
        return saved.read(path, with_training=False)
    return Saved(path, {}, {}, {path.name: foreign.read(path)}, None)


def tried(path: Path) -> Saved | None:
    """The same of one among others: where it is missing or damaged the log says so, and it is left out."""
    try:
        return read(path)
    except CheckpointError as error:
        logger.warning(f"{error}; this one is left out")
        return None


def first_valid(paths: Sequence[Path]) -> Saved:
    """The first of some checkpoints that is valid.

    Raises:
        NoCheckpointError: none is.
    """
    found = next((each for each in map(tried, paths) if each), None)
    if found is None:
        where = f"{paths[0].parent}: none of {', '.join(each.name for each in paths[:5])}{', …' if paths[5:] else ''} is valid"
        raise NoCheckpointError(f"{where}; bring one back from a copy, or name another in init_model_path")
    return found


def named(path: Path) -> list[Path]:
    """The checkpoints in a folder by step, or the one checkpoint or file that a path is itself.

    A folder may be one of checkpoints, that of a runner, or a run directory in which one runner has checkpoints.

    Raises:
        CheckpointError: there are none, or those of several runners.
    """
    if not path.is_dir() or names.step_of(path) is not None or os.path.lexists(path / manifest.NAME):
        return [path]
    folders = [each for each in (path, path / NAME) if names.committed(each)][:1]
    folders = folders or sorted(each for each in path.glob(f"*/{NAME}") if names.committed(each))
    if not folders:
        raise CheckpointError(
            f"{path}: holds no checkpoint; name a step-… folder, a folder of them, or a file of weights"
        )
    if len(folders) > 1:
        which = ", ".join(each.parent.name for each in folders)
        raise CheckpointError(f"{path}: holds checkpoints of several runners ({which}); name the folder of one of them")
    # One that was about to take the place of another of its step counts only where that is gone.
    by_step = {names.step_of(each): each for each in reversed(names.committed(folders[0]))}
    return list(reversed(by_step.values()))
