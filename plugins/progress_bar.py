"""Shows how far an epoch is: a bar in a terminal, a line per ``print_interval`` elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pipeline import hookimpl
from pipeline.checkpoint.state import StateModel
from pipeline.context import Context
from pipeline.run.log import on_terminal


class EpochState(StateModel):
    """An epoch, and the iteration at which it began."""

    epoch: int
    epoch_started_at: int


class ProgressBar:
    """Moves at each ``print_interval``, so a step that prints nothing costs nothing.

    Args:
        live: whether to draw a bar; None decides by whether stderr is a terminal.
    """

    every_rank = False

    def __init__(self, live: bool | None = None) -> None:
        self.live = on_terminal() if live is None else live
        self.progress: Progress | None = None
        self.task = TaskID(0)
        self.epoch, self.epoch_started_at = -1, 0
        # How many batches an epoch has, as text; "" until somebody asks.
        self.batches = ""

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Have the bar taken down at the end, however the run ends."""
        context["resources"].callback(self.stop)

    @hookimpl
    def on_resume(self, context: Context) -> None:
        """Start a bar for the epoch that goes on, if one was running."""
        if context["current_epoch"] == self.epoch == context["train_state"]["epoch"]:
            self.start(context)

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        """Start a bar for the epoch."""
        self.epoch, self.epoch_started_at = context["current_epoch"], context["train_state"]["iteration"]
        self.start(context)

    def start(self, context: Context) -> None:
        """Draw a bar, in a terminal."""
        self.stop()
        self.batches = ""
        if not self.live:
            return
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        # What is printed goes above the bar; but where stdout is a file or a pipe, it must go there.
        shared = bool(sys.stdout and sys.stdout.isatty())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=shared)
        self.task = self.progress.add_task("", total=_batches(context), epoch=context["current_epoch"])
        # A terminal that was closed shows nothing; the run is told of it by SIGHUP.
        with suppress(OSError):
            self.progress.start()

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Move the bar, or log a line."""
        done = context["train_state"]["iteration"] - self.epoch_started_at
        text = f"{phase} {'  '.join(f'{name} {_number(value)}' for name, value in metrics.items())}"
        if self.progress:
            self.progress.update(self.task, completed=done, description=text)
        else:
            self.batches = self.batches or str(_batches(context) or "?")
            logger.info(f"epoch {context['current_epoch']}  batch {done}/{self.batches}  {text}")

    @hookimpl
    def after_epoch(self) -> None:
        """Take the bar away; the epoch's own line is the metric log's."""
        self.stop()

    def state_dict(self) -> dict[str, int]:
        """Where the epoch began, for a run that goes on in the middle of it."""
        return {"epoch": self.epoch, "epoch_started_at": self.epoch_started_at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on in that epoch."""
        beginning = EpochState.from_tree(state, "progress_bar")
        self.epoch, self.epoch_started_at = beginning.epoch, beginning.epoch_started_at

    def stop(self) -> None:
        """Take the bar away, if there is one."""
        if self.progress:
            with suppress(OSError):
                self.progress.stop()
            self.progress = None


def _number(value: float) -> str:
    size = abs(value)
    if 0 < size < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4f}"


def _batches(context: Context) -> int | None:
    """How many batches an epoch has; None where a loader has no length."""
    total = 0
    for phase in context["phases"]:
        loader: Any = context["dataset"].get(phase["dataset_name"])
        try:
            total += len(loader)
        except TypeError:
            return None
    return total
