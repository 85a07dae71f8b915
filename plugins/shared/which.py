"""The option ``--which`` of the commands that take a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeline.config.load import BEST, LAST

_F = TypeVar("_F", bound=Callable[..., Any])


def which_option(function: _F) -> _F:
    """Add ``--which``: the command gets ``best``, ``last``, an iteration as a number, or None."""
    text = "Which checkpoint of a run; default: the best if the run keeps one, else the last."
    option = click.option("--which", metavar=f"{BEST}|{LAST}|N", callback=_parse, help=text)
    return option(function)


def _parse(_context: click.Context, _option: click.Parameter, value: str | None) -> str | int | None:
    if value is None or value in (BEST, LAST):
        return value
    if value.isdecimal():
        return int(value)
    message = f"--which {value}: write {BEST}, {LAST} or the iteration of a checkpoint"
    raise click.UsageError(message)
