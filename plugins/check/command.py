"""``pipeline check``."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType

import click

from pipeline.check.checker import check_or_raise
from pipeline.cli import print_traceback, refuse
from pipeline.cli.options import config_and_overrides
from pipeline.errors import ConfigError, ExitCode, Fault
from pipeline.run import log

_DATA = "%\r\n"
_PROPERTY = f"{_DATA}:,"


@click.command("check")
@config_and_overrides
@click.option("--build", is_flag=True, help="Also import classes, build models and optimizers without memory or data.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Also run N steps of each phase; none is kept.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    help="Print the faults on stderr, as JSON on stdout, or there as annotations of GitHub Actions.",
)
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
def command(path: str, overrides: Sequence[str], build: bool, steps: int | None, form: str) -> None:
    """Name every mistake of a config, without running anything.

    The exit code is 0 if there is none, else 2.
    """
    try:
        run_config = check_or_raise(path, overrides)
    except ConfigError as error:
        sys.exit(_refuse(error.faults, form))
    if form == "text":
        click.echo(run_config.swaps, nl=False)
    for note in run_config.notes:
        click.echo(f"note: {note}", err=True)
    if build:
        with _user_code():
            problems, lines = _levels().build(run_config)
        for line in lines:
            click.echo(line, err=form != "text")
        if problems:
            sys.exit(_refuse(_faults(problems), form))
    if steps:
        with _user_code():
            problems = _levels().run_steps(run_config, overrides, steps)
        if problems:
            sys.exit(_refuse(_faults(problems), form, f"{_count(steps)} did not go through; nothing is kept of them"))
    if form == "json":
        click.echo("[]")
    elif form == "text":
        hint = "; what becomes of a batch --steps 1 tells" if build else ""
        click.echo(f"{path}: no faults{f'; {_count(steps)} went through' if steps else hint}")


@contextmanager
def _user_code() -> Iterator[None]:
    """Until the block ends, user code prints to stderr, and its import leaves no files."""
    log.to_stderr("WARNING")
    gc.enable()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.dont_write_bytecode = before


def _levels() -> ModuleType:
    """What is behind ``--build`` and ``--steps``."""
    # It imports torch.
    from . import levels  # noqa: PLC0415

    return levels


def _count(steps: int | None) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"


def _faults(problems: Sequence[tuple[Fault, BaseException | None]]) -> list[Fault]:
    """Show the errors of user code, and return the faults."""
    for _, error in problems:
        if error:
            print_traceback(error)
    return [fault for fault, _ in problems]


def _refuse(faults: Sequence[Fault], form: str, outcome: str = "nothing was run") -> ExitCode:
    if form == "text":
        return refuse(ConfigError(faults), outcome)
    if form == "json":
        click.echo(json.dumps([fault.as_dict() for fault in faults], indent=2))
    else:
        click.echo("\n".join(map(annotation, faults)))
    return ExitCode.USAGE


def annotation(fault: Fault) -> str:
    """The workflow command with which GitHub Actions marks the line of a file."""
    message = f"{fault.address}: {fault.message}" if fault.address else fault.message
    file, cwd = Path(fault.where), Path.cwd()
    if file.is_file():
        path = file.resolve()
        path = path.relative_to(cwd) if path.is_relative_to(cwd) else path
        numbers = {"line": fault.line, "col": fault.column}
        location = f"file={_escaped(str(path), _PROPERTY)}," + "".join(f"{key}={n}," for key, n in numbers.items() if n)
    else:
        location, message = "", f"{fault.where}: {message}"
    return f"::error {location}title=pipeline check::{_escaped(message, _DATA)}"


def _escaped(text: str, characters: str) -> str:
    """The text with these characters escaped for GitHub."""
    return text.translate({ord(character): f"%{ord(character):02X}" for character in characters})
