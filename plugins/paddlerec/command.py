"""``pipeline convert``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pipeline.errors import ConfigError, ExitCode


@click.command("convert")
@click.argument("config")
@click.option("-o", "--output", metavar="FILE", help="Where to write it, instead of to stdout; a new file.")
def command(config: str, output: str | None) -> None:
    """Turn a PaddleRec 1.8.5 config into one of ours.

    The new config goes to stdout. What could not be carried, or is different now, is said on stderr.
    """
    try:
        from .convert import convert  # noqa: PLC0415 - imports ruamel.yaml, an extra
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ruamel":
            raise
        what = "it is needed to keep comments; run `pip install 'five-stage-pipeline[paddlerec]'`"
        click.echo(f"ruamel.yaml: is not installed, and {what}", err=True)
        sys.exit(ExitCode.USAGE)
    try:
        converted = convert(Path(config), Path(output or config).parent)
        if output:
            _write(output, converted.text)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(ExitCode.USAGE)
    if not output:
        click.echo(converted.text, nl=False)
    for note in converted.notes:
        click.echo(str(note), err=True)


def _write(output: str, text: str) -> None:
    """Write a new file.

    Raises:
        ConfigError: there is one already, or it cannot be written.
    """
    try:
        with open(output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{output}: exists already; name another file, or remove it") from error
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}; check the path") from error
