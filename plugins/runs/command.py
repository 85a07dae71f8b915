"""``pipeline runs``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.checkpoint.storage import finite
from pipeline.errors import ConfigError, one_of, printable
from pipeline.run.runs import RunRecord, list_runs

from .. import print_tables

_CONDITION = re.compile(r"([^<>=!]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_LARGER, _SMALLER = (">", ">="), ("<", "<=")


@click.command("runs")
@click.argument("folder", metavar="[DIR]", default="runs", type=click.Path())
@click.option(
    "-w",
    "--where",
    "conditions",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Only runs for which it holds: state=done, tags=swept, label='lr=*', 'valid_loss<0.3', state!=failed.",
)
@click.option("-s", "--sort", metavar="COLUMN", help="Sort by a column, the smallest first; default: the newest first.")
@click.option("-r", "--reverse", is_flag=True, help="In the opposite order.")
@click.option("-m", "--metric", "metrics", multiple=True, metavar="NAME", help="A column for a metric, or for note.")
@click.option("--json", "as_json", is_flag=True, help="Print all columns as JSON.")
def command(
    folder: str, conditions: Sequence[str], sort: str | None, reverse: bool, metrics: Sequence[str], as_json: bool
) -> None:
    """List runs: when, state, steps, best, overrides, label and tags.

    DIR is an output_dir (default: runs), a folder in it, or a run directory. Nothing is imported or run. Each metric is a
    column, by which one may sort and filter.
    """
    records = list_runs(folder)
    rows = [record.as_row() for record in records]
    columns = {column: None for row in [RunRecord(Path()).as_row(), *rows] for column in row}
    tests = [_condition(text) for text in conditions]
    for column in [*(column for column, _, _ in tests), *([sort] if sort else []), *metrics]:
        if column not in columns:
            raise ConfigError(f"no run has the column '{column}'{one_of(column, columns)}")
    rows = [row for row in rows if all(_holds(row.get(column), *test) for column, *test in tests)]
    if sort:
        rows.sort(key=lambda row: _sort_key(row.get(sort)))
    if reverse:
        # What has no such value stays at the end.
        rows = [*(row for row in reversed(rows) if _has(row, sort)), *(row for row in rows if not _has(row, sort))]
    for record in records:
        for problem in record.problems:
            click.echo(printable(f"{record.path}: {problem}"), err=True)
    if as_json:
        click.echo(json.dumps(finite([{**row, "path": str(row["path"])} for row in rows]), indent=2))
    elif rows:
        print_tables([_table(rows, [*metrics, *([sort] if sort else [])])])
    else:
        click.echo(f"{folder}: there is no {'such ' if records else ''}run in it", err=True)


def _condition(text: str) -> tuple[str, str, str]:
    match = _CONDITION.fullmatch(text)
    if not match:
        raise click.UsageError(f"--where {text}: is no condition; write state=done, or 'valid_loss<0.3'")
    column, operator, value = (part.strip() for part in match.groups())
    return column, operator, value


def _holds(value: Any, operator: str, wanted: str) -> bool:
    if operator in {"=", "!="}:
        texts = [str(one) for one in value] if isinstance(value, list) else ["" if value is None else str(value)]
        return any(text == wanted or fnmatchcase(text, wanted) for text in texts) == (operator == "=")
    number: Any = value.get("value") if isinstance(value, dict) else value
    limit: Any = wanted
    try:
        number, limit = float(number), float(wanted)
    except (TypeError, ValueError):
        # A time is a text that is ordered as it is.
        if not isinstance(number, str):
            return False
    return (number == limit and operator[1:] == "=") or (number > limit if operator in _LARGER else number < limit)


def _has(row: dict[str, Any], column: str | None) -> bool:
    return column is None or row.get(column) not in (None, "")


def _sort_key(value: Any) -> tuple[int, float, str]:
    """Numbers first, then text; what is missing comes last."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, int | float) and not math.isnan(value):
        return 0, value, ""
    return (2, 0, "") if value in (None, "", []) else (1, 0, str(value))


def _table(rows: Iterable[dict[str, Any]], more: Sequence[str]) -> Table:
    columns = dict.fromkeys(("when", "run", "state", "steps", "best", *more, "label", "tags", "overrides"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        shown = {**row, "run": row["path"], "when": _time(row["when"]), "best": _best(row["best"])}
        shown["state"] += " (damaged)" if row["problems"] else ""
        table.add_row(*(Text(printable(_cell(shown.get(column)))) for column in columns))
    return table


def _time(stamp: str) -> str:
    return re.sub(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)", r"\1-\2-\3 \4:\5:\6", stamp)


def _best(best: Any) -> str:
    names = isinstance(best, dict) and [best.get(name) for name in ("metric", "value", "iteration")]
    return f"{names[0]} {_cell(names[1])} at {names[2]}" if names else ""


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
