"""What a sweep shows: how far it is, and at its end a table, a page, and the best command line."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pipeline.cli import GROUP
from pipeline.errors import PipelineError, printable
from pipeline.run.directory import is_run_directory
from pipeline.run.log import on_terminal

from .. import print_tables
from .folder import SweepFolder


def short(path: Path) -> str:
    """A path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


@contextmanager
def progress(folder: SweepFolder) -> Iterator[Callable[[str], None]]:
    """Shows lines on stderr: ``say(line)``; in a terminal also how many trials have ended."""
    if not on_terminal():
        yield lambda line: click.echo(printable(line), err=True)
        return
    columns = TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=folder.state.count, completed=folder.ended)

        def say(line: str) -> None:
            bar.console.print(Text(printable(line)))
            bar.update(task, completed=folder.ended)

        yield say


def print_results(folder: SweepFolder, *, as_json: bool) -> None:
    """Print the trials on stdout, the best first, and the command line of the best; or all of it as JSON."""
    state, ranking = folder.state, folder.ranking()
    best = next((number for number in ranking if state.trials[number].state == "done"), None)
    line = None if best is None or state.trials[best].value is None else _command_line(folder, best)
    if as_json:
        rows = [
            {"trial": number, **state.trials[number].model_dump(), "path": str(folder.run_dir(number))}
            for number in ranking
        ]
        found = {"path": str(folder.path), "metric": state.metric, "mode": state.mode, "best": line, "trials": rows}
        click.echo(json.dumps(found, indent=2))
        return
    print_tables([_table(folder, ranking)])
    if line:
        click.echo(line)
    elif best is not None:
        shown = f"pipeline runs {shlex.quote(short(folder.path))} shows which there are"
        click.echo(f"no trial has the metric '{state.metric}', so none is the best; {shown}", err=True)


def _command_line(folder: SweepFolder, number: int) -> str:
    """The command that runs what a trial has run, from here."""
    state = folder.state
    line = shlex.join(["pipeline", "run", state.config, *state.fixed, *state.trials[number].words])
    return line if Path(state.folder) == Path.cwd() else f"cd {shlex.quote(state.folder)} && {line}"


def _table(folder: SweepFolder, ranking: list[int]) -> Table:
    state, titles = folder.state, folder.titles()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("rank", *titles.values(), state.metric, "at", "state", "run"):
        table.add_column(Text(printable(column)), overflow="fold")
    for rank, number in enumerate(ranking, 1):
        trial, own = state.trials[number], state.own(number)
        is_ranked = trial.state == "done" and trial.value is not None
        outcome = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        cells: list[Any] = [rank if is_ranked else "", *(own[address] for address in titles)]
        value = "" if trial.value is None else f"{trial.value:.5g}"
        cells += [value, "" if trial.iteration is None else trial.iteration, outcome, short(folder.run_dir(number))]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def write_page(folder: SweepFolder) -> None:
    """Write the page of ``pipeline report`` about the trials; where it cannot be, say why, and how to have it."""
    runs = [short(path) for path in map(folder.run_dir, folder.ranking()) if is_run_directory(path)]
    points = entry_points(group=GROUP, name="report")
    if not runs or not points:
        return
    page = short(folder.path / "report.html")
    try:
        report: click.Command = next(iter(points)).load()
        # It prints the path, and stdout is for the results.
        with redirect_stdout(sys.stderr):
            report.main([*runs, "-o", page], prog_name="pipeline report", standalone_mode=False)
    except (PipelineError, ImportError) as error:
        command = shlex.join(["pipeline", "report", short(folder.path), "-o", page])
        click.echo(f"no page was written: {error}; then: {command}", err=True)
