"""What is said of an import that cannot work; the same whether the source shows it or Python found out.

Each message begins with the place of the import, ``file.py:3``.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from pipeline import workspaces
from pipeline.errors import nearest
from pipeline.source_code.finder import find_spec

DISTRIBUTION = "five-stage-pipeline"


def no_python(error: SyntaxError, file: str) -> str:
    """A file that cannot be parsed."""
    place = ":".join(str(part) for part in (file, error.lineno, error.offset) if part)
    text = (error.text or "").strip()
    what = f"{error.msg}: {text}" if text else error.msg
    dashed = re.match(r"(?:from|import)\s+\.*([\w.]*\w-[\w-]+)", text)
    if dashed:
        return f"{place}: {what}; no name with a dash can be imported: rename '{dashed[1]}' to '{dashed[1].replace('-', '_')}'"
    return f"{place}: {what}; mend the file"


def leads_out(place: str, written: str) -> str:
    """A relative import with too many dots."""
    remedy = "take out dots, or let `workspace:` name the folder that holds both"
    return f"{place} imports '{written}', which leads out of the workspace; {remedy}"


def not_there(place: str, written: str, module: str) -> str:
    """A relative import of a module that is not there; ``module`` is its dotted name."""
    parent, _, last = module.rpartition(".")
    folders = _folders(parent)
    dashed = [file.name for folder in folders for file in Path(folder).glob("*-*.py") if _underscored(file) == last]
    if dashed:
        remedy = f"; no name with a dash can be imported: rename '{dashed[0]}' to '{last}.py'"
    else:
        remedy = nearest(last, modules(parent)) or "; check the name and the number of dots"
    return f"{place} imports '{written}', which its workspace does not have{remedy}"


def modules(package: str) -> list[str]:
    """The names of the modules in a package."""
    return [each.name for each in pkgutil.iter_modules(_folders(package))]


def _folders(package: str) -> list[str]:
    spec = find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []


def no_module(place: str, module: str) -> str:
    """An import of a module that a package doesn't have."""
    parent, _, last = module.rpartition(".")
    remedy = nearest(last, modules(parent)) or "; check the spelling"
    return f"{place} imports '{module}', and '{parent}' has no module '{last}'{remedy}"


def _underscored(file: Path) -> str:
    return file.stem.replace("-", "_")


def not_defined(place: str, name: str, home: str, known: Iterable[str]) -> str:
    """An import of a name that the module doesn't have; ``home`` is the module as the user knows it."""
    remedy = nearest(name, known) or "; mend the import"
    return f"{place} imports '{name}' from {home}, which does not define it{remedy}"


def neighbour(folder: Path, package: str, name: str) -> str | None:
    """The dots with which a file in ``folder`` reaches a module of the workspace ``package``; None if there is none."""
    root, above = workspaces.folder_of(package), [folder, *folder.parents]
    for dots, each in enumerate(above[: above.index(root) + 1] if root in above else (), 1):
        if (each / f"{name}.py").is_file() or any(_python_files(each / name)):
            return "." * dots
    return None


def _python_files(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.py")
    yield from folder.glob("*/*.py")


def absolute(place: str, name: str, relative: str) -> str:
    """An absolute import of a neighbour; ``relative`` is the statement to write instead."""
    return f"{place} imports its neighbour '{name}' absolutely; write `{relative}`"


def no_package(place: str, name: str) -> str:
    """An import of a package that isn't installed."""
    extra = extra_of(name)
    remedy = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else "pip install it"
    return f"{place} needs the package '{name}', which is not installed; {remedy}"


def extra_of(name: str) -> str | None:
    """The extra of ours that brings a package, by the name under which it is imported."""
    try:
        needed = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    for each in needed:
        found = re.match(r"([\w.-]+).*;.*\bextra == ['\"]([\w.-]+)['\"]", each)
        if found and _bare(found[1]) == _bare(name):
            return found[2]
    return None


def _bare(name: str) -> str:
    """``pytest-cov`` is imported as ``pytest_cov``, ``import-linter`` as ``importlinter``."""
    return re.sub(r"[-_.]", "", name).lower()
