"""The trials of a sweep, each a run in a process of its own."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pipeline.checkpoint.storage import storing
from pipeline.errors import ExitCode, PipelineError, printable
from pipeline.run.directory import RunDirectory
from pipeline.signals import SIGNALS

from .folder import SweepFolder, Trial
from .metrics import final_value, missing, read_values

if TYPE_CHECKING:
    # It imports Optuna, an extra.
    from .search import Search

# Seconds between two looks at the processes, and at the numbers of those that may be pruned.
_PAUSE, _LOOK = 0.1, 1.0
# What a run leaves with that was asked to end, or was killed: it may go on. A signal ends one that is just starting.
_STOPPED = {
    ExitCode.STOPPED,
    ExitCode.INTERRUPTED,
    ExitCode.TERMINATED,
    -signal.SIGKILL,
    *(-number for number in SIGNALS),
}


class Process:
    """A trial that is running, or waits until another process has left its run directory.

    Attributes:
        number: of the trial.
        slot: which of the jobs it is, from 0.
        pruned: whether it was asked to end, being hopeless.
        waits: whether a sweep that was killed has left it running.
    """

    def __init__(self, folder: SweepFolder, number: int, slot: int, jobs: int) -> None:
        self.folder, self.number, self.slot, self.jobs = folder, number, slot, jobs
        self.pruned = self.waits = False
        self.process: subprocess.Popen[bytes] | None = None
        self.looked = time.monotonic()

    def poll(self) -> int | None:
        """What its process has left with; None: it is not over. It is begun as soon as its run directory is free."""
        if self.process is None:
            self.waits = _in_use(self.folder.run_dir(self.number))
            if not self.waits:
                self.process = self._start()
            return None
        code = self.process.poll()
        if code == ExitCode.LOCKED:
            # Another one was quicker.
            self.process, self.waits = None, True
            return None
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        state, run_dir = self.folder.state, self.folder.run_dir(self.number)
        words = [*state.fixed, *state.trials[self.number].words]
        # A run begins in an empty folder, and goes on in any other.
        command = [sys.executable, "-m", "pipeline", "run", "--quiet", f"--resume={run_dir}", f"--model={state.config}"]
        command += [f"--override={word}" for word in words]
        with storing(run_dir):
            run_dir.mkdir(exist_ok=True)
            with self.folder.output(self.number).open("ab") as output:
                # A group of its own: a terminal sends Ctrl-C to the sweep alone, which passes it on.
                return subprocess.Popen(
                    command,
                    cwd=state.folder,
                    env={**os.environ, **devices(os.environ.get("CUDA_VISIBLE_DEVICES"), self.slot, self.jobs)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )

    def stop(self) -> None:
        """Have it save and end."""
        if self.process:
            self.process.terminate()


def devices(visible: str | None, slot: int, jobs: int) -> dict[str, str]:
    """The environment of one of several jobs: its share of the devices that ``CUDA_VISIBLE_DEVICES`` names."""
    names = [name for name in (visible or "").split(",") if name]
    share = names[slot::jobs] or names[slot % max(1, len(names)) :][:1]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {}


def _in_use(run_dir: Path) -> bool:
    """Whether a process holds the lock of a run."""
    with suppress(FileNotFoundError), open(run_dir / "lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Trials:
    """Runs what is left of a sweep.

    Args:
        folder: its folder, which is locked.
        jobs: how many run at once.
        search: draws trials; None: they are a grid.
        say: shows a line.

    Attributes:
        running: the processes.
        signal: what has asked the sweep to end; None: nothing.
        titles: address -> how it is shown, of those that differ between trials.
    """

    def __init__(self, folder: SweepFolder, jobs: int, search: Search | None, say: Callable[[str], None]) -> None:
        self.folder, self.jobs, self.search, self.say = folder, jobs, search, say
        self.state = folder.state
        self.running: list[Process] = []
        self.begun: set[int] = set()
        self.signal: signal.Signals | None = None
        self._heard = self._passed_on = 0
        self.titles = folder.titles()

    def run(self) -> None:
        """Run all trials that have not ended, until a signal comes.

        Raises:
            StorageError: the storage refuses.
            PipelineError: a search has nothing to go by.
        """
        with self._receiving():
            try:
                while self._begin() or self.running:
                    time.sleep(_PAUSE)
                    self._pass_on()
                    for process in [*self.running]:
                        self._look_at(process)
            finally:
                # After an error of ours: nothing goes on that nobody watches.
                for process in self.running:
                    process.stop()
                for process in self.running:
                    if process.process:
                        process.process.wait()

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Count the signals that ask the sweep to end."""
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        self._heard += 1

    def _pass_on(self) -> None:
        """Ask the trials to end as often as the sweep was asked: the second time they end at once."""
        if self._passed_on < self._heard:
            if not self._passed_on:
                self.say(f"{self.signal and self.signal.name}: the trials that are running save and end")
            self._passed_on = self._heard
            # What another process runs is its own affair.
            self.running = [process for process in self.running if process.process]
            for process in self.running:
                process.stop()

    def _begin(self) -> bool:
        """Begin as many trials as there is room for; whether there was one."""
        slots = {*range(self.jobs)} - {process.slot for process in self.running}
        begun = False
        while slots and not self.signal and (number := self._next()) is not None:
            process = Process(self.folder, number, min(slots), self.jobs)
            slots.remove(process.slot)
            self.begun.add(number)
            self.running.append(process)
            process.poll()
            begun = True
            if process.waits:
                holder = RunDirectory(self.folder.run_dir(number)).holder().strip()
                self.say(f"{self.folder.run_dir(number).name} is still running ({holder}); waiting for it")
        return begun

    def _next(self) -> int | None:
        """The number of the next trial; a search draws it, once none is left."""
        for number, trial in enumerate(self.state.trials):
            if trial.state == "waiting" and number not in self.begun:
                return number
        number = len(self.state.trials)
        if self.search is None or number >= self.state.count:
            return None
        words = self.search.draw(number)
        self.state.trials.append(Trial(words=words))
        self.folder.save()
        self.search.begin(words)
        return number

    def _look_at(self, process: Process) -> None:
        code = process.poll()
        if code is not None:
            self.running.remove(process)
            self._end(process, code)
        elif self.search and self.state.prune and not process.pruned and time.monotonic() - process.looked > _LOOK:
            process.looked = time.monotonic()
            # One that another process runs is not ours to end.
            if process.process and self.search.is_hopeless(process.number):
                process.pruned = True
                process.stop()

    def _end(self, process: Process, code: int) -> None:
        """Note how a trial has ended, and say so."""
        number, trial = process.number, self.state.trials[process.number]
        name, own = self.folder.run_dir(number).name, self.state.own(number)
        words = " ".join(f"{title}={own[address]}" for address, title in self.titles.items())
        if code in _STOPPED and RunDirectory(self.folder.run_dir(number)).read_status().get("state") == "done":
            # It was asked to end when it just had.
            code = ExitCode.DONE
        trial.exit_code = code
        if code in _STOPPED and not process.pruned:
            self.say(f"{name}  {words}  was stopped ({_meaning(code)})")
            return
        trial.state = "done" if code == 0 else "pruned" if code in _STOPPED else "failed"
        self._measure(number, trial)
        if trial.state == "failed":
            trial.reason = f"{_meaning(code)}: {self._reason(number)}"
        elif trial.state == "done" and trial.value is None and self.search:
            why = missing(self.folder.run_dir(number), self.state.metric)
            if not why.endswith("number"):
                trial.state = "waiting"
                raise PipelineError(f"{self.folder.run_dir(number)}: {why}; begin a search with another --metric")
            trial.state, trial.reason = "failed", why
        self.folder.save()
        if self.search:
            self.search.end(number, trial)
        value = "" if trial.value is None else f"  {self.state.metric} {trial.value:.5g}"
        self.say(f"{name}  {words}{value}  {trial.state}{trial.reason and f': {trial.reason}'}")

    def _measure(self, number: int, trial: Trial) -> None:
        run_dir, state = self.folder.run_dir(number), self.state
        # It may have failed before.
        trial.value = trial.iteration = None
        for iteration, value in read_values(run_dir, state.metric).items():
            if trial.value is None or state.better(value, trial.value):
                trial.value, trial.iteration = value, iteration
        if trial.value is None and trial.state == "done":
            trial.value = final_value(run_dir, state.metric)

    def _reason(self, number: int) -> str:
        """Why a trial has failed: as its run says, or the last line that it has printed."""
        status = RunDirectory(self.folder.run_dir(number)).read_status()
        if status.get("state") == "failed" and status.get("reason"):
            return printable(status["reason"])
        with suppress(OSError):
            lines = self.folder.output(number).read_text(encoding="utf-8", errors="replace").split("\n")
            return printable(next((line.strip() for line in reversed(lines) if line.strip()), "it has printed nothing"))
        return ""


def _meaning(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return next((f"exit code {code}, {known.meaning}" for known in ExitCode if known == code), f"exit code {code}")
