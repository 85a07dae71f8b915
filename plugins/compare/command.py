"""``pipeline compare``."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import click
from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.checkpoint import storage
from pipeline.checkpoint.storage import finite
from pipeline.config import yaml_tree
from pipeline.config.keys import fields
from pipeline.config.schema import ABOUT, SECTIONS
from pipeline.config.yaml_tree import MAX_BYTES, Origin
from pipeline.errors import ConfigError, PipelineError, printable
from pipeline.run.runs import RunRecord, list_runs

from .. import print_tables

_T = TypeVar("_T")

# Lines that are shown of the difference between two files.
_LINES = 20
# How many differences the last line names.
_NAMED = 8


@dataclass
class Comparison:
    """In what a run differs from the first.

    Attributes:
        run: its directory.
        config, environment: ``runner.train_runner.epochs: 2 -> 3``.
        code: file -> the lines that differ.
        problems: what cannot be compared.
    """

    run: str
    config: list[str] = field(default_factory=list)
    code: dict[str, list[str]] = field(default_factory=dict)
    environment: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """``the only differences are …``."""
        differences = [*self.config, *self.code, *self.environment]
        if self.problems:
            return f"what could be compared differs in: {'; '.join(differences[:_NAMED]) or 'nothing'}"
        if not differences:
            return "config, code and environment are equal"
        more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        verb = "differences are" if len(differences) > 1 else "difference is"
        return f"the only {verb} {'; '.join(differences[:_NAMED])}{more}"


@click.command("compare")
@click.argument("paths", metavar="RUN_DIR RUN_DIR…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(paths: Sequence[Path], as_json: bool) -> None:
    """Say in what runs differ: config, code, environment and metrics.

    Each run is compared with the first. Nothing is imported or run.
    """
    if len(paths) < 2:
        raise click.UsageError("name two run directories or more; `pipeline runs` lists them")
    records = [_record(path) for path in paths]
    comparisons = [_compare(paths[0], path) for path in paths[1:]]
    if as_json:
        rows = [{**record.as_row(), "path": str(record.path)} for record in records]
        click.echo(json.dumps(finite({"runs": rows, "differences": [*map(asdict, comparisons)]}), indent=2))
        return
    print_tables([_table(records)])
    for comparison in comparisons:
        for line in _lines(comparison, str(paths[0])):
            click.echo(printable(line, keep="\t"))


def _record(path: Path) -> RunRecord:
    records = list_runs(path)
    if len(records) != 1 or records[0].path != path:
        raise ConfigError(f"{path}: is no run directory, and has {len(records)} in it; name one run directory")
    return records[0]


def _compare(first: Path, other: Path) -> Comparison:
    comparison = Comparison(str(other))

    def attempt(act: Callable[[], _T], default: _T) -> _T:
        try:
            return act()
        except (PipelineError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            comparison.problems.append(str(error))
            return default

    comparison.config = attempt(lambda: list(yaml_tree.differences(_config(first), _config(other))), [])
    comparison.environment = attempt(lambda: list(_environments(first, other)), [])
    comparison.code = attempt(lambda: dict(_code(_sources(first), _sources(other))), {})
    return comparison


def _read(path: Path) -> bytes:
    return storage.read_small(path, MAX_BYTES)


def _config(run_dir: Path) -> dict[str, Any]:
    """The config without what is about the run, and without the place of the workspace in its paths."""
    file = run_dir / "config.yaml"
    text = _read(file).decode("utf-8", "surrogateescape")
    config = yaml_tree.parse(text, Origin(str(file))).plain(expanded=False)
    for section, model in SECTIONS.items():
        for item, (name, key) in product(config.get(section) or (), fields(model).items()):
            # A run of an earlier version does not have it, and did as the default does.
            item.setdefault(name, key.get_default(call_default_factory=True))
    own = {name: value for name, value in config.items() if name not in (*ABOUT, "workspace")}
    return {"workspace": config.get("workspace"), **_relative(own, f"{config.get('workspace')}/")}


def _relative(value: Any, workspace: str) -> Any:
    if isinstance(value, dict):
        return {_relative(name, workspace): _relative(child, workspace) for name, child in value.items()}
    if isinstance(value, list):
        return [_relative(child, workspace) for child in value]
    return value.replace(workspace, "{workspace}/") if isinstance(value, str) else value


def _environment(run_dir: Path) -> dict[str, Any]:
    file = run_dir / "environment.json"
    values = json.loads(_read(file))
    if not isinstance(values, dict) or not isinstance(values.get("packages"), dict):
        raise ConfigError(f"{file}: makes no sense; it cannot be compared")
    values.pop("time", None)
    # As the time, another in each start of several processes.
    for place in (values.get("variables"), *values.get("ranks", ())):
        for name in ("MASTER_PORT", "pid") if place else ():
            place.pop(name, None)
    return values


def _environments(first: Path, other: Path) -> Iterator[str]:
    before, now = _environment(first), _environment(other)
    # What one of them has not imported says nothing of its version.
    both = before["packages"].keys() & now["packages"].keys()
    for values in (before, now):
        values["packages"] = {name: version for name, version in values["packages"].items() if name in both}
    yield from yaml_tree.differences(before, now, "environment")


def _sources(run_dir: Path) -> dict[str, bytes]:
    """The copies of user code: name -> content."""
    files = (Path(folder, name) for folder, _, names in os.walk(run_dir / "workspace") for name in names)
    return {str(file.relative_to(run_dir)): _read(file) for file in sorted(files) if not file.name.startswith(".")}


def _code(first: dict[str, bytes], other: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    for name in sorted(first | other):
        if first.get(name) != other.get(name):
            old, new = (files.get(name, b"").decode("utf-8", "replace").splitlines() for files in (first, other))
            lines = (
                [f"is only in the {'first' if name in first else 'other'}"]
                if (name in first) != (name in other)
                else []
            )
            yield name, lines or list(difflib.unified_diff(old, new, "first", "other", lineterm="", n=1))


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
            table.add_row(name, *(Text(printable(_cell(cell))) for cell in cells))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value.get('metric')} {value.get('value')} at {value.get('iteration')}"
    if isinstance(value, list):
        return "; ".join(map(str, value))
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
