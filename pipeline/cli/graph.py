"""``pipeline graph``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from pipeline.check import inspect
from pipeline.cli import COMMANDS
from pipeline.cli.arguments import refuse, split
from pipeline.errors import ConfigError
from pipeline.graph.edges import Graph, graphs
from pipeline.graph.mermaid import mermaid
from pipeline.graph.svg import svg
from pipeline.graph.text import text

_FORMS: dict[str, Callable[[Sequence[Graph]], str]] = {".svg": svg, ".mmd": mermaid}


@click.command("graph", help=COMMANDS["graph"])
@click.argument("words", nargs=-1, metavar="CONFIG [KEY=VALUE]…")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Draw it into a .svg or .mmd file."
)
def command(words: Sequence[str], output: Path | None) -> None:
    """As text on stdout, or into a file; faults go to stderr, and what can be drawn is drawn all the same."""
    if output and output.suffix not in _FORMS:
        raise click.UsageError(f"{output}: a graph cannot be drawn as '{output.suffix}'; write {' or '.join(_FORMS)}")
    path, overrides = split(None, words, ())
    checked = inspect(path, overrides)
    drawn = graphs(checked.flows, checked.faults)
    if drawn and output:
        _write(output, _FORMS[output.suffix](drawn))
    elif drawn:
        click.echo(text(drawn), nl=False)
    if checked.faults:
        sys.exit(refuse(ConfigError(checked.faults)))


def _write(output: Path, drawing: str) -> None:
    try:
        output.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{output}: cannot be written: {error.strerror}; check the path") from error
    click.echo(f"{output} written", err=True)
