"""``pipeline schema``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from .document import document


@click.command("schema")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write it into a new file or over an older schema, and say how a config names it.",
)
def command(output: str | None) -> None:
    """Write a JSON Schema, with which editors complete and check a config.

    On stdout, or into a file.
    """
    text = json.dumps(document(), indent=2)
    if output is None:
        click.echo(text)
        return
    file = Path(output)
    if os.path.isfile(file) and not _is_ours(file):  # of a name too long it says no
        raise click.UsageError(f"{file}: exists already, and is no schema of ours; name another file, or remove it")
    try:
        file.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{output}: cannot be written: {error.strerror}; check the path") from error
    click.echo(f"{output} written; begin a config with: # yaml-language-server: $schema={output}", err=True)


def _is_ours(file: Path) -> bool:
    """Whether a file is a schema that this command has written."""
    try:
        schema = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(schema, dict) and schema.get("title") == document()["title"]
