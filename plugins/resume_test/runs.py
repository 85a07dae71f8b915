"""The two runs that are compared, one straight and one that is killed and resumed, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checkpoint import layout
from pipeline.config import yaml_tree
from pipeline.config.load import Config
from pipeline.errors import ConfigError, ExitCode, PipelineError
from pipeline.run.directory import DONE, RunDirectory
from pipeline.run.resume import NEVER
from pipeline.user_code.class_path import describe

from .recorder import OPTIONS, Recorder, RecorderOptions

_OTHER_FOLDERS = ("save_checkpoint_path", "save_inference_path")


class RunError(PipelineError):
    """A run that did not end as it had to.

    Args:
        message: says which.
        returncode: of its process.
    """

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.exit_code = next((code for code in ExitCode if code == returncode != 0), ExitCode.FAILED)


@dataclass(frozen=True)
class Kill:
    """The end of a process.

    Attributes:
        runner: which was running.
        iteration: after which it was killed.
        checkpoint: the iteration of its newest checkpoint, from which the next process goes on; None: there is none.
    """

    runner: str
    iteration: int
    checkpoint: int | None

    def __str__(self) -> str:
        """Where the run was killed, and where it went on."""
        if self.checkpoint is not None:
            return f"killed after iteration {self.iteration}, resumed after iteration {self.checkpoint}"
        anew = "no checkpoint was saved before, so it began anew; with a shorter save_interval it goes on"
        return f"killed after iteration {self.iteration}; {anew}"


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end.

    Attributes:
        directory: its folder.
        recordings: the file of the recorder for each of its processes.
        kills: how all but the last of these ended.
    """

    directory: Path
    recordings: list[Path]
    kills: list[Kill] = field(default_factory=list)


class Runs:
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
        runners = [runner for runner in config.runners if runner.kind == "train"]
        self.runners = [runner.name for runner in runners]
        if not runners:
            raise ConfigError(f"{config.path}: has no runner that trains; name a config, or a mode, with one")
        for address in (f"runner.{runner.name}.debug" for runner in runners if runner.debug):
            nothing = "nothing is kept of a debug run, to be compared; leave it out, and shorten the run with max_steps"
            raise ConfigError([config.origin(address).fault(address, nothing)])
        for runner in runners:
            if runner.max_time and not (runner.epochs or runner.max_steps or runner.optimizer_step_limit):
                address = f"runner.{runner.name}.max_time"
                alone = "two runs that a clock ends are not alike; say how long to train, with max_steps=20 behind the config"
                raise ConfigError([config.origin(address).fault(address, alone)])
        self._overrides = [
            *config.overrides,
            *(
                f"runner.{runner.name}.{key}=null"
                for runner in runners
                for key in (*_OTHER_FOLDERS, "max_time")
                if getattr(runner, key)
            ),
        ]

    def straight(self) -> FinishedRun:
        """The run that nothing interrupts.

        Raises:
            RunError: it failed.
        """
        recording = self.folder / "straight.jsonl"
        code = self._run("straight", NEVER, RecorderOptions(str(recording)))
        if code:
            raise RunError(f"{self.config.path}: the straight run left with {_exit(code)}; mend that first", code)
        return FinishedRun(self._directory("straight"), [recording])

    def interrupted(self, kills: Sequence[tuple[str, int]]) -> FinishedRun:
        """The run that is killed in these runners after these iterations, and resumed each time.

        Raises:
            RunError: a process ended otherwise.
        """
        done: list[Kill] = []
        recordings = [self.folder / f"interrupted-{count}.jsonl" for count in range(len(kills) + 1)]
        resume = NEVER
        for (runner, iteration), recording in zip(kills, recordings[:-1], strict=True):
            code = self._run("interrupted", resume, RecorderOptions(str(recording), runner, iteration))
            if code != -signal.SIGKILL:
                what = f"was to be killed in {runner} after iteration {iteration}, and left with {_exit(code)} before"
                raise RunError(f"{self.config.path}: the interrupted run {what}; it is not the straight one", code)
            directory = self._directory("interrupted")
            done.append(Kill(runner, iteration, last_step(directory, runner)))
            resume = str(directory)
        code = self._run("interrupted", resume, RecorderOptions(str(recordings[-1])))
        if code:
            raise RunError(f"{self.config.path}: the run that was resumed left with {_exit(code)}; see above", code)
        return FinishedRun(self._directory("interrupted"), recordings, done)

    def _run(self, name: str, resume: str, options: RecorderOptions) -> int:
        """One process of one of the two; what it left with, or the negative signal."""
        plugins = self.config.tree.child("plugins")
        values = {
            "output_dir": str(self.folder / name),
            "mode": self.runners,
            # The recorder first, so that it sees each batch as the loader gave it.
            "plugins": [describe(Recorder), *(plugins.plain(expanded=False) if plugins else ())],
        }
        overrides = [*self._overrides, *(f"{key}={yaml_tree.one_line(value)}" for key, value in values.items())]
        command = [sys.executable, "-m", "pipeline", "run", "--quiet", "--resume", resume]
        command += [f"--model={self.config.path}", *(f"--override={override}" for override in overrides)]
        environment = {**os.environ, OPTIONS: json.dumps(options._asdict())}
        # stdout is for the comparison alone.
        return subprocess.run(command, env=environment, stdout=2, check=False).returncode

    def _directory(self, name: str) -> Path:
        directory = RunDirectory.newest(self.folder / name, self.config.name)
        assert directory, "a run that has begun its first batch has a directory"
        return directory.path


def iterations(directory: Path, runner: str) -> int:
    """How many iterations a finished runner has made.

    Raises:
        RunError: ``is_exit`` has ended the run before.
    """
    done = directory / runner / DONE
    if not done.is_file():
        raise RunError(f"{runner}: context['is_exit'] ended the run before it was done; take that out to test it", 1)
    return int(json.loads(done.read_bytes())["iteration"])


def last_step(directory: Path, runner: str) -> int | None:
    """The iteration of the newest checkpoint of a runner; None: there is none."""
    checkpoints = layout.committed_checkpoints(directory / runner / "checkpoints")
    return layout.step_of(checkpoints[-1]) if checkpoints else None


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
