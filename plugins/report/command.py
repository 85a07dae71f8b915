"""``pipeline report``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from pipeline.checkpoint.storage import replacing, storing
from pipeline.errors import ConfigError
from pipeline.run.runs import RunRecord, list_runs
from pipeline.user_code.imports import REPORT_NEEDS, no_package

from ..shared.run_comparison import compare_runs
from .run_data import RunData, read_run


@click.command("report")
@click.argument("paths", metavar="RUN_DIR…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Where to write the page.")
def command(paths: Sequence[Path], output: Path | None) -> None:
    """Write runs as a page to look at: stages, curves, checkpoints, config.

    RUN_DIR is a run directory, or a folder with runs in it. The page is one HTML file that needs no network. That of one run
    is RUN_DIR/report.html, that of several report.html where you are. Nothing of the runs is imported or run.
    """
    for name in REPORT_NEEDS:
        if find_spec(name) is None:
            raise ConfigError(no_package("pipeline report", name))
    records: dict[str, RunRecord] = {}
    for path in paths:
        found = list_runs(path)
        if not found:
            raise ConfigError(f"{path}: there is no run in it; `pipeline runs` lists those of a folder")
        records |= {os.path.realpath(record.path): record for record in reversed(found)}
    file = output or (next(iter(records.values())).path if len(records) == 1 else Path()) / "report.html"
    write_page(file, [read_run(record) for record in records.values()])
    click.echo(file)


def write_page(file: Path, runs: Sequence[RunData]) -> None:
    """Write the page of runs.

    Raises:
        StorageError: the storage refuses.
    """
    from .page import render  # noqa: PLC0415 - imports what draws, which takes most of a second

    first, *others = (run.record.path for run in runs)
    page = render(runs, [compare_runs(first, other) for other in others])
    with storing(file, "write it elsewhere with -o FILE"), replacing(file) as temporary:
        # What the system calls a file may be no UTF-8.
        temporary.write_text(page, encoding="utf-8", errors="replace")
