"""Profiles some steps of a training with torch.profiler: a trace, and a table of the operators that take the most time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from loguru import logger
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline import hookimpl
from pipeline.checkpoint import storage
from pipeline.context import Context
from pipeline.errors import ConfigError

# Operators of which the log tells.
LOGGED = 5


class Profiler:
    """Writes ``trace_<first>-<last>.json`` and ``operators_<first>-<last>.txt`` for each window of iterations.

    They are in the folder ``profiler`` of the runner's folder. The trace is for chrome://tracing or ui.perfetto.dev; a step
    of it is all from one ``before_batch`` to the next: the batch, what is due after it, and the wait for the next one.
    Outside of the windows nothing is measured: a step costs one call. A window that the end of the training cuts is
    written as far as it has come. Windows are counted in iterations of the training, so a run that is resumed profiles
    those alone whose beginning is still to come.

    Args:
        wait: iterations before a window.
        warmup: iterations at its beginning that are not recorded, while the profiler itself starts.
        active: iterations that are.
        repeat: how many windows there are.
        rows: how many operators the table has.
        memory: whether to record what memory operators allocate.
        of_runner: whether the runner's ``profile_training``, ``profile_warmup`` and ``profile_steps`` say when, instead.

    Raises:
        ConfigError: an argument is out of range.
    """

    # One process is like the others, and files of all would have the same names.
    every_rank = False
    volatile = ("profiler", "*_profiler")

    plugin_name = "profiler"
    # torch has one profiler in a process: a second plugin begins its window when that of the first is over.
    in_use: ClassVar[Profiler | None] = None

    def __init__(
        self,
        wait: int = 10,
        warmup: int = 2,
        active: int = 5,
        repeat: int = 1,
        rows: int = 30,
        memory: bool = False,
        of_runner: bool = False,
    ) -> None:
        for name, value, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 1),
            ("active", active, 1),
            ("repeat", repeat, 1),
            ("rows", rows, 1),
        ):
            if value < least:
                raise ConfigError(f"profiler: {name} is {value}; write {least} or more")
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        self.rows, self.memory, self.of_runner = rows, memory, of_runner
        # How many windows are over; the steps of the one that is open, and the iteration of its first that is recorded.
        self.windows = self.steps = self.first = 0
        # The iteration before which something is to be done.
        self.due: float = wait
        self.profile: profile | None = None

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Have a window closed at the end, however the run ends."""
        self.context, self.counters, runner = context, context["train_state"], context["runner"]
        if self.of_runner:
            self.wait, self.warmup, self.active = 0, runner.profile_warmup, runner.profile_steps
            self.due = 0 if runner.profile_training else math.inf
        context["resources"].callback(self.close)

    @hookimpl
    def on_resume(self) -> None:
        """Leave out the windows that have begun before."""
        while self.due < self.counters["iteration"]:
            self._await_next()

    @hookimpl
    def before_batch(self) -> None:
        """Begin a window, count its step, or end it."""
        if self.counters["iteration"] >= self.due:
            self._step()

    @hookimpl
    def after_stage(self, name: str) -> None:
        """End a window that the end of the training cuts."""
        if name == "runner":
            self.close()

    def _step(self) -> None:
        if self.profile is None:
            if Profiler.in_use:
                return
            Profiler.in_use, self.profile = self, self._begin()
        else:
            self.profile.step()
            self.steps += 1
        iteration = self.counters["iteration"]
        self.due = iteration + 1
        if self.steps == self.warmup:
            self.first = iteration + 1
        if self.steps == self.warmup + self.active:
            self.close()

    def _begin(self) -> profile:
        """Start the profiler."""
        cuda = [ProfilerActivity.CUDA] if self.context["device"].type == "cuda" else []
        window = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._write,
            profile_memory=self.memory,
        )
        window.start()
        return window

    def close(self) -> None:
        """End the window, if one is open; what it has recorded is written."""
        window, self.profile = self.profile, None
        if window is not None:
            if self.steps < self.warmup:
                logger.warning("profiler: the training has ended before a step was recorded; set wait or warmup lower")
            Profiler.in_use = None
            window.stop()
            self._await_next()

    def _await_next(self) -> None:
        self.windows += 1
        self.steps = 0
        window = self.wait + self.warmup + self.active
        self.due = self.windows * window + self.wait if self.windows < self.repeat else math.inf

    def _write(self, window: Any) -> None:
        """Write the trace and the table, and log the table's head."""
        name = "profiler" if self.plugin_name == "profiler" else f"{self.plugin_name}_profiler"
        folder: Path = self.context["run_dir"] / self.context["runner_name"] / name
        span = f"{self.first}-{max(self.first, self.counters['iteration'])}"
        device = "device" if self.context["device"].type == "cuda" else "cpu"
        operators = window.key_averages()
        head, table = (
            operators.table(sort_by=f"self_{device}_time_total", row_limit=rows, max_name_column_width=40)
            for rows in (LOGGED, self.rows)
        )
        with storage.storing(folder):
            folder.mkdir(exist_ok=True)
            window.export_chrome_trace(str(folder / f"trace_{span}.json"))
        storage.write(folder / f"operators_{span}.txt", table)
        logger.info(f"profiler: iterations {span}, in {folder}\n{head}")
