"""What the commands have in common: the config, the overrides, and how faults are shown."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from pipeline.errors import ClassPathError, ConfigError, ExitCode, PipelineError

_F = TypeVar("_F", bound=Callable[..., Any])


def config_and_overrides(function: _F, words: str = "CONFIG [KEY=VALUE]…") -> _F:
    """``CONFIG [KEY=VALUE…]``, also as ``-m CONFIG`` and ``-o KEY=VALUE``; ``words`` is how the help shows it."""
    example, same = "Set a value, e.g. runner.train_runner.epochs=3.", "The config; the same as naming it first."
    function = click.argument("words", nargs=-1, metavar=words)(function)
    function = click.option("-o", "--override", "options", multiple=True, metavar="KEY=VALUE", help=example)(function)
    return click.option("-m", "--model", "config", metavar="CONFIG", help=same)(function)


def log_level(function: _F) -> _F:
    """``-q`` and ``-v``, which are the ``level`` from which up lines are logged; None without them."""
    function = click.option("-v", "--verbose", "level", flag_value="DEBUG", help="Log details too.")(function)
    return click.option("-q", "--quiet", "level", flag_value="WARNING", help="Log warnings and errors only.")(function)


def split(config: str | None, words: Sequence[str], options: Sequence[str]) -> tuple[str, list[str]]:
    """(config, overrides) of a command line.

    Raises:
        click.UsageError: there is no config, or two.
    """
    overrides = [word for word in words if "=" in word]
    configs = [word for word in words if "=" not in word]
    if config:
        configs.insert(0, config)
    if not configs:
        raise click.UsageError("name a config")
    if len(configs) > 1:
        several = f"name one config, not {len(configs)}: {' '.join(configs)}"
        raise click.UsageError(f"{several}; an override has the form KEY=VALUE")
    return configs[0], overrides + list(options)


def refuse(error: PipelineError, outcome: str = "nothing was run") -> ExitCode:
    """Show an error on stderr, and after the faults of a config what came of them; the exit code for it."""
    click.echo(str(error), err=True)
    if isinstance(error, ClassPathError) and error.user_error:
        print_traceback(error.user_error)
    if isinstance(error, ConfigError) and (count := sum(bool(fault.message) for fault in error.faults)):
        click.echo(f"{count} fault{'s' if count > 1 else ''}; {outcome}", err=True)
    return error.exit_code


def print_traceback(error: BaseException) -> None:
    """Print what a user's own code raised on stderr."""
    click.echo("".join(traceback.format_exception(error, chain=False)).rstrip(), err=True)
