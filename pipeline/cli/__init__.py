"""The command line: each command is loaded when it is called.

A package adds a command, as this one adds all of its own, through the entry-point group ``pipeline.commands``, in its ``setup.cfg``::

    [options.entry_points]
    pipeline.commands =
        publish = my_package.publish:command

``command`` is a click command, at the top level of its module::

    @click.command()
    @click.argument("run_dir")
    def command(run_dir: str) -> None:
        '''Publish a run.'''

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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, NoReturn

import click

from pipeline.errors import ClassPathError, ConfigError, ExitCode, PipelineError, one_of

# The entry-point group in which installed packages offer theirs; a name that this one has is its own.
GROUP, OURS = "pipeline.commands", "five-stage-pipeline"
# Those that import or read much, and turn the garbage collector on once they have: looking at it all takes a tenth of the
# time of imports, and a third of that of a check.
LONG = ("check", "resume", "run")
INTERRUPTED = "interrupted before anything was run"


class _Commands(click.Group):
    """A group that imports a command only to run it, so that ``--help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_package_entries(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not (paths := _package_entries(ctx).get(cmd_name)):
            return None
        command = _load(cmd_name, paths)
        if cmd_name not in LONG:
            gc.enable()
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            ctx.fail(f"there is no command '{args[0]}'{one_of(args[0], names)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours is shown without a traceback, and sets the exit code."""
        try:
            return super().invoke(ctx)
        except PipelineError as error:
            sys.exit(refuse(error))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            offers = sorted(_package_entries(ctx).items())
            formatter.write_dl([(name, text) for name, paths in offers for text in _help(paths)])


def _package_entries(ctx: click.Context) -> dict[str, dict[str, str]]:
    """Name -> package -> class path of each command."""
    entries: dict[str, dict[str, str]] = ctx.meta.setdefault(GROUP, {})
    # Once for a command line: to look through all packages takes 20 ms.
    for point in () if entries else entry_points(group=GROUP):
        entries.setdefault(point.name, {})[point.dist.name if point.dist else "?"] = point.value
    return entries


def _offer(paths: Mapping[str, str]) -> tuple[str, str]:
    """The class path of a command, ``""`` where it cannot be called, and what is said of several packages that offer it."""
    path = paths.get(OURS) or next(iter(paths.values()))
    others = " and ".join(sorted(repr(package) for package in paths if package != OURS))
    if len(paths) == 1:
        return path, ""
    if OURS in paths:
        return path, f"also offered by {others}, which nobody can call; give it another name there"
    return "", f"offered by {others}; uninstall one of them"


def _help(paths: Mapping[str, str]) -> Iterator[str]:
    """The lines about a command: the first of its docstring, and what is said of several packages."""
    from pipeline.user_code import source  # noqa: PLC0415 - takes 10 ms; only --help needs it

    path, conflict = _offer(paths)
    home, _, function = path.partition(":")
    module = source.quiet_read(home) if path else None
    node = module.bindings.get(function) if module else None
    text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
    if path:
        yield (text or f"{path}, which has no docstring.").splitlines()[0]
    if conflict:
        yield conflict


def _load(name: str, paths: Mapping[str, str]) -> click.Command:
    """Import a command."""
    from pipeline.user_code import class_path  # noqa: PLC0415 - takes 20 ms; --help does without

    path, conflict = _offer(paths)
    if not path:
        raise click.UsageError(f"the command '{name}' is {conflict}")
    where = f"the command '{name}' of the package '{next(iter(paths))}'"
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
    """Make the standard streams writable, whatever they are.

    A closed one is discarded, and so is a pipe once its reader has left. Characters without an encoding are escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest number that is free: its own, which else the next file would get, and with it what C code writes.
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", encoding="utf-8", closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            setattr(sys, name, _opened_again(stream))


def _opened_again(stream: TextIOWrapper) -> TextIOWrapper:
    """Return a standard stream that behaves as the given one, but outlives the reader of its pipe."""
    raw = _StandardStream(stream.fileno(), "w", closefd=False)
    # With PYTHONUNBUFFERED, the stream writes without a buffer.
    unbuffered = isinstance(stream.buffer, FileIO)
    return TextIOWrapper(
        raw if unbuffered else BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _StandardStream(FileIO):
    """Standard output or error. Once the reader of its pipe has left, output is discarded.

    The command continues, and its exit code says how it has ended: `pipeline check … | head -1` leaves with 2 for a
    fault, and a training continues after the reader of its log has exited.
    """

    def write(self, data: Any) -> int:
        """Write bytes; return how many were written."""
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return super().write(data)


def _unwritten(error: OSError) -> ExitCode:
    """Return the exit code if the output cannot be written, and say why."""
    # What is left of it would be tried again at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with suppress(OSError):
        click.echo(f"stdout: cannot be written: {error.strerror}; free the storage, or write elsewhere", err=True)
    return ExitCode.STORAGE
