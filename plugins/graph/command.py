"""``pipeline graph``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from pipeline.check.checker import inspect
from pipeline.cli.options import config_and_overrides
from pipeline.errors import ConfigError

from .. import print_tables
from .graph import graphs, mermaid, table


@click.command("graph")
@config_and_overrides
@click.option("--mermaid", "as_mermaid", is_flag=True, help="Print it as Mermaid, which GitHub and many editors draw.")
def command(path: str, overrides: Sequence[str], as_mermaid: bool) -> None:
    """Print the five stages with the keys that flow between them, as a table or as Mermaid.

    On stdout; faults go to stderr, and what can be told is printed all the same.
    """
    checked = inspect(path, overrides)
    drawn = graphs(checked.flows, checked.faults)
    if drawn and as_mermaid:
        click.echo(mermaid(drawn), nl=False)
    else:
        print_tables(map(table, drawn))
    if checked.faults:
        raise ConfigError(checked.faults)
