"""A run in a process of its own that is forked from this one: torch need not be imported again, so hundreds are quick."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pipeline.check.checker import check
from pipeline.checkpoint import layout, reader
from pipeline.checkpoint.comparison import differences
from pipeline.cli import refuse
from pipeline.cli.run import run_trainer
from pipeline.errors import PipelineError
from pipeline.run import log
from pipeline.signals import SHUTDOWN
from pipeline.trainer import GeneralTrainer

# Of the threads that would share a sum none is left in a process that is forked, and it would wait for them.
torch.set_num_threads(1)
HOST = socket.gethostname()
# What a run imports when it comes to it is imported once, here; an optimizer of torch wants much.
for stage in ("instance", "network", "startup", "runner", "terminal"):
    import_module(f"pipeline.stages.{stage}")
for module in ("torch._dynamo.polyfills.loader", "pipeline_plugins.metric_log", "pipeline_plugins.progress_bar"):
    import_module(module)


class ForkedRun:
    """``pipeline run CONFIG [KEY=VALUE…] [--resume …]``, as the command does it from the point where all is imported.

    Args:
        folder: where it runs; its stderr goes to a file in it.
        config: the path of the config.
        overrides: of the config.
        resume: auto, never or a path.
        environment: variables beside those of this process.
        grace: seconds that a signal leaves it; None: as a user has it.
        user: the number of the user that it runs as; None: this one.
        gate: called first in the new process: it may wait there for others, so that all begin together.

    Attributes:
        pid: its process, which leads a group of its own.
    """

    number = 0

    def __init__(
        self,
        folder: Path,
        config: Path,
        overrides: Sequence[str] = (),
        resume: str = "never",
        *,
        environment: Mapping[str, str] | None = None,
        grace: float | None = None,
        user: int | None = None,
        gate: Callable[[], object] = lambda: None,
    ) -> None:
        if not ForkedRun.number:
            # The source of all that stays the same is read once, here.
            check(str(config), overrides)
        ForkedRun.number += 1
        self.errors = folder / f"stderr-{ForkedRun.number}"
        self.errors.touch(0o666)
        self.code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 255
        # torch makes its thread pool anew at the first call after a fork, and two threads that come at once may meet it empty.
        torch.set_num_threads(1)
        try:
            self._become(folder, environment or {}, user)
            SHUTDOWN.grace = grace or SHUTDOWN.grace
            gate()
            code = run_trainer(GeneralTrainer(config, list(overrides), resume))
        except PipelineError as error:
            code = refuse(error)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _become(self, folder: Path, environment: Mapping[str, str], user: int | None) -> None:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.update(environment)
        descriptor = os.open(self.errors, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # Those of a process of pytest lead elsewhere.
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        log.to_stderr("INFO")

    def over(self) -> bool:
        """Whether it has ended; then ``code`` is its exit code, negative where a signal killed it."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait(self, seconds: float = 30) -> int:
        """Its exit code; one that does not end in time is killed."""
        if not until(self.over, seconds):
            self.send(signal.SIGKILL)
            until(self.over)
        assert self.code is not None
        return self.code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it is over."""
        if not self.over():
            os.kill(self.pid, number)

    def told(self) -> str:
        """What it has written to stderr so far."""
        return self.errors.read_text(encoding="utf-8")


def until(happens: Callable[[], object], seconds: float = 60) -> bool:
    """Wait until something is so; False where it was not in time."""
    end = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def end(runner_dir: Path) -> dict[str, Any]:
    """What a runner has come to: its last checkpoint, and its numbers; but what depends on the clock."""
    last = reader.read_checkpoint(layout.committed_checkpoints(runner_dir / "checkpoints")[-1])
    assert last.training
    # How long timing.jsonl is.
    last.training["recoverables"]["plugin:metric_log"].pop("timing")
    lines = (runner_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"weights": last.weights, "training": last.training, "counters": last.train_state, "lines": lines}


def unlike(runner_dir: Path, expected: dict[str, Any]) -> list[str]:
    """Where a runner has come to another end."""
    return [str(each) for each in differences(end(runner_dir), expected)]
