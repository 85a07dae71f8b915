"""Where a module or file is, without importing anything, not even the packages that it lies in."""

from __future__ import annotations

import errno
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pipeline.workspaces  # noqa: F401 - registers the finder of workspace modules


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


def find_spec(dotted: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its parents (``importlib.util.find_spec`` would import them)."""
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _first_spec(".".join(parts[:depth]), path)
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
