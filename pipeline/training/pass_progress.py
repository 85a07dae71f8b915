"""A bar for one pass of a Brain that runs by itself; in a run, a plugin shows the progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.log import on_terminal

EVERY = 50
"""Batches between two movements of the bar."""


class PassProgress:
    """Moves a bar where there is one, and does nothing where there is none.

    Args:
        bar: the bar; None: nothing is shown.
    """

    def __init__(self, bar: Progress | None) -> None:
        self.bar = bar
        self.every = EVERY if bar else 0

    def show(self, done: int, loss: float) -> None:
        """So many batches are done, with this mean loss."""
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, loss=f"loss {loss:.4f}")

    def over(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches, the bar moving with them."""
        return batches if self.bar is None else self.bar.track(batches, task_id=self.bar.task_ids[0])


@contextmanager
def pass_progress(title: str, batches: int | None, shown: bool | None) -> Iterator[PassProgress]:
    """A bar on stderr until the block ends.

    Args:
        title: what stands before it.
        batches: how many there will be; None: that isn't known.
        shown: whether it is; None: where stderr is a terminal.
    """
    if not (on_terminal() if shown is None else shown):
        yield PassProgress(None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(title, total=batches, loss="")
        yield PassProgress(bar)
