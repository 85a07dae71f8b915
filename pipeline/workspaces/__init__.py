"""The package under which workspace files are imported: ``pipeline.workspaces.<folder>_<hex of its path>.<module>``.

The name carries the folder, so files of the same name in two workspaces never collide, nothing is put on ``sys.path``,
and a process that unpickles a class from a workspace file (a DataLoader worker that was spawned) finds it by name alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def package_name(folder: Path) -> str:
    """The package that stands for ``folder``."""
    path = os.fsencode(folder.resolve())
    readable = re.sub(r"\W", "_", folder.resolve().name, flags=re.ASCII)
    return f"{__name__}.{readable}_{path.hex()}"


def folder_of(package: str) -> Path | None:
    """The folder for which a package of this package stands; None if the name stands for none."""
    try:
        return Path(os.fsdecode(bytes.fromhex(package.rpartition("_")[2])))
    except ValueError:
        return None


class WorkspaceFinder(MetaPathFinder):
    """Finds the package of a folder; Python's own path finder finds the modules in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of ``pipeline.workspaces.<folder>_<hex>``."""
        parent, _, name = fullname.rpartition(".")
        folder = folder_of(name) if parent == __name__ else None
        if folder is None or not folder.is_dir():
            return None
        if (folder / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(
                fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


sys.meta_path.append(WorkspaceFinder())
