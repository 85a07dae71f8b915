"""``pipeline schema``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pipeline.cli import COMMANDS
from pipeline.config.json_schema import document


@click.command("schema", help=COMMANDS["schema"])
@click.option("-o", "--output", metavar="FILE", help="Write it into a file, and say how a config names it.")
def command(output: str | None) -> None:
    """On stdout, or into a file."""
    text = json.dumps(document(), indent=2)
    if output is None:
        click.echo(text)
        return
    try:
        Path(output).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{output}: cannot be written: {error.strerror}; check the path") from error
    click.echo(f"{output} written; begin a config with: # yaml-language-server: $schema={output}", err=True)
