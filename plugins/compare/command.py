"""``pipeline compare``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.checkpoint.storage import finite
from pipeline.cli import group
from pipeline.errors import ConfigError, printable
from pipeline.run.runs import RunRecord, list_runs

from .. import print_tables
from ..shared.run_comparison import Comparison, compare_runs

# Lines that are shown of the difference between two files.
_LINES = 20

# Significant digits of a number; more where two numbers would look alike.
_DIGITS = (5, 9)


@click.command("compare")
@click.argument("paths", metavar="RUN_DIR RUN_DIR…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option(
    "--html",
    "page",
    metavar="[FILE]",
    is_flag=False,
    flag_value="report.html",
    help="Also write the page of `pipeline report`, with the curves, by default report.html.",
)
def command(paths: Sequence[Path], as_json: bool, page: str | None) -> None:
    """Say in what runs differ: config, code, environment and metrics.

    Each run is compared with the first. Nothing is imported or run.
    """
    if page and not page.endswith(".html"):
        raise click.UsageError(
            f"--html {page}: is no name of a page; write --html=page.html, or --html as the last word"
        )
    if page and as_json:
        raise click.UsageError("--html prints the path of the page, and --json only JSON; choose one")
    if len(paths) < 2:
        raise click.UsageError("name two run directories or more; `pipeline runs` lists them")
    records = [_record(path) for path in paths]
    comparisons = [compare_runs(paths[0], path) for path in paths[1:]]
    if as_json:
        rows = [{**record.as_row(), "path": str(record.path)} for record in records]
        click.echo(json.dumps(finite({"runs": rows, "differences": [*map(asdict, comparisons)]}), indent=2))
        return
    print_tables([_table(records)])
    for comparison in comparisons:
        for line in _lines(comparison, str(paths[0])):
            click.echo(printable(line, keep="\t"))
    if page:
        _write_page(paths, page)


def _write_page(paths: Sequence[Path], page: str) -> None:
    """Have the command ``report`` write the page; whichever package offers it."""
    report = group.get_command(click.Context(group), "report")
    if report is None:
        raise ConfigError("--html: no installed package offers the command 'report'; install five-stage-pipeline again")
    report.main([*map(str, paths), "-o", page], prog_name="pipeline report", standalone_mode=False)


def _record(path: Path) -> RunRecord:
    records = list_runs(path)
    if len(records) != 1 or records[0].path != path:
        raise ConfigError(f"{path}: is no run directory, and has {len(records)} in it; name one run directory")
    return records[0]


def _table(records: Sequence[RunRecord]) -> Table:
    """A column for each run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", *(str(record.path) for record in records)):
        table.add_column(Text(printable(title)), overflow="fold")
    rows = [record.as_row() for record in records]
    names = {name: None for row in rows for name in row if name not in ("path", "problems")}
    for name in names:
        cells = [row.get(name) for row in rows]
        if any(cell not in (None, "", []) for cell in cells):
            table.add_row(name, *(Text(printable(text)) for text in _texts(cells)))
    return table


def _texts(cells: Sequence[Any]) -> list[str]:
    """The texts of a row; its numbers have as many digits as show which of them differ."""
    exact = [_cell(cell, str) for cell in cells]
    for digits in _DIGITS:
        texts = [_cell(cell, f"{{:.{digits}g}}".format) for cell in cells]
        if len(set(texts)) == len(set(exact)):
            return texts
    return exact


def _cell(value: Any, number: Callable[[float], str]) -> str:
    """The text of a cell; ``number`` makes that of a float."""
    if isinstance(value, dict):
        return f"{value.get('metric')} {_cell(value.get('value'), number)} at {value.get('iteration')}"
    if isinstance(value, list):
        return "; ".join(map(str, value))
    if isinstance(value, float):
        return number(value)
    return "" if value is None else str(value)


def _lines(comparison: Comparison, first: str) -> Iterator[str]:
    yield f"{first} -> {comparison.run}"
    for title in ("config", "environment", "problems"):
        lines = getattr(comparison, title)
        yield from [title, *(f"  {line}" for line in lines)] if lines else []
    for name, lines in comparison.code.items():
        more = [f"… and {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
        yield from [name, *(f"  {line}" for line in [*lines[:_LINES], *more])]
    yield comparison.sentence()
