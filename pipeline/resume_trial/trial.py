"""The runs that are compared: one that nothing interrupts, and one that is killed and resumed, each in its own processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checkpoint import names
from pipeline.config import yaml_text
from pipeline.config.load import Config
from pipeline.errors import ConfigError, ExitCode, PipelineError
from pipeline.resume_trial.witness import ORDERS, Orders
from pipeline.resuming.reopening import NEVER
from pipeline.run_directory import RunDirectory

WITNESS = "pipeline.resume_trial.witness:Witness"
_ELSEWHERE = ("save_checkpoint_path", "save_inference_path")


class ChildError(PipelineError):
    """A run that ended otherwise than it was to.

    Args:
        message: says which.
        returncode: what its process left with.
    """

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.exit_code = next((code for code in ExitCode if code == returncode != 0), ExitCode.FAILED)


@dataclass(frozen=True)
class Kill:
    """The end of a process.

    Attributes:
        runner: which was running.
        at: after which iteration.
        left: the iteration of the newest checkpoint that it left, with which the next one goes on; None: it left none.
    """

    runner: str
    at: int
    left: int | None


@dataclass(frozen=True)
class Ended:
    """A run that is through.

    Attributes:
        directory: its folder.
        notes: what the witness noted, a file for each of its processes.
        kills: how all but the last of these ended.
    """

    directory: Path
    notes: list[Path]
    kills: list[Kill] = field(default_factory=list)


class Trial:
    """Runs a config in processes of their own.

    Args:
        config: the config, whose train runners are run.
        folder: where all of it goes.

    Attributes:
        runners: the names of the train runners.

    Raises:
        ConfigError: there is no train runner, or nothing is kept of it.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        chosen = [runner for runner in config.runners if runner.kind == "train"]
        self.runners = [runner.name for runner in chosen]
        if not chosen:
            raise ConfigError(f"{config.path}: has no runner that trains; name a config, or a mode, with one")
        for runner in chosen:
            if runner.debug:
                address = f"runner.{runner.name}.debug"
                nothing = (
                    "nothing is kept of a debug run, to be compared; leave it out, and shorten the run with max_steps"
                )
                raise ConfigError([config.origin(address).fault(address, nothing)])
        self._written_elsewhere = [
            f"runner.{runner.name}.{key}=null" for runner in chosen for key in _ELSEWHERE if getattr(runner, key, None)
        ]

    def straight(self) -> Ended:
        """The run that nothing interrupts.

        Raises:
            ChildError: it failed.
        """
        notes = self.folder / "straight.jsonl"
        code = self._run("straight", NEVER, notes)
        if code:
            raise ChildError(f"{self.config.path}: the straight run left with {_left(code)}; mend that first", code)
        return Ended(self._directory("straight"), [notes])

    def interrupted(self, kills: Sequence[tuple[str, int]]) -> Ended:
        """The run that is killed in these runners after these iterations, and resumed each time.

        Raises:
            ChildError: a process ended otherwise.
        """
        done: list[Kill] = []
        notes = [self.folder / f"interrupted-{count}.jsonl" for count in range(len(kills) + 1)]
        for (runner, at), each in zip(kills, notes[:-1], strict=True):
            code = self._run("interrupted", self._resume(done), each, runner, at)
            if code != -signal.SIGKILL:
                what = f"was to be killed in {runner} after iteration {at}, and left with {_left(code)} before"
                raise ChildError(f"{self.config.path}: the interrupted run {what}; it is not the straight one", code)
            done.append(Kill(runner, at, last_step(self._directory("interrupted"), runner)))
        code = self._run("interrupted", self._resume(done), notes[-1])
        if code:
            raise ChildError(f"{self.config.path}: the run that was resumed left with {_left(code)}; see above", code)
        return Ended(self._directory("interrupted"), notes, done)

    def _resume(self, kills: Sequence[Kill]) -> str:
        """What the next process of the run that is interrupted is to do."""
        return str(self._directory("interrupted")) if kills else NEVER

    def _run(self, name: str, resume: str, notes: Path, runner: str | None = None, at: int = 0) -> int:
        """One process of one of the two; what it left with, or the negative signal."""
        plugins = self.config.tree.child("plugins")
        # The first of them, so that it sees each batch as the loader gave it.
        chosen = [WITNESS, *(plugins.plain(expanded=False) if plugins else ())]
        values = {"output_dir": str(self.folder / name), "mode": self.runners, "plugins": chosen}
        ours = [f"{key}={yaml_text.one_line(value)}" for key, value in values.items()]
        overrides = [f"--override={each}" for each in (*self.config.overrides, *self._written_elsewhere, *ours)]
        command = [sys.executable, "-m", "pipeline", "run", "--quiet", "--resume", resume]
        command += [f"--model={self.config.path}", *overrides]
        orders = json.dumps(Orders(str(notes), runner, at)._asdict())
        # What it prints is not what was asked for here.
        return subprocess.run(command, env={**os.environ, ORDERS: orders}, stdout=2, check=False).returncode

    def _directory(self, name: str) -> Path:
        found = RunDirectory.newest(self.folder / name, self.config.name)
        assert found, "a run that has begun its first batch has a directory"
        return found.path


def iterations(directory: Path, runner: str) -> int:
    """How many a runner that is through has made."""
    return int(json.loads((directory / runner / "done.json").read_bytes())["iteration"])


def last_step(directory: Path, runner: str) -> int | None:
    """The iteration of the newest checkpoint of a runner; None: there is none."""
    found = names.committed(directory / runner / "checkpoints")
    return names.step_of(found[-1]) if found else None


def _left(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
