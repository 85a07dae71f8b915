"""``pipeline resume``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from pipeline import log
from pipeline.cli import COMMANDS
from pipeline.cli.run import run
from pipeline.errors import ExitCode


@click.command("resume", help=COMMANDS["resume"])
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("-q", "--quiet", is_flag=True, help="Log warnings and errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Log details too.")
def command(run_dir: Path, quiet: bool, verbose: bool) -> None:
    """Go on in RUN_DIR with the config, overrides and code that it was begun with."""
    log.to_stderr("WARNING" if quiet else "DEBUG" if verbose else "INFO")
    told = _command(run_dir)
    _refuse_strangers(run_dir)
    folder, config, overrides = told["folder"], told["config"], told["overrides"]
    click.echo(f"config {config}, workspace {told['workspace']}, from {folder}", err=True)
    resumed = str(run_dir.resolve())
    if not Path(folder).is_dir():
        raise click.UsageError(f"{run_dir / 'command.txt'}: the folder {folder} is not there any more")
    # Outputs are relative to where the run was begun.
    os.chdir(folder)
    sys.exit(run(config, json.loads(overrides), resumed))


def _command(run_dir: Path) -> dict[str, str]:
    """The lines of ``command.txt``."""
    try:
        text = (run_dir / "command.txt").read_text(encoding="utf-8")
        told = dict(line.split(": ", 1) for line in text.splitlines())
        missing = [name for name in ("folder", "config", "workspace", "overrides") if name not in told]
    except (OSError, ValueError) as error:
        raise click.UsageError(
            f"{run_dir}: is no run directory, or its command.txt cannot be read ({error})"
        ) from error
    if missing or told["config"] == "None":
        lacking = missing[0] if missing else "config: it was run from Python"
        raise click.UsageError(
            f"{run_dir / 'command.txt'}: has no {lacking}; use GeneralTrainer(…, resume={str(run_dir)!r})"
        )
    return told


def _refuse_strangers(run_dir: Path) -> None:
    """What is in a run directory names code that is then run: nobody else may have written it."""
    about = run_dir.stat()
    if about.st_uid != os.getuid():
        click.echo(
            f"{run_dir}: belongs to user {about.st_uid}, and names code to run; run the config yourself", err=True
        )
        sys.exit(ExitCode.USAGE)
    if about.st_mode & 0o022:
        click.echo(
            f"{run_dir}: others may write to it, and it names code to run; chmod go-w it if it is yours", err=True
        )
        sys.exit(ExitCode.USAGE)
