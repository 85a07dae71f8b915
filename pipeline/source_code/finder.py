"""Where a module or file is, without importing anything, not even the packages that it lies in."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pipeline.workspaces  # noqa: F401 - registers the finder of workspace modules

_P = ParamSpec("_P")
_T = TypeVar("_T")
_KNOWN: ContextVar[dict[Any, Any] | None] = ContextVar("known", default=None)
"""What has been asked, and the answers; None outside of ``unchanging``."""


def resolved(path: Path) -> Path:
    """The path with its links followed; it need not be there.

    Raises:
        OSError: no file can have this path: it is too long, holds a NUL, or its links go in a circle.
    """
    try:
        found = path.resolve()
        found.exists()
    except (RuntimeError, ValueError) as error:
        raise OSError(errno.EINVAL, str(error)) from error
    return found


def refusal(path: Path | str) -> str:
    """Why a folder or file cannot be used although it is there, with the remedy; ``""`` where it can."""
    found = re.search(r"\$?\{[^/]*?\}|[\x00-\x1f]", str(path))
    if found is None:
        return ""
    why = "cannot stand in a line" if found[0] < " " else "a config takes for another value"
    return f"{str(path)!r} has {found[0]!r} in its name, which {why}; rename it"


@contextmanager
def unchanging() -> Iterator[None]:
    """A block in which no file changes: what depends on files alone is found out once."""
    before = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(before)


def once(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function whose answers depend on files alone."""

    @wraps(function)
    def asked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        known = _KNOWN.get()
        if known is None:
            return function(*args, **kwargs)
        question = (function, args, *kwargs.items())
        if question not in known:
            known[question] = function(*args, **kwargs)
        answer: _T = known[question]
        return answer

    return asked


@once
def find_spec(dotted: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its parents (``importlib.util.find_spec`` would import them)."""
    spec: ModuleSpec | None = None
    path: tuple[str, ...] | None = None
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _first_spec(".".join(parts[:depth]), path)
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        if spec.submodule_search_locations is not None:
            path = tuple(spec.submodule_search_locations)
    return spec


@once
def _first_spec(name: str, path: tuple[str, ...] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except KeyError:
            # A namespace package within a package asks sys.modules for its parent, which isn't imported.
            spec = _namespace(name, path or ())
        if spec is not None:
            return spec
    return None


def _namespace(name: str, parents: Sequence[str]) -> ModuleSpec:
    folders = [os.path.join(parent, name.rpartition(".")[2]) for parent in parents]
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
    return spec
