"""``pipeline check``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click

from pipeline.check import check
from pipeline.cli import COMMANDS
from pipeline.cli.arguments import config_and_overrides, refuse, split
from pipeline.errors import ConfigError, ExitCode


@click.command("check", help=COMMANDS["check"])
@config_and_overrides
@click.option("--json", "as_json", is_flag=True, help="Print the faults as JSON, on stdout.")
def command(config: str | None, words: Sequence[str], options: Sequence[str], as_json: bool) -> None:
    """Exit 0 if there are no faults, else 2."""
    path, overrides = split(config, words, options)
    faults = check(path, overrides)
    if as_json:
        click.echo(json.dumps([fault.as_dict() for fault in faults], indent=2))
        sys.exit(ExitCode.USAGE if faults else ExitCode.DONE)
    if faults:
        sys.exit(refuse(ConfigError(faults)))
    click.echo(f"{path}: no faults")
