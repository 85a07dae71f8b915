"""The package under which workspace files are imported: ``pipeline.workspaces.<folder>_<hex of its path>.<module>``.

The name carries the folder, so files of the same name in two workspaces never collide, nothing is put on ``sys.path``,
and a process that unpickles a class from a workspace file (a DataLoader worker that was spawned) finds it by name alone.

A workspace that has changed since it was imported becomes another package, ``<folder>_<count>_<hex>``: what the next run
imports is new, and what an earlier one has made keeps its classes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

# Folder -> how often it was found to have changed.
_COUNTS: dict[Path, int] = {}
# Module -> its file, and what stood in it.
_IMPORTED: dict[str, tuple[Path, bytes]] = {}


def package_name(folder: Path) -> str:
    """The name of the package of ``folder``, since the last ``renew``."""
    folder = folder.resolve()
    count = f"_{_COUNTS[folder]}" if folder in _COUNTS else ""
    readable = re.sub(r"\W", "_", folder.name, flags=re.ASCII)
    return f"{__name__}.{readable}{count}_{os.fsencode(folder).hex()}"


def renew() -> list[Path]:
    """Import the workspaces again whose files have changed; return their folders.

    All modules of such a workspace, as each may hold what it took from another.
    """
    changed = {".".join(name.split(".")[:3]) for name, (file, text) in _IMPORTED.items() if _read(file) != text}
    current = [folder for folder in map(folder_of, changed) if folder and package_name(folder) in changed]
    for folder in current:
        _COUNTS[folder] = _COUNTS.get(folder, 0) + 1
    return current


def _read(file: Path) -> bytes | None:
    with suppress(OSError):
        return file.read_bytes()
    return None


def folder_of(package: str) -> Path | None:
    """The folder of a package's name; None if the name is of none."""
    with suppress(ValueError):
        return Path(os.fsdecode(bytes.fromhex(package.rpartition("_")[2])))
    return None


class _Loader(SourceFileLoader):
    """Imports the file as it is now, without Python's cache, and keeps what it has imported.

    For that, a file that was edited twice within a second is the same.
    """

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file as it is now."""
        text = self.get_data(self.path)
        _IMPORTED[fullname] = Path(self.path), text
        return self.source_to_code(text, self.path)


class WorkspaceFinder(MetaPathFinder):
    """Finds the package of a folder, and with Python's own path finder the modules in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of ``pipeline.workspaces.<folder>_<hex>``, or of a module in it."""
        parent, _, name = fullname.rpartition(".")
        if parent.startswith(f"{__name__}."):
            spec = PathFinder.find_spec(fullname, path, target)
            if spec and type(spec.loader) is SourceFileLoader:
                spec.loader = _Loader(spec.loader.name, spec.loader.path)
            return spec
        folder = folder_of(name) if parent == __name__ else None
        if folder is None or not folder.is_dir():
            return None
        file = folder / "__init__.py"
        loader = _Loader(fullname, str(file)) if file.is_file() else None
        spec = importlib.util.spec_from_loader(fullname, loader, is_package=True)
        if spec:
            spec.submodule_search_locations = [str(folder)]
        return spec


# Before Python's own, which would find the modules of a workspace as well.
sys.meta_path.insert(0, WorkspaceFinder())
