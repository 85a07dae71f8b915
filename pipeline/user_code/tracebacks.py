"""Errors of user code, at import or in a run, shown in the user's own frames."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb, format_exception, walk_tb
from types import CodeType, TracebackType

from pipeline import workspaces
from pipeline.errors import ClassPathError, PipelineError
from pipeline.user_code import imports
from pipeline.user_code.source import find_spec

_OURS = f"{Path(__file__).parents[1]}{os.sep}"

_LOADING = ("<frozen importlib", str(workspaces.__file__))


def with_traceback(message: str, error: BaseException) -> str:
    """A message and the traceback of an error; loguru's own would show the values of variables, which may be secret."""
    return "\n".join([message, "".join(format_exception(error)).rstrip()])


def no_module(text: str, module: str) -> str:
    """The message for a class path whose module does not exist."""
    package, top = module.rpartition(".")[0], module.partition(".")[0]
    if imports.moved(module) or (package and find_spec(package)):
        return f"'{text}': {imports.no_module(module)}"
    return f"'{text}': there is no module '{module}'; check the spelling, or install the package that has '{top}'"


def import_failed(text: str, module: str, file: Path | None, error: BaseException) -> ClassPathError:
    """The error for a class path whose module raised when it was imported."""
    user_error = _shorten_messages(error.with_traceback(user_traceback(error.__traceback__)))
    frames = extract_tb(user_error.__traceback__)
    if not frames and find_spec(module) is None:
        return ClassPathError(no_module(text, module))
    # The file that failed: the one that the path names, or one that it imports.
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(file or module)
    what = _wrong_import(error, user_error.__traceback__, place) if isinstance(error, ImportError) else None
    # Compiled strings may have no place of their own.
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        place = ":".join(str(part) for part in (error.filename, error.lineno) if part)
    failed = f"importing {file or module} failed at {place}: {type(error).__name__}: {error}; mend the file"
    return ClassPathError(f"'{text}': {what or failed}", user_error)


def _shorten_messages(error: BaseException) -> BaseException:
    """The error and its causes, without the internal names of workspace packages."""
    current: BaseException | None = error
    while current:
        current.args = tuple(_shorten(part) if isinstance(part, str) else part for part in current.args)
        if isinstance(current, ImportError):
            current.msg = _shorten(current.msg)
        current = current.__cause__ or current.__context__
    return error


def _shorten(text: str) -> str:
    return re.sub(r"pipeline\.workspaces(\.\w+_[0-9a-f]+)?\b\.?", ".", text)


def _wrong_import(error: ImportError, trace: TracebackType | None, place: str) -> str | None:
    """The message for a failed import of a module or name; None for any other error."""
    missing, top = error.name or "", (error.name or "").partition(".")[0]
    if "partially initialized module" in error.msg:
        return f"{place}: {error.msg}; move what they share into a file of its own"
    for frame, line in list(walk_tb(trace))[-1:]:
        if message := imports.wrong_import_at(frame.f_globals.get("__name__", ""), line):
            return message
    if not isinstance(error, ModuleNotFoundError) or not missing or missing.startswith(workspaces.__name__):
        return None
    if find_spec(top):
        return f"{place} imports '{missing}', and {imports.no_module(missing)}"
    return imports.no_package(place, top)


def user_traceback(trace: TracebackType | None, *, only: bool = False) -> TracebackType | None:
    """The traceback without our own frames and those between us and user code.

    Where we raised the error, ours are left out only up to the user's first: it may have to be reported.

    Args:
        trace: of the error.
        only: leave out all of ours even then; another traceback tells where the error was raised.
    """
    frames = []
    while trace:
        # How a file is imported, by Python and by our loader, is nobody's.
        if not trace.tb_frame.f_code.co_filename.startswith(_LOADING):
            frames.append(trace)
        trace = trace.tb_next
    theirs = [frame for frame in frames if not _is_ours(frame.tb_frame.f_code)]
    if theirs and not only and frames[-1] not in theirs:
        theirs = frames[frames.index(theirs[0]) :]
    result: TracebackType | None = None
    for frame in reversed(theirs):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def failing_method(cls: type, error: BaseException) -> str:
    """``train_batch (runner.py:14)``: the last method of a stage of the user's that we have called before an error.

    Args:
        cls: the class of the stage.
        error: what was raised.

    Returns:
        The method, and the line that it had come to; ``""`` where no method of a user's class was called.
    """
    # We may have raised it anew, with where it belongs to.
    if error.__cause__ and (method := failing_method(cls, error.__cause__)):
        return method
    method, called_by_us = "", False
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if _is_ours(code):
            called_by_us = True
        elif called_by_us and isinstance(own, cls) and hasattr(cls, code.co_name):
            method, called_by_us = f"{code.co_name} ({Path(code.co_filename).name}:{line})", False
    return method


def _is_ours(code: CodeType) -> bool:
    # By the convention of pytest and pluggy, a function with that variable is not to be shown.
    hidden = "__tracebackhide__" in code.co_varnames or re.search("/(importlib|pluggy)/", code.co_filename)
    return bool(hidden) or code.co_filename.startswith(_OURS)


@contextmanager
def error_context(address: str) -> Iterator[None]:
    """Add a note to errors of user code in the block: which part of the config they belong to."""
    try:
        yield
    except Exception as error:
        # The blocks of a pass and of its beginning may be of one phase.
        if not isinstance(error, PipelineError) and address not in getattr(error, "__notes__", ()):
            error.add_note(address)
        raise
