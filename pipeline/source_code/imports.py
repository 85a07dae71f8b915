"""What importing a workspace file would run into, told from its source: only what is certain.

Imports at the top level of a file always run, one after the other. Those in a block, class or function may not, and are
left alone.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from pipeline import workspaces
from pipeline.source_code import source, wrong_import
from pipeline.source_code.finder import find_spec, once

_ROOT = len(workspaces.__name__.split(".")) + 1
"""How many parts the name of a workspace's package has."""
_DEPTH = 100
"""More files than this within each other Python would hardly import either."""
_MOVES = re.compile(
    r"\bsys\s*\.\s*(path|modules|meta_path)|from sys import|__path__|addsitedir|subprocess|os\.system|['\"]pip['\"]"
    r"|findspark|pyximport|jpype|\bclr\b"
)
"""Ways to change where Python looks for modules, or what there is to find."""


@once
def wrong_imports(module: str) -> list[str]:
    """Why a workspace file cannot be imported, with file and line; empty where that cannot be told.

    Args:
        module: its dotted name.
    """
    trial = _Trial(module)
    return [message for message, unless in trial.findings if not (unless and trial.mentions(unless))]


class _Trial:
    """The import of a module in thought, with all that it imports in turn.

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
        """Whether something stands in a file that would be run, or in the workspace."""
        root = workspaces.folder_of(self.package)
        files = {module.file for module in self.modules.values() if module}
        files |= {*root.glob("*.py"), *root.glob("*/*.py")} if root else set()
        return any(pattern.search(_text(file)) for file in files)

    def _note(self, message: str, unless: re.Pattern[str] | None = None) -> None:
        self.findings.append((message, unless))

    def _enter(self, name: str) -> None:
        """Import a module, after the packages that it lies in."""
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
            self._note(wrong_import.no_python(error, str(spec and spec.origin)))
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
            self._note(wrong_import.leads_out(place, written))
        elif self.modules.get(home) is None and find_spec(home) is None:
            self._note(wrong_import.not_there(place, written, home), _MOVES)
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
                self._note(wrong_import.not_there(place, dotted, f"{home}.{name}"), _MOVES)
        elif not _has(target, name):
            message = wrong_import.not_defined(place, name, str(target.file), source.names(target))
            self._note(message, _set_from_outside(name))

    def _absolute(self, module: source.Module, statement: ast.Import | ast.ImportFrom) -> None:
        place = f"{module.file}:{statement.lineno}"
        dotted = [str(statement.module)] if isinstance(statement, ast.ImportFrom) else [a.name for a in statement.names]
        for each in dotted:
            top = each.partition(".")[0]
            if top == "pipeline" and isinstance(statement, ast.ImportFrom):
                self._of_ours(place, each, statement)
            elif not self._called and not _is_there(top):
                dots = wrong_import.neighbour(module.file.parent, self.package, top)
                relative = _relatively(statement, each, dots or "")
                message = wrong_import.absolute(place, top, relative) if dots else wrong_import.no_package(place, top)
                self._note(message, _MOVES)

    def _of_ours(self, place: str, dotted: str, statement: ast.ImportFrom) -> None:
        """What our own modules have is known, though their names are imported lazily."""
        module = source.quiet_read(dotted)
        known = source.names(module) if module else []
        if find_spec(dotted) is None:
            self._note(wrong_import.no_module(place, dotted))
        for name in [alias.name for alias in statement.names] if module else ():
            if not (name in known or name.startswith("_") or name == "*" or find_spec(f"{dotted}.{name}")):
                public = [each for each in known if not each.startswith("_")]
                self._note(wrong_import.not_defined(place, name, dotted, public))


def _text(file: Path) -> str:
    """What stands in a file; nothing in one that is gone or may not be read, which cannot be imported either."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_there(top: str) -> bool:
    return top in sys.modules or top in sys.stdlib_module_names or find_spec(top) is not None


def _has(module: source.Module, name: str) -> bool:
    """Whether a module may have a name; every module has some of Python's own, like ``__file__``."""
    try:
        source.define(module, name)
    except source.NotDefinedError as error:
        # Else it imports what another does not define, and that import is at fault.
        return error.args[0] is not module or name.startswith("__")
    return True


def _set_from_outside(name: str) -> re.Pattern[str]:
    """How another module may give a module a name."""
    return re.compile(rf"\.{name}\b\s*[:=]|setattr\(|__dict__|sys\.modules")


def _relatively(statement: ast.Import | ast.ImportFrom, dotted: str, dots: str) -> str:
    """The statement with which a neighbour is imported."""
    if isinstance(statement, ast.ImportFrom):
        return f"from {dots}{dotted} import {', '.join(alias.name for alias in statement.names)}"
    package, _, last = dotted.rpartition(".")
    return f"from {dots}{package} import {last}"
