"""The command line: one module per command, loaded when it is called.

A package adds a command through the entry-point group ``pipeline.commands``, in its ``setup.cfg``::

    [options.entry_points]
    pipeline.commands =
        report = my_package.report:command

``command`` is a click command, at the top level of its module::

    @click.command()
    @click.argument("run_dir")
    def command(run_dir: str) -> None:
        '''Write a report of a run.'''

A PipelineError that it raises is shown without a traceback, and the process leaves with the error's exit code.
The package is imported only when its command is called. ``pipeline --help`` lists the command with the first line of its
docstring, which is read from the source.
"""

from __future__ import annotations

import ast
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from pipeline.errors import ClassPathError, ConfigError, ExitCode, PipelineError, one_of

# Command -> what it does; each is in the module of its name, with ``_`` for ``-``.
COMMANDS = {
    "check": "Name every mistake of a config, without running anything.",
    "run": "Run a config.",
}
# The entry-point group in which installed packages offer theirs.
GROUP = "pipeline.commands"
# Those that import or read much, and turn the garbage collector on once they have: looking at it all takes a tenth of the
# time of imports, and a third of that of a check.
LONG = ("check", "resume", "run")
INTERRUPTED = "interrupted before anything was run"


class _Commands(click.Group):
    """A group that imports a command only to run it, so that ``--help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *package_entries()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            command: click.Command = import_module(f"pipeline.cli.{cmd_name.replace('-', '_')}").command
        elif paths := package_entries().get(cmd_name):
            command = _load(cmd_name, paths)
        else:
            return None
        if cmd_name not in LONG:
            gc.enable()
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            if args[0] not in names:
                ctx.fail(f"there is no command '{args[0]}'{one_of(args[0], names)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours is shown without a traceback, and sets the exit code."""
        try:
            return super().invoke(ctx)
        except PipelineError as error:
            sys.exit(refuse(error))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        packages = [(name, _help(name, paths)) for name, paths in package_entries().items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted([*COMMANDS.items(), *packages], key=lambda row: row[0]))


def package_entries(group: str = GROUP) -> dict[str, dict[str, str]]:
    """Name -> package -> class path in an entry-point group."""
    entries: dict[str, dict[str, str]] = {}
    for point in entry_points(group=group):
        entries.setdefault(point.name, {})[point.dist.name if point.dist else "?"] = point.value
    return entries


def _names(packages: Iterable[str]) -> str:
    return " and ".join(sorted(map(repr, packages)))


def _conflict(name: str, paths: Mapping[str, str]) -> str:
    """Why a command of a package cannot be called; ``""`` if it can."""
    if name in COMMANDS:
        return f"also offered by {_names(paths)}, which nobody can call; give it another name there"
    return f"offered by {_names(paths)}; uninstall one of them" if len(paths) > 1 else ""


def _help(name: str, paths: Mapping[str, str]) -> str:
    """The line about a package's command: the first of its docstring."""
    from pipeline.user_code import source  # noqa: PLC0415 - takes 10 ms; only --help needs it

    path = next(iter(paths.values()))
    home, _, function = path.partition(":")
    module = source.quiet_read(home)
    node = module.bindings.get(function) if module else None
    text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
    return _conflict(name, paths) or (text or f"{path}, which has no docstring.").splitlines()[0]


def _load(name: str, paths: Mapping[str, str]) -> click.Command:
    """Import the command of a package."""
    from pipeline.user_code import class_path  # noqa: PLC0415 - takes 20 ms; only a package's command needs it

    if conflict := _conflict(name, paths):
        raise click.UsageError(f"the command '{name}' is {conflict}")
    where, path = f"the command '{name}' of the package {_names(paths)}", next(iter(paths.values()))
    try:
        command = class_path.load(class_path.parse(path))
    except ClassPathError as error:
        raise click.UsageError(f"{where}: {error}") from error
    if not isinstance(command, click.Command):
        raise click.UsageError(f"{where}: '{path}' is no click command; write @click.command() above it")
    return command


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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="five-stage-pipeline", prog_name="pipeline")
def group() -> None:
    """Run PyTorch training jobs as five swappable stages: instance, network, startup, runner, terminal."""


def main() -> NoReturn:
    """The command ``pipeline``."""
    # torch says so on import wherever numpy is not installed; we don't need it. Nor do workers that are spawned.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy")
    if "WORLD_SIZE" in os.environ:
        # c10d warns of each wait in its store that has a limit.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # What is being imported is no garbage.
    gc.disable()
    _use_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        sys.exit(group(prog_name="pipeline", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except click.Abort:
        # Ctrl-C before the command had begun.
        click.echo(INTERRUPTED, err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            sys.exit(_unwritten(error))
        # What a command names and does not look at more closely itself.
        click.echo(f"{error.filename}: {error.strerror}; check the path", err=True)
        sys.exit(ExitCode.USAGE)
    finally:
        # Python ends by SIGINT, whatever the exit code, if a KeyboardInterrupt has left the last exec() of a string, as
        # dataclasses have one.
        exec("")


def _end(*_: object) -> NoReturn:
    """Ctrl-C while a command is imported: torch swallows a KeyboardInterrupt then, and nothing has to be closed yet."""
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


def _use_streams() -> None:
    """Make the standard streams writable: a closed one is discarded, characters without an encoding are escaped."""
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
    """The exit code if the output cannot be written; a closed pipe needs no message."""
    # What is left of it would be tried again at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not isinstance(error, BrokenPipeError):
        with suppress(OSError):
            click.echo(f"stdout: cannot be written: {error.strerror}; free the storage, or write elsewhere", err=True)
    return ExitCode.STORAGE
