"""The folder of a sweep: ``sweep.json``, which says what is swept and what has come of it, and a run directory for each trial."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from pipeline.checkpoint import storage
from pipeline.checkpoint.storage import storing
from pipeline.config.yaml_tree import MAX_BYTES
from pipeline.errors import CheckpointError, ConfigError
from pipeline.run.directory import SWEEPS, lock_held, new_folder

from .values import parse, titles

_FILE, _LOCK = "sweep.json", "sweep.lock"


class Trial(BaseModel):
    """A trial.

    Attributes:
        words: the overrides that are its own.
        state: ``waiting`` until it has ended, also while it runs; ``pruned`` is one that the pruner has ended.
        exit_code: of its process; below 0 it is the signal that has ended it.
        reason: why it has failed.
        value: the best of the metric over all validations; None where there is none.
        iteration: that of the value.
    """

    words: list[str]
    state: Literal["waiting", "done", "pruned", "failed"] = "waiting"
    exit_code: int | None = None
    reason: str = ""
    value: float | None = None
    iteration: int | None = None


class SweepState(BaseModel):
    """What ``sweep.json`` says.

    Attributes:
        version: of this form.
        folder: where the sweep was begun, to which paths of the command line are relative.
        config: its path, as it was typed.
        fixed: the overrides that all trials have.
        values: the words with values.
        search: who draws the trials; None: they are a grid.
        count: how many trials there will be.
        seed: of the search.
        metric, mode: by which trials are ranked.
        prune: whether a trial ends early that is worse than the others were.
        trials: those that were begun, by number; of a grid all.
    """

    version: Literal[1] = 1
    folder: str
    config: str
    fixed: list[str]
    values: list[str]
    search: Literal["random", "tpe"] | None = None
    count: int
    seed: int = 0
    metric: str
    mode: Literal["min", "max"]
    prune: bool = False
    trials: list[Trial] = []

    def own(self, number: int) -> dict[str, str]:
        """Address -> value, of what is a trial's own."""
        return dict(word.split("=", 1) for word in self.trials[number].words)

    def better(self, one: float, other: float) -> bool:
        """Whether a value of the metric is better than another."""
        return one < other if self.mode == "min" else one > other


class SweepFolder:
    """The folder of one sweep, locked.

    Attributes:
        path: absolute; ``<output_dir>/<config name>/sweeps/<UTC stamp>-<id>``.
        state: what its ``sweep.json`` says.
    """

    def __init__(self, path: Path, state: SweepState) -> None:
        self.path, self.state = path, state

    @classmethod
    @contextmanager
    def new(cls, output_dir: str, config_name: str, state: SweepState) -> Iterator[SweepFolder]:
        """Make a folder, and hold its lock in the block.

        Raises:
            StorageError: the storage refuses.
        """
        parent = Path(output_dir).resolve() / config_name / SWEEPS
        with storing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            path = new_folder(parent)
        with lock_held(path / _LOCK):
            folder = cls(path, state)
            folder.save()
            yield folder

    @classmethod
    @contextmanager
    def at(cls, path: Path) -> Iterator[SweepFolder]:
        """That of an earlier sweep; its lock is held in the block.

        Raises:
            ConfigError: it is none, or is damaged.
            LockedError: another process goes on with it.
        """
        file = path.resolve() / _FILE
        if not os.path.isfile(file):
            raise ConfigError(f"{path}: is no folder of a sweep, which has a {_FILE}; check the path")
        with lock_held(file.with_name(_LOCK)):
            try:
                state = SweepState.model_validate_json(storage.read_small(file, MAX_BYTES))
            except (CheckpointError, ValidationError) as error:
                what = f"{file}: is damaged ({str(error).splitlines()[0]})"
                raise ConfigError(f"{what}; begin the sweep anew; its runs are in {path}") from error
            yield cls(file.parent, state)

    def save(self) -> None:
        """Write ``sweep.json``: at any moment the disk has the old one or the new one.

        Raises:
            StorageError: the storage refuses.
        """
        storage.replace_durably(self.path / _FILE, self.state.model_dump_json(indent=2).encode() + b"\n")

    def run_dir(self, number: int) -> Path:
        """The run directory of a trial."""
        return self.path / f"trial-{number:03d}"

    def output(self, number: int) -> Path:
        """Where a trial prints."""
        return self.path / f"trial-{number:03d}.txt"

    @property
    def ended(self) -> int:
        """How many trials have ended."""
        return sum(trial.state != "waiting" for trial in self.state.trials)

    def titles(self) -> dict[str, str]:
        """Address -> how it is shown, of those that differ between trials: what is the same in all tells nothing."""
        return titles([own.address for own in parse(self.state.values) if len(own.texts) > 1])

    def ranking(self) -> list[int]:
        """The trials that are done, the best first; then the pruned ones likewise, and then the others, by number."""
        sign = 1 if self.state.mode == "min" else -1
        states = ("done", "pruned", "failed", "waiting")

        def key(number: int) -> tuple[int, bool, float]:
            trial = self.state.trials[number]
            return states.index(trial.state), trial.value is None, sign * (trial.value or 0.0)

        return sorted(range(len(self.state.trials)), key=key)
