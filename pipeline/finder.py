"""Where a module or file is, without importing anything, not even the packages that it lies in."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path

import pipeline.workspaces  # noqa: F401 - registers the finder of workspace modules

_KNOWN: ContextVar[dict[str, ModuleSpec | None] | None] = ContextVar("known", default=None)
"""What has been looked for; None outside of ``unchanging``."""


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


@contextmanager
def unchanging() -> Iterator[None]:
    """A block in which no file changes: each module is looked for once."""
    before = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(before)


def find_spec(dotted: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its parents (``importlib.util.find_spec`` would import them)."""
    known = _KNOWN.get()
    known = {} if known is None else known
    if dotted in known:
        return known[dotted]
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name not in known:
            known[name] = _first_spec(name, path)
        spec = known[name]
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        if spec.submodule_search_locations is not None:
            path = list(spec.submodule_search_locations)
    return spec


def _first_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except KeyError:
            # A namespace package within a package asks sys.modules for its parent, which isn't imported.
            spec = _namespace(name, path or [])
        if spec is not None:
            return spec
    return None


def _namespace(name: str, parents: list[str]) -> ModuleSpec:
    folders = [os.path.join(parent, name.rpartition(".")[2]) for parent in parents]
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
    return spec
