"""How faults are shown, and what a command leaves with."""

from __future__ import annotations

import traceback

import click

from pipeline.errors import ClassPathError, ConfigError, ExitCode, PipelineError


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
