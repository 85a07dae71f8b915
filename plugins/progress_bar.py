"""Shows how far an epoch and a validation are: bars in a terminal, a line per ``print_interval`` elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from threading import Event, RLock, Thread
from typing import Any, TextIO

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from pipeline import hookimpl
from pipeline.checkpoint.state import StateModel
from pipeline.context import Context
from pipeline.run.bar_console import BarConsole
from pipeline.run.log import is_terminal, on_terminal

# Seconds between two redraws, of about a millisecond each.
PAUSE = 0.2
NO_EPOCH = -1
# Held while a bar is drawn or changed. Nobody forks meanwhile: a worker that prints would wait for ever for a lock of rich.
_DRAWING = RLock()
os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)


class EpochState(StateModel):
    """An epoch, and the iteration at which it began."""

    epoch: int
    epoch_started_at: int


class AboveBar:
    """Takes the place of a stream while a bar is shown: each line that is written goes above the bar, as it is.

    rich's own cuts a line that is wider than the terminal in two; a terminal shows it in two rows, and copies it as one.

    Args:
        stream: whose place it takes.
        console: draws the bar, and with it what is above.
    """

    def __init__(self, stream: TextIO, console: Console) -> None:
        self.rich_proxied_file = stream
        self._console, self._rest = console, ""

    def __getattr__(self, name: str) -> Any:
        """What the stream has by this name."""
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        """Show the lines that are whole; the rest waits for its end."""
        lines, newline, self._rest = f"{self._rest}{text}".rpartition("\n")
        if newline:
            with _DRAWING:
                self._console.out(lines, highlight=False)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """The same for several."""
        self.write("".join(lines))

    def close_above(self) -> TextIO:
        """Write what is left, once there is no bar any more; the stream."""
        self.rich_proxied_file.write(self._rest)
        return self.rich_proxied_file


class Bar(Progress):
    """One line that a thread redraws by the clock: it looks how far things are, so what is counted calls nothing.

    The line shows one of several counts. It is never two: a worker that prints goes by the height that it knows.
    """

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.fields[title]}"),
            BarColumn(bar_width=None, table_column=Column(max_width=40)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}"),
        )
        # What may be shown -> says how much of it is done.
        self.counts: dict[TaskID, Callable[[], int]] = {}
        self.over = Event()
        self.streams: list[str] = []
        super().__init__(
            *columns,
            console=BarConsole(),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            auto_refresh=False,
        )
        self.thread = Thread(target=self._redraw, name="progress_bar", daemon=True)

    def count(self, count: Callable[[], int], total: int | None, title: str, text: str) -> TaskID:
        """Show something that begins; ``count`` says how much of it is done."""
        with _DRAWING:
            task = self.add_task(text, total=total, completed=count(), title=title)
            self.counts[task] = count
            self.show(task)
        if not self.thread.is_alive():
            # A terminal that was closed shows nothing; the run is notified of that by SIGHUP.
            with suppress(OSError):
                self.start()
            self._redirect()
            self.thread.start()
        return task

    def show(self, task: TaskID) -> None:
        """Show this, and nothing else."""
        for other in self.task_ids:
            self.update(other, visible=other == task)

    def forget(self, task: TaskID) -> None:
        """Something is over: show again what was shown before."""
        with _DRAWING:
            del self.counts[task]
            if self.counts:
                self.remove_task(task)
                self.show([*self.counts][-1])

    def _redirect(self) -> None:
        """Have what is printed go above the bar; but where stdout is a file or a pipe, it must go there."""
        for name in ("stdout", "stderr") if self.console.is_terminal and not self.console.is_jupyter else ():
            stream = getattr(sys, name)
            if stream and (name == "stderr" or is_terminal(stream)):
                self.streams.append(name)
                setattr(sys, name, AboveBar(stream, self.console))

    def refresh(self) -> None:
        """Leave it to the thread, where rich would redraw for each change."""

    def close(self) -> None:
        """Take the bar away; the last redraw shows how far it has come."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        self._look()
        with suppress(OSError):
            self.stop()
        for name in self.streams:
            if isinstance(stream := getattr(sys, name), AboveBar):
                with suppress(OSError):
                    setattr(sys, name, stream.close_above())

    def _redraw(self) -> None:
        while not self.over.wait(PAUSE):
            with _DRAWING, suppress(OSError):
                self._look()
                self.live.refresh()

    def _look(self) -> None:
        for task, count in self.counts.items():
            self.update(task, completed=count())


def _in_notebook() -> bool:
    """Whether this is a notebook in which rich can draw a bar."""
    return Console(stderr=True).is_jupyter and find_spec("ipywidgets") is not None


class ProgressBar:
    """Shows the batches of the running epoch, the time left, and the numbers of the last ``print_interval``.

    A bar moves by the clock, so no step costs a call. While a validation runs, it shows the batches of that. Without a
    terminal, or with ``live: false``, there is a line per ``print_interval`` instead.

    Args:
        live: whether to draw a bar; None: where stderr is a terminal, and in a notebook that has ``ipywidgets``.
    """

    every_rank = False

    def __init__(self, live: bool | None = None) -> None:
        self.live = (on_terminal() or _in_notebook()) if live is None else live
        self.hidden = False
        self.bar: Bar | None = None
        # What the bar shows of the training, and of a validation.
        self.training: TaskID | None = None
        self.validation: TaskID | None = None
        self.epoch, self.epoch_started_at = NO_EPOCH, 0
        # How many batches the epoch has; None where that is not known.
        self.total: int | None = None
        # Whether the loaders may have had another epoch when it was counted.
        self.is_outdated = False

    @property
    def title(self) -> str:
        """What is counted."""
        return "training" if self.epoch == NO_EPOCH else f"epoch {self.epoch}"

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        """Have the bar taken down at the end, however the run ends; with the runner's ``noprogressbar`` there is nothing."""
        self.hidden = context["runner"].noprogressbar
        self.live = self.live and not self.hidden
        context["resources"].callback(self.stop)

    @hookimpl
    def on_resume(self, context: Context) -> None:
        """Show what goes on: an epoch that was running, or a training without epochs."""
        counters, epoch = context["train_state"], context["current_epoch"]
        if epoch != counters["epoch"]:
            # Between two epochs: the next is yet to begin.
            return
        done = _batches_done(context)
        if self.epoch != epoch and done is not None:
            # The run that saved the checkpoint had no such plugin, which knew where the epoch began.
            self.epoch, self.epoch_started_at = epoch, counters["iteration"] - done
        self.start(context)

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        """Show an epoch."""
        self.epoch, self.epoch_started_at = context["current_epoch"], context["train_state"]["iteration"]
        self.start(context)

    @hookimpl
    def before_pass(self, context: Context) -> None:
        """Show a training without epochs, from its first iteration; count the batches of this pass.

        Here the loader has the number of the pass, on which its length may depend.
        """
        if self.epoch == NO_EPOCH and self.training is None:
            self.start(context)
        self.count_again(context)

    def start(self, context: Context) -> None:
        """Show how much is done of an epoch, or of a training without epochs."""
        counters, began = context["train_state"], self.epoch_started_at
        self.total = self._total(context)
        self.is_outdated = True
        if self.live:
            bar, before = self.bar or Bar(), self.training
            self.bar = bar
            self.training = bar.count(lambda: counters["iteration"] - began, self.total, self.title, "")
            if before is not None:
                bar.forget(before)

    def _total(self, context: Context) -> int | None:
        """Return how many batches the epoch has; None where that is not known."""
        batches, limit = None, context["runner"].max_steps
        if self.epoch != NO_EPOCH:
            loop: Any = context.loop
            true_lengths = loop.lengths.true_lengths if loop else {}
            batches = _batches_of_phases(context, true_lengths)
        known = (batches, limit and limit - self.epoch_started_at)
        return min((count for count in known if count), default=None)

    def count_again(self, context: Context) -> None:
        """Count the batches of the epoch again, and show it."""
        self.total, self.is_outdated = self._total(context), False
        if self.bar and self.training is not None:
            self.bar.update(self.training, total=self.total)

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        """Show the numbers, or log them."""
        if self.is_outdated:
            # A run that was resumed in an epoch.
            self.count_again(context)
        if self.bar and self.training is not None:
            self.bar.update(self.training, description=f"{phase} {_short(metrics)}")
        elif not (self.live or self.hidden):
            done = context["train_state"]["iteration"] - self.epoch_started_at
            numbers = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())
            logger.info(f"{self.title}  batch {done}/{self.total or '?'}  {phase} {numbers}")

    @hookimpl
    def before_validation(self, context: Context, phase: str) -> None:
        """Show how much of a validation is done, as its Brain counts it."""
        if self.live:
            schema = next((entry for entry in context["phases"] if entry["name"] == phase), {})
            names = schema.get("valid_dataset_name") or schema.get("dataset_name")
            total = _batches(context, names if isinstance(names, list) else [names])
            title = "evaluation" if context["is_infer"] else f"{self.title} validation"
            self.bar = self.bar or Bar()
            self.validation = self.bar.count(_count_of(_brain_of(context, phase)), total, title, phase)

    @hookimpl
    def after_validation(self) -> None:
        """Show the training again."""
        if self.bar and self.validation is not None:
            self.bar.forget(self.validation)
            self.validation = None

    @hookimpl
    def after_stage(self) -> None:
        """Take the bar away; an epoch's own line is the metric log's."""
        self.stop()

    def stop(self) -> None:
        """Take the bar away, if there is one."""
        if self.bar:
            bar, self.bar, self.training, self.validation = self.bar, None, None, None
            bar.close()

    def state_dict(self) -> dict[str, int]:
        """Where the epoch began, for a run that goes on in the middle of it."""
        return {"epoch": self.epoch, "epoch_started_at": self.epoch_started_at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on in that epoch."""
        beginning = EpochState.from_tree(state, "progress_bar")
        self.epoch, self.epoch_started_at = beginning.epoch, beginning.epoch_started_at


def _short(metrics: dict[str, float]) -> str:
    """The numbers in few columns."""
    speed = metrics.get("samples_per_second")
    texts = [
        f"{name.replace('learning_rate', 'lr')} {_number(value)}"
        for name, value in metrics.items()
        if name != "samples_per_second"
    ]
    return "  ".join([*texts, *([] if speed is None else [f"{speed:,.0f} samples/s"])])


def _number(value: float) -> str:
    size = abs(value)
    if 0 < size < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 or isinstance(value, int) else f"{value:.4f}"


def _batches(context: Context, datasets: Iterable[str | None]) -> int | None:
    """How many batches the passes over these have; None where a loader has no length."""
    runner, loaders, total = context["runner"], context.peek("dataset") or {}, 0
    for name in datasets:
        loader: Any = loaders.get(name)
        own = context["config"].get(f"dataset.{name}.limit_batches") or runner.limit_batches
        limits = [own, runner.overfit_batches, runner.debug_batches if runner.debug else None]
        try:
            total += min(len(loader), *(limit or sys.maxsize for limit in limits))
        except TypeError:
            return None
    return total or None


def _batches_of_phases(context: Context, true_lengths: Mapping[str, int]) -> int | None:
    """Return how many batches the phases have together; None where a loader has no length.

    Args:
        context: the run's.
        true_lengths: phase -> its batches, if the loader is known to announce others.
    """
    total = 0
    for phase in context["phases"]:
        own = true_lengths.get(phase["name"])
        batches = own or _batches(context, [phase["dataset_name"]])
        if batches is None:
            return None
        total += batches
    return total or None


def _brain_of(context: Context, phase: str) -> Any:
    """The Brain of a phase; None where there is none, as in an Experiment."""
    return (context.peek("model") or {}).get(phase, {}).get("brain")


def _batches_done(context: Context) -> int | None:
    """Return how many batches of the running epoch were done when the checkpoint was saved; None if no epoch was running."""
    loop: Any = context.loop
    return loop.batches_before_resume() if loop else 0


def _count_of(brain: Any) -> Callable[[], int]:
    """Counts the batches that a Brain evaluates; 0 where it does not see them."""
    last, moved, done = getattr(brain, "step", 0), False, 0

    def count() -> int:
        nonlocal last, moved, done
        # It counts from 0 once it begins, and with each dataset; until then it has the count of its training.
        step: int = getattr(brain, "step", 0)
        done += last if moved and step < last else 0
        last, moved = step, moved or step != last
        return done + step if moved else 0

    return count
