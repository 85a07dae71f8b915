"""``pipeline resume``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from pipeline.cli.options import log_level, processes
from pipeline.cli.run import run_and_leave
from pipeline.run import log
from pipeline.run.directory import parse_command
from pipeline.run.resume import refuse_strangers, split_path
from pipeline.trainer import GeneralTrainer


@click.command("resume")
@click.argument("path", metavar="RUN_DIR|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]…")
@processes
@log_level
def command(path: Path, words: tuple[str, ...], level: str | None, **launching: Any) -> None:
    """Resume a run that was interrupted.

    The run in RUN_DIR goes on, or from a CHECKPOINT in one, with the config, overrides and code that it was started with.
    KEY=VALUE are further overrides, in which a relative path belongs to the folder in which the run was begun. With more
    epochs, or a higher max_steps, a run that was finished goes on.
    """
    log.to_stderr(level or "INFO")
    run_dir, checkpoint = split_path(path)
    refuse_strangers(run_dir)
    folder, config, workspace, overrides = _run_origin(run_dir)
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"config {config}, workspace {workspace}, begun in {folder}", err=True)
    if not Path(folder).is_dir():
        raise click.UsageError(f"{run_dir / 'command.txt'}: the folder {folder} is not there any more")
    # Processes that are started have this folder, and the words that were typed in another.
    command_line = [os.path.abspath(word) if Path(word) == path else word for word in sys.argv[1:]]
    # Outputs are relative to where the run was begun.
    os.chdir(folder)
    run_and_leave(
        lambda: GeneralTrainer(config, [*overrides, *words], checkpoint or run_dir), command_line, **launching
    )


def _run_origin(run_dir: Path) -> tuple[str, str, str, list[str]]:
    """(folder, config, workspace, overrides) with which a run was started, from its ``command.txt``."""
    file = run_dir / "command.txt"
    try:
        facts = parse_command(file.read_text("utf-8", "surrogateescape"))
        origin = facts["folder"], facts["config"], facts["workspace"], _words(facts["overrides"])
    except KeyError as error:
        raise click.UsageError(f"{file}: has no {error.args[0]}; {_by_hand(run_dir)}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        what = f"is no run directory, or its command.txt cannot be read ({error})"
        raise click.UsageError(f"{run_dir}: {what}; {_by_hand(run_dir)}") from error
    if facts["config"] == "None":
        remedy = f"use GeneralTrainer(…, resume={str(run_dir)!r})"
        raise click.UsageError(f"{file}: has no config: it was run from Python; {remedy}")
    return origin


def _words(text: str) -> list[str]:
    words = json.loads(text)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"its overrides are {text[:60]}")
    return words


def _by_hand(run_dir: Path) -> str:
    return f"name the config yourself: pipeline run CONFIG --resume {run_dir}"
