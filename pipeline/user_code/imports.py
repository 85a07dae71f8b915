"""Imports that cannot work: a missing package, neighbour or name."""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from pipeline import workspaces
from pipeline.errors import nearest
from pipeline.user_code import source
from pipeline.user_code.source import find_spec, once

DISTRIBUTION = "five-stage-pipeline"
_ROOT = len(workspaces.__name__.split(".")) + 1
"""How many parts the name of a workspace's package has."""
_DEPTH = 100
"""More files than this within each other Python would hardly import either."""
_MOVES = re.compile(
    r"\bsys\s*\.\s*(path|modules|meta_path)|from sys import|__path__|addsitedir|subprocess|os\.system|['\"]pip['\"]"
    r"|findspark|pyximport|jpype|\bclr\b"
)
"""Ways to change where Python looks for modules, or what there is to find."""


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
    """A relative import of a missing module; ``module`` is its dotted name."""
    parent, _, last = module.rpartition(".")
    files = [file for folder in _folders(parent) for file in Path(folder).glob("*-*.py")]
    dashed = [file.name for file in files if file.stem.replace("-", "_") == last]
    if dashed:
        remedy = f"; no name with a dash can be imported: rename '{dashed[0]}' to '{last}.py'"
    else:
        remedy = nearest(last, _modules(parent)) or "; check the name and the number of dots"
    return f"{place} imports '{written}', which its workspace does not have{remedy}"


def _modules(package: str) -> list[str]:
    """The names of the modules in a package."""
    return [each.name for each in pkgutil.iter_modules(_folders(package))]


def _folders(package: str) -> list[str]:
    spec = find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []


def no_module(module: str) -> str:
    """A package doesn't have a module."""
    parent, _, last = module.rpartition(".")
    return f"'{parent}' has no module '{last}'{nearest(last, _modules(parent)) or '; check the spelling'}"


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


@once
def wrong_imports(module: str) -> list[str]:
    """Why a workspace file cannot be imported, with file and line; empty if unknown.

    Args:
        module: its dotted name.
    """
    trial = _Trial(module)
    return [message for message, unless in trial.findings if not (unless and trial.mentions(unless))]


class _Trial:
    """Follows the import of a module and everything that it imports, in source.

    Attributes:
        package: the package that stands for the workspace.
        findings: why it fails, each with what must stand in none of the workspace's files for that to be certain.
        modules: the modules that would be run; None for one that cannot be read.
    """

    def __init__(self, module: str) -> None:
        self.package = ".".join(module.split(".")[:_ROOT])
        self.findings: list[tuple[str, re.Pattern[str] | None]] = []
        self.modules: dict[str, source.Module | None] = {}
        self._depth = 0
        self._called = False
        self._enter(module)

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """Whether a name occurs in a file that would be run, or in the workspace."""
        root = workspaces.folder_of(self.package)
        files = {module.file for module in self.modules.values() if module}
        files |= set(_python_files(root)) if root else set()
        return any(pattern.search(_text(file)) for file in files)

    def _note(self, message: str, unless: re.Pattern[str] | None = None) -> None:
        self.findings.append((message, unless))

    def _enter(self, name: str) -> None:
        """Import a module, after its parent packages."""
        parts = name.split(".")
        for depth in range(_ROOT, len(parts) + 1):
            self._run(".".join(parts[:depth]))

    def _run(self, name: str) -> None:
        if name in self.modules or self._depth > _DEPTH:
            return
        self.modules[name] = None
        try:
            module = source.read(name)
        except SyntaxError as error:
            spec = find_spec(name)
            self._note(no_python(error, str(spec and spec.origin)))
            return
        except OSError as error:
            self._note(f"{error.filename}: cannot be read: {error.strerror}; check it")
            return
        if module:
            self.modules[name] = module
            self._depth += 1
            for statement in module.body:
                self._step(module, statement)
            self._depth -= 1

    def _step(self, module: source.Module, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ImportFrom) and statement.level:
            self._relative(module, statement)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            self._absolute(module, statement)
        elif not isinstance(statement, source.ClassNode | source.FunctionNode | ast.Assign | ast.AnnAssign):
            # A call between the imports may be there to make the next of them work.
            self._called = self._called or any(isinstance(node, ast.Call) for node in ast.walk(statement))

    def _relative(self, module: source.Module, statement: ast.ImportFrom) -> None:
        home, place = module.absolute(statement), f"{module.file}:{statement.lineno}"
        written = "." * statement.level + (statement.module or "")
        if not f"{home}.".startswith(f"{self.package}."):
            self._note(leads_out(place, written))
        elif self.modules.get(home) is None and find_spec(home) is None:
            self._note(not_there(place, written, home), _MOVES)
        else:
            self._enter(home)
            for alias in statement.names:
                if alias.name != "*":
                    self._name(place, written, home, alias.name)

    def _name(self, place: str, written: str, home: str, name: str) -> None:
        target = self.modules.get(home)
        if (target is None or target.is_package) and find_spec(f"{home}.{name}"):
            if target is None or name not in target.bindings:
                self._enter(f"{home}.{name}")
        elif target is None:
            spec = find_spec(home)
            # A folder; what is compiled cannot be told.
            if spec and spec.origin is None:
                dotted = f"{written}{name}" if written.endswith(".") else f"{written}.{name}"
                self._note(not_there(place, dotted, f"{home}.{name}"), _MOVES)
        elif not _has(target, name):
            # Another module may give it the name.
            outside = re.compile(rf"\.{name}\b\s*[:=]|setattr\(|__dict__|sys\.modules")
            self._note(not_defined(place, name, str(target.file), source.names(target)), outside)

    def _absolute(self, module: source.Module, statement: ast.Import | ast.ImportFrom) -> None:
        place = f"{module.file}:{statement.lineno}"
        dotted = [str(statement.module)] if isinstance(statement, ast.ImportFrom) else [a.name for a in statement.names]
        for each in dotted:
            top = each.partition(".")[0]
            if top == "pipeline" and isinstance(statement, ast.ImportFrom):
                self._of_ours(place, each, statement)
            elif not (self._called or top in {*sys.modules, *sys.stdlib_module_names} or find_spec(top)):
                dots = neighbour(module.file.parent, self.package, top)
                relative = _relatively(statement, each, dots or "")
                message = absolute(place, top, relative) if dots else no_package(place, top)
                self._note(message, _MOVES)

    def _of_ours(self, place: str, dotted: str, statement: ast.ImportFrom) -> None:
        """Whether one of our own modules has a name; their names are imported lazily."""
        module = source.quiet_read(dotted)
        known = source.names(module) if module else []
        if find_spec(dotted) is None:
            self._note(f"{place} imports '{dotted}', and {no_module(dotted)}")
        for name in [alias.name for alias in statement.names] if module else ():
            if not (name in known or name.startswith("_") or name == "*" or find_spec(f"{dotted}.{name}")):
                public = [each for each in known if not each.startswith("_")]
                self._note(not_defined(place, name, dotted, public))


def _text(file: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _has(module: source.Module, name: str) -> bool:
    """Whether a module may have a name; every module has some of Python's own, like ``__file__``."""
    try:
        source.define(module, name)
    except source.NotDefinedError as error:
        # Else it imports what another does not define, and that import is at fault.
        return error.args[0] is not module or name.startswith("__")
    return True


def _relatively(statement: ast.Import | ast.ImportFrom, dotted: str, dots: str) -> str:
    """The statement with which a neighbour is imported."""
    if isinstance(statement, ast.ImportFrom):
        return f"from {dots}{dotted} import {', '.join(alias.name for alias in statement.names)}"
    package, _, last = dotted.rpartition(".")
    return f"from {dots}{package} import {last}"
