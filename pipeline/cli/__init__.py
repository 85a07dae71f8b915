"""The command line: one module per command, loaded when it is called."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

import click

from pipeline.errors import ExitCode, one_of

COMMANDS = {
    "check": "Name every mistake of a config, without running anything.",
    "checkpoint": "List, show, verify, compare and export checkpoints.",
    "convert": "Turn a PaddleRec 1.8.5 config into one of ours.",
    "explain": "Say what a config value means, and what set it.",
    "graph": "Draw the five stages with the keys that flow between them.",
    "new": "Write a workspace to edit, or a stage or plugin to add to one.",
    "resume": "Go on with a run that was interrupted.",
    "resume-test": "Kill a run, resume it, and compare it with one that nothing interrupts.",
    "run": "Run a config.",
    "schema": "Write a JSON Schema, with which editors complete and check a config.",
    "show": "Print the resolved config, each value with where it came from.",
    "stages": "List the stages: base classes, shipped ones, arguments, keys.",
}
"""Command -> what it does; each is in the module of its name, with ``_`` for ``-``."""
LONG = ("resume", "run")
"""Those that import much, and turn the garbage collector on once they have: looking at it all takes as long as a tenth of it."""


class _Commands(click.Group):
    """A group that imports a command only to run it, so that ``--help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"pipeline.cli.{cmd_name.replace('-', '_')}").command
        if cmd_name not in LONG:
            gc.enable()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command '{args[0]}'{one_of(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="five-stage-pipeline", prog_name="pipeline")
def group() -> None:
    """Run PyTorch training jobs as five swappable stages: instance, network, startup, runner, terminal."""


def main() -> NoReturn:
    """The command ``pipeline``."""
    # torch says so on import wherever numpy is not installed; we don't need it. Nor do workers that are spawned.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    # What is being imported is no garbage.
    gc.disable()
    _use_streams()
    try:
        sys.exit(group(prog_name="pipeline", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except click.Abort:
        # Ctrl-C while a command was still being imported, or before it had begun.
        click.echo("interrupted before anything was run", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            sys.exit(_unwritten(error))
        # What a command names and does not look at more closely itself.
        click.echo(f"{error.filename}: {error.strerror}; check the path", err=True)
        sys.exit(ExitCode.USAGE)


def _use_streams() -> None:
    """Standard streams that can be written: what is closed leads nowhere, and what one cannot encode comes as its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest number that is free: its own, which else the next file would get, and with it what C code writes.
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _unwritten(error: OSError) -> ExitCode:
    """What a command says could not be written: a pipe that nobody reads any more needs no word."""
    # What is left of it would be tried again at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not isinstance(error, BrokenPipeError):
        with suppress(OSError):
            click.echo(f"stdout: cannot be written: {error.strerror}; free the storage, or write elsewhere", err=True)
    return ExitCode.STORAGE
