"""Where log lines go: to stderr, and in full to the run's ``log.txt``. Standard logging and warnings join them."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from loguru import logger

from pipeline.checkpoint.storage import no_link, storing
from pipeline.user_code.tracebacks import with_traceback

_STDERR_FORMAT = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> {message}"

_FILE_FORMAT = "{{time:YYYY-MM-DD HH:mm:ss.SSS}} {{level: <7}} rank {rank} {{name}}:{{line}} {{message}}"


class _ToLoguru(logging.Handler):
    """Passes the records of standard logging to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it under its own level and logger name."""
        known = record.levelname in {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}
        level = record.levelname if known else record.levelno
        error, message = record.exc_info and record.exc_info[1], f"{record.name}: {record.getMessage()}"
        logger.log(level, with_traceback(message, error) if error else message)


class StandardLogger:
    """loguru's logger, which also takes the arguments of standard logging: ``info("%d", 1)``."""

    def __getattr__(self, name: str) -> Any:
        """What loguru's logger has by this name."""
        if name not in {"debug", "info", "warn", "warning", "error", "critical", "exception", "log"}:
            return getattr(logger, name)
        return partial(_fill_in, "warning" if name == "warn" else name)


def _fill_in(method: str, *args: Any, exc_info: Any = None, **kwargs: Any) -> None:
    log = getattr(logger.opt(depth=1, exception=exc_info), method)
    level = args[: method == "log"]
    # loguru knows those of standard logging by name.
    level = tuple(logging.getLevelName(own) if own in range(10, 51, 10) else own for own in level)
    message, *values = args[len(level) :]
    if values:
        message, kwargs = _filled(str(message), values, kwargs), {}
    log(*level, message, **kwargs)


def _filled(message: str, values: Sequence[Any], named: Mapping[str, Any]) -> str:
    if "{" in message:
        with suppress(LookupError, ValueError, AttributeError):
            return message.format(*values, **named)
    # As standard logging, of which a mapping may be the only value.
    alone = len(values) == 1 and isinstance(values[0], Mapping)
    with suppress(LookupError, ValueError, TypeError):
        return message % (values[0] if alone else tuple(values))
    return f"{message} {', '.join(map(str, values))}"


def to_stderr(level: str) -> None:
    """Log to stderr only, from ``level`` up; the command line calls this once.

    The stream is looked up at each line: a progress bar puts its own in place while it is shown.
    """
    logger.remove()
    _add_stderr(level, os.environ.get("RANK", "0"))


def _add_stderr(level: str, rank: str) -> None:
    """Of several processes, those other than rank 0 show warnings and errors alone, with their rank."""
    form = _STDERR_FORMAT
    if rank != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
        level = max(level, "WARNING", key=lambda name: logger.level(name).no)
        form = form.replace("{message}", f"rank {rank}: {{message}}")
    logger.add(_write_to_stderr, level=level, format=form, colorize=on_terminal(), diagnose=False, backtrace=False)


def on_terminal() -> bool:
    """Return whether stderr is a terminal; a program without a console has no stderr at all."""
    return is_terminal(sys.stderr)


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal.

    A program may have replaced a standard stream by an object without ``isatty``, or closed it.
    """
    isatty = getattr(stream, "isatty", None)
    with suppress(ValueError):
        return bool(isatty and isatty())
    return False


def _write_to_stderr(line: str) -> None:
    if sys.stderr:
        sys.stderr.write(_fit(line) if on_terminal() else line)


def _fit(line: str) -> str:
    """A line of the log, with breaks between its words where the terminal is narrower; further lines are left as they are."""
    record, (first, *others) = getattr(line, "record", {}), line.split("\n")
    text = str(record.get("message", "")).partition("\n")[0]
    head = first.removesuffix(text)
    # Without the colours.
    indent = len(re.sub(r"\x1b\[[\d;]*m", "", head))
    with suppress(AttributeError, OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        if columns > 2 * indent and len(text) > columns - indent:
            # A number stays beside its name.
            text = re.sub(r"(?<=\S) (?=[\d-])", "\0", text)
            parts = textwrap.wrap(text, columns - indent, break_long_words=False, break_on_hyphens=False)
            return "\n".join([head + f"\n{' ' * indent}".join(parts).replace("\0", " "), *others])
    return line


@contextmanager
def to_file(path: Path, rank: int, otherwise: str = "set output_dir") -> Iterator[None]:
    """Until the block ends, write every line to ``path`` too, and catch standard logging and warnings.

    Args:
        path: the file.
        rank: of this process.
        otherwise: the remedy to write it elsewhere, for the message.

    Raises:
        StorageError: the file cannot be opened.
    """
    show, handlers, level = warnings.showwarning, logging.root.handlers[:], logging.root.level
    with storing(path, otherwise):
        # No buffer: what was refused would be tried again with every line, and at the end.
        file = FileIO(path, "a", opener=no_link)
    write, form = _LogFile(file, path).write, _FILE_FORMAT.format(rank=rank)
    sink = logger.add(write, level="DEBUG", format=form, diagnose=False, backtrace=False)
    logging.root.handlers, warnings.showwarning = [_ToLoguru()], _log_warning
    logging.root.setLevel(logging.INFO)
    if rank:
        # loguru's own, where nobody has chosen another.
        with suppress(ValueError):
            logger.remove(0)
            _add_stderr("WARNING", str(rank))
    try:
        yield
    finally:
        logging.root.handlers, warnings.showwarning = handlers, show
        logging.root.setLevel(level)
        try:
            logger.remove(sink)
        finally:
            file.close()


class _LogFile:
    """A log file; a line that the storage refuses ends no run, and is reported once on stderr."""

    def __init__(self, file: FileIO, path: Path) -> None:
        self._file, self._path = file, path
        self._refused = False

    def write(self, line: str) -> None:
        """Add a line."""
        rest = memoryview(line.encode("utf-8", "backslashreplace"))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if not self._refused:
                lost = f"{self._path}: cannot be written: {error.strerror}; lines are missing in it"
                _write_to_stderr(f"{lost}; free or repair the storage\n")
            self._refused = True
        else:
            self._refused = False


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: Any, **kwargs: Any
) -> None:
    logger.warning(f"{filename}:{lineno}: {category.__name__}: {message}")
