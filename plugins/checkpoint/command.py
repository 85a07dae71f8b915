"""``pipeline checkpoint``: looks at checkpoints and changes nothing. torch is imported only by what needs it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click
from loguru import logger

from pipeline.checkpoint import layout
from pipeline.checkpoint.storage import finite
from pipeline.config import yaml_tree
from pipeline.config.load import BEST, LAST
from pipeline.errors import ConfigError, ExitCode, printable
from pipeline.run import log
from pipeline.run.directory import is_run_directory

from .. import size_in_words
from ..shared import checkpoint_listing as listing
from ..shared.checkpoint_listing import Checkpoint
from ..shared.which import which_option

# Metrics that a line shows.
_NUMBERS = 4
_PATH = click.Path(path_type=Path)


@click.group("checkpoint")
def command() -> None:
    """List, show, verify, compare and export checkpoints.

    Exit codes are those of a run, and 1 if something is damaged or different.
    """


@command.command("ls", short_help="List checkpoints, as they describe themselves.")
@click.argument("path", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def ls(path: Path, as_json: bool) -> None:
    """List the checkpoints of a run directory, runner or folder; nothing is verified, and a run may be saving there."""
    if listing.is_checkpoint(path):
        tables = {path: [listing.describe_checkpoint(path)]}
    else:
        tables = {folder: listing.list_checkpoints(folder) for folder in listing.checkpoint_folders(path)}
    if as_json:
        entries = [{**asdict(row), "path": str(row.path)} for rows in tables.values() for row in rows]
        click.echo(json.dumps(finite(entries), indent=2))
        return
    for folder, rows in tables.items():
        click.echo(_table(folder, rows))
    if not any(tables.values()):
        click.echo(f"{path}: there is no checkpoint in it", err=True)


@command.command("show", short_help="Show what is in a checkpoint.")
@click.argument("path", type=_PATH)
def show(path: Path) -> None:
    """Show, as YAML, the counters, numbers, files, tensors and training state of a checkpoint, or of the newest in PATH."""
    from .report import describe  # noqa: PLC0415 - it imports torch

    click.echo(yaml_tree.dump(describe(_one(path))), nl=False)


@command.command("verify", short_help="Read checkpoints completely, and name every damaged file.")
@click.argument("path", type=_PATH)
def verify(path: Path) -> None:
    """Exit 0 if every checkpoint in PATH is as it was written, 1 if one is damaged, 78 if a folder has no valid one."""
    if listing.is_checkpoint(path):
        sys.exit(ExitCode.DONE if _is_valid(path) else ExitCode.FAILED)
    codes = [_verified(folder) for folder in listing.checkpoint_folders(path)]
    sys.exit(max(codes, default=ExitCode.DONE))


@command.command("diff", short_help="Say in what two checkpoints differ.")
@click.argument("one", type=_PATH)
@click.argument("other", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def diff(one: Path, other: Path, as_json: bool) -> None:
    """Compare weights, training state, counters and metrics bit for bit; exit 0 if they are equal, 1 if not."""
    from pipeline.checkpoint.reader import read_checkpoint  # noqa: PLC0415 - it imports torch

    from ..shared.differences import checkpoint_differences  # noqa: PLC0415 - it imports torch

    differences = list(checkpoint_differences(*(read_checkpoint(_one(path)) for path in (one, other))))
    if as_json:
        click.echo(json.dumps(finite([asdict(difference) for difference in differences]), indent=2))
    else:
        click.echo("\n".join(map(str, differences)) or "equal, bit for bit")
    sys.exit(ExitCode.FAILED if differences else ExitCode.DONE)


@command.command("export", short_help="Write the weights alone as a safetensors file.")
@click.argument("path", type=_PATH)
@click.option(
    "-o", "--output", type=_PATH, required=True, metavar="FILE", help="The file, which ends with .safetensors."
)
@click.option(
    "--phase", metavar="NAME", help="The weights of one phase; with several, names are `phase.name` without it."
)
@which_option
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def export(
    path: Path,
    output: Path,
    phase: str | None,
    which: str | int | None,
    force: bool,
) -> None:
    """Write the weights of a checkpoint once they are verified.

    Of a run, a runner or a folder, the best checkpoint is taken if it keeps one, else the last.
    """
    from . import report  # noqa: PLC0415 - it imports torch

    log.to_stderr("INFO")
    if listing.is_checkpoint(path):
        if which is not None:
            what = f"{path}: is a checkpoint, and --which {which} names another"
            raise click.UsageError(f"{what}; leave one of them out")
        checkpoint = path
    else:
        checkpoint = _choose(path, which)
    tensors = report.export(checkpoint, output, phase, force=force)
    click.echo(f"{output}: {len(tensors)} tensors written", err=True)


def _one(path: Path) -> Path:
    """The checkpoint that a path names; if it is the newest of several, say so."""
    checkpoint = listing.choose_checkpoint(path)
    if checkpoint != path:
        click.echo(f"the newest in {path} is {checkpoint.name}", err=True)
    return checkpoint


def _choose(path: Path, which: str | int | None) -> Path:
    """Choose a checkpoint of a run, of a runner's folder or of a folder of checkpoints."""
    # It imports torch.
    from pipeline.checkpoint.initial_weights import checkpoint_of_run  # noqa: PLC0415

    # For a path that is none of these, this says what to name.
    listing.checkpoint_folders(path)
    absolute = Path(os.path.abspath(path))
    if is_run_directory(absolute):
        return checkpoint_of_run(absolute, which)
    runner = absolute.parent if absolute.name == layout.FOLDER else absolute
    if is_run_directory(runner.parent):
        return checkpoint_of_run(runner.parent, which, runner.name)
    return _choose_by_record(path, which)


def _choose_by_record(path: Path, which: str | int | None) -> Path:
    """Choose a checkpoint of a folder without a config, by what its newest checkpoint records.

    Raises:
        ConfigError: there is none, or nothing records which is the best.
    """
    checkpoints = listing.only_checkpoints(path)
    best = listing.best_checkpoint(checkpoints)
    if which is None:
        chosen = best or checkpoints[-1]
        newest = "the newest checkpoint, since none is recorded as the best"
        reason = "the best checkpoint" if best else newest
        logger.info(f"{chosen} is taken: {reason}")
        return chosen
    by_name: dict[str | int, Path] = {layout.step_of(path) or 0: path for path in checkpoints}
    by_name[LAST] = checkpoints[-1]
    if best:
        by_name[BEST] = best
    if which not in by_name:
        known = ", ".join(map(str, by_name))
        raise ConfigError(f"{path}: has no checkpoint '{which}'; name one of these: {known}")
    return by_name[which]


def _verified(folder: Path) -> ExitCode:
    """The exit code for a folder: 78 if it has no valid checkpoint left."""
    checkpoints, damaged = layout.committed_checkpoints(folder), layout.bad_checkpoints(folder)
    valid = [_is_valid(path) for path in checkpoints]
    for path in damaged:
        click.echo(f"{path}: {listing.SET_ASIDE}, and not looked at", err=True)
    if (checkpoints or damaged) and not any(valid):
        click.echo(f"{folder}: none of its checkpoints is valid; bring one back from a copy", err=True)
        return ExitCode.NO_CHECKPOINT
    return ExitCode.DONE if all(valid) else ExitCode.FAILED


def _is_valid(path: Path) -> bool:
    """Verify a checkpoint and print the result; one that is removed meanwhile does not count."""
    from pipeline.checkpoint.reader import problems_of  # noqa: PLC0415 - it imports torch

    problems = problems_of(path)
    if problems and not os.path.lexists(path):
        click.echo(f"{path}: has been removed meanwhile", err=True)
        return True
    click.echo("\n".join(problems) or f"{path}: is as it was written")
    return not problems


def _table(folder: Path, checkpoints: list[Checkpoint]) -> str:
    """A folder, and a line for each of its checkpoints."""
    rows = [("step", "epoch", "size", "metrics", ""), *map(_row, checkpoints)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for step, epoch, size, metrics, marks in rows:
        right = f"{step:>{widths[0]}}  {epoch:>{widths[1]}}  {size:>{widths[2]}}"
        lines.append(f"{right}  {metrics:<{widths[3]}}  {marks}".rstrip())
    return "\n".join([f"{folder}", *map(printable, lines)])


def _row(checkpoint: Checkpoint) -> tuple[str, ...]:
    numbers = [
        f"{phase}.{name} {value:.5g}{_of_earlier(checkpoint, phase, name)}"
        for phase, numbers in checkpoint.metrics.items()
        for name, value in numbers.items()
        if isinstance(value, int | float)
    ]
    metrics = ", ".join([*numbers[:_NUMBERS], *(["…"] if len(numbers) > _NUMBERS else [])])
    marks = ["newest"] * checkpoint.newest + ["best"] * checkpoint.best
    if checkpoint.apart:
        marks.append(f"{checkpoint.path.name}: {checkpoint.apart}")
    if checkpoint.problem:
        marks.append(checkpoint.problem)
    counts = ["" if count is None else str(count) for count in (checkpoint.step, checkpoint.counters.get("epoch"))]
    return (*counts, size_in_words(checkpoint.size), metrics, ", ".join(marks))


def _of_earlier(checkpoint: Checkpoint, phase: str, name: str) -> str:
    """`` of 8`` where a number is of an earlier iteration than the checkpoint."""
    iteration = checkpoint.iterations.get(phase, {}).get(name, checkpoint.step)
    return "" if iteration == checkpoint.step else f" of {iteration}"
