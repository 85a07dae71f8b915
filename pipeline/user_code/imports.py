"""Imports that cannot work: a missing package, neighbour or name."""

from __future__ import annotations

import ast
import builtins
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from pipeline import workspaces
from pipeline.errors import nearest
from pipeline.user_code import source
from pipeline.user_code.source import find_spec, once

DISTRIBUTION = "five-stage-pipeline"
# The packages that `pipeline report` needs. The extra `report` installs them.
REPORT_NEEDS = ("bokeh", "jinja2")
# A package of PaddleRec's stages -> what they write here instead.
_REPLACED = {
    "paddle": "models and batches are torch's: take the line out",
    "paddlerec": "import the base classes from pipeline, and write context['config'].get for envs.get_global_env",
}
# More files than this within each other Python would hardly import either.
_DEPTH = 100
# Ways to change where Python looks for modules, or what there is to find.
_MOVES = re.compile(
    r"\bsys\s*\.\s*(path|modules|meta_path)|from sys import|__path__|addsitedir|subprocess|os\.system|['\"]pip['\"]"
    r"|findspark|pyximport|jpype|\bclr\b"
)


def no_python(error: SyntaxError, file: str) -> str:
    """A file that cannot be parsed."""
    place = ":".join(str(part) for part in (file, error.lineno, error.offset) if part)
    text = (error.text or "").strip()
    what = f"{error.msg}: {text}" if text else error.msg
    if dashed := re.match(r"(?:from|import)\s+\.*([\w.]*\w-[\w-]+)", text):
        return f"{place}: {what}; no name with a dash can be imported: rename '{dashed[1]}' to '{dashed[1].replace('-', '_')}'"
    return f"{place}: {what}; mend the file"


def _missing_module(place: str, written: str, module: str) -> str:
    """A relative import of a missing module; ``module`` is its dotted name."""
    parent, _, last = module.rpartition(".")
    modules = _modules(parent)
    remedy = nearest(last, modules) or "; check the name and the number of dots"
    for name in modules:
        if "-" in name and name.replace("-", "_") == last:
            remedy = f"; no name with a dash can be imported: rename '{name}.py' to '{last}.py'"
    return f"{place} imports '{written}', which its workspace does not have{remedy}"


def _modules(package: str) -> list[str]:
    """The names of the modules in a package."""
    spec = find_spec(package)
    return [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations or [] if spec else [])]


# Package or module -> modules or classes that were in it -> the package or module where they are now.
_MOVED = {
    "pipeline.training": {
        "brain": "brain, broadcasts, fit, run_options, script, start",
        "compute": "evaluation, pass_numbers, trainable, unregistered, weak_methods",
        "engine": "checkpoints, client, engine, journal, phase, train_pass, triggers",
        "metrics": "meters",
        "optim": "nonfinite, optim_scheduler, schedules, touched_rows",
        "updater": "updater",
    },
    "pipeline.brain.brain": {"brain.module_brain": "ModuleBrain, OwnLossBrain"},
    "pipeline.checkpoint": {"brain": "checkpointer"},
    "pipeline.data": {"slots": "file_cache, lines, parquet, reader, slot_columns, slot_lines, slot_table"},
    "pipeline.distributed": {"brain": "main_process"},
    "pipeline.stages": {"experiment": "experiment, experiment_config"},
}

# Module or package -> where it is now.
_NEW_PLACES = {
    f"{package}.{module}": f"pipeline.{new}.{module}"
    for package, places in _MOVED.items()
    for new, modules in places.items()
    for module in modules.split(", ")
} | {"pipeline.training.metrics": "pipeline.metrics", "pipeline.data.slots": "pipeline.slots.files"}


def moved(module: str) -> str | None:
    """Return where a module is that was elsewhere in an earlier version; None if it was not."""
    for old, new in _NEW_PLACES.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old)
    return None


def no_module(module: str) -> str:
    """A package doesn't have a module."""
    if new := moved(module):
        return f"'{module}' was moved; write '{new}'"
    parent, _, last = module.rpartition(".")
    return f"'{parent}' has no module '{last}'{nearest(last, _modules(parent)) or '; check the spelling'}"


def _undefined_name(place: str, name: str, home: str, known: Iterable[str]) -> str:
    """An import of a name that the module doesn't have; ``home`` is the module as the user knows it."""
    remedy = nearest(name, known) or "; mend the import"
    return f"{place} imports '{name}' from {home}, which does not define it{remedy}"


def no_package(place: str, name: str) -> str:
    """An import of a package that isn't installed."""
    if name in _REPLACED:
        return f"{place} imports '{name}', which is not used here; {_REPLACED[name]}"
    extra = extra_of(name)
    remedy = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else "pip install it"
    return f"{place} needs the package '{name}', which is not installed; {remedy}"


def extra_of(name: str) -> str | None:
    """The extra of ours that brings a package, by the name under which it is imported."""
    with suppress(PackageNotFoundError):
        for requirement in requires(DISTRIBUTION) or ():
            extra = re.match(r"([\w.-]+).*;.*\bextra == ['\"]([\w.-]+)['\"]", requirement)
            # mlflow-skinny is imported as mlflow.
            if extra and _normalize(name) in {_normalize(extra[1]), extra[1].partition("-")[0]}:
                return extra[2]
    return None


def _normalize(name: str) -> str:
    """``pytest-cov`` is imported as ``pytest_cov``, ``import-linter`` as ``importlinter``."""
    return re.sub(r"[-_.]", "", name).lower()


@once
def wrong_imports(module: str) -> list[str]:
    """Why a workspace file cannot be imported, with file and line; empty if unknown.

    Args:
        module: its dotted name.
    """
    trial = _Trial(module)
    trial.enter(module)
    return trial.findings


def wrong_import_at(module: str, line: int) -> str | None:
    """What is wrong with the import on a line of a module, where Python has failed to import it; None: cannot tell."""
    trial, file = _Trial(module), source.quiet_read(module)
    for node in (node for statement in (file.body if file else ()) for node in ast.walk(statement)):
        if file and isinstance(node, ast.Import | ast.ImportFrom) and node.lineno == line:
            trial.step(file, node)
    return next((message for message in trial.findings if file and message.startswith(f"{file.file}:{line} ")), None)


class _Trial:
    """Follows the import of a module and everything that it imports, in source.

    Attributes:
        package: the package that stands for the workspace.
        root: the folder of the workspace; None for a module of another package.
        findings: why it certainly fails.
        modules: the modules that would be run; None for one that cannot be read.
    """

    def __init__(self, module: str) -> None:
        self.package = source.package(module)
        self.root = workspaces.folder_of(self.package)
        self.findings: list[str] = []
        self.modules: dict[str, source.Module | None] = {}
        self._depth, self._called = 0, False

    def _note(self, message: str, unless: re.Pattern[str] | None = None, *, anywhere: bool = True) -> None:
        """Note why it fails; that isn't certain where something stands in a file that would be run, or in the workspace.

        Args:
            message: why.
            unless: what may stand there.
            anywhere: whether another file of the workspace counts, which may have been run before.
        """
        files = {near.file for near in source.neighbours(*filter(None, self.modules.values()))}
        files |= set(_python_files(self.root)) if self.root and anywhere else set()
        if not (unless and any(unless.search(_text(file)) for file in files)):
            self.findings.append(message)

    def enter(self, name: str) -> None:
        """Import a module, after its parent packages."""
        parts = name.split(".")
        for depth in range(self.package.count(".") + 1, len(parts) + 1):
            self._run(".".join(parts[:depth]))

    def _run(self, name: str) -> None:
        if name in self.modules or self._depth > _DEPTH:
            return
        self.modules[name] = module = None
        try:
            self.modules[name] = module = source.read(name)
        except SyntaxError as error:
            spec = find_spec(name)
            self._note(no_python(error, str(spec and spec.origin)))
        except OSError as error:
            self._note(f"{error.filename}: cannot be read: {error.strerror}; make it readable")
        if module:
            self._depth += 1
            for statement in module.body:
                self.step(module, statement)
            self._depth -= 1

    def step(self, module: source.Module, statement: ast.AST) -> None:
        """Run one statement of a module."""
        if isinstance(statement, ast.ImportFrom) and statement.level:
            self._relative(module, statement)
        elif isinstance(statement, ast.ImportFrom) and str(statement.module).partition(".")[0] == "pipeline":
            self._of_ours(module, statement)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            self._absolute(module, statement)
        elif isinstance(statement, source.ClassNode):
            self._bases(module, statement)
        elif not isinstance(statement, source.FunctionNode | ast.Assign | ast.AnnAssign):
            # A call between the imports may be there to make the next of them work.
            self._called = self._called or any(isinstance(node, ast.Call) for node in ast.walk(statement))

    def _bases(self, module: source.Module, statement: source.ClassNode) -> None:
        """Whether the module has what a class derives from."""
        for base in map(source.base_name, statement.bases):
            root, _, name = base.partition(".")
            binding, place = module.bindings.get(root), f"{module.file}:{statement.lineno}"
            if isinstance(binding, ast.ImportFrom) and binding.module == "pipeline" and name:
                self._of_ours(module, ast.ImportFrom(f"pipeline.{root}", [ast.alias(name)], 0, lineno=statement.lineno))
            elif root.isidentifier() and not (hasattr(builtins, root) or _has(module, root)):
                remedy = nearest(root, source.names(module)) or "; define or import it"
                self._note(f"{place} derives {statement.name} from '{base}', which is not defined there{remedy}")

    def _relative(self, module: source.Module, statement: ast.ImportFrom) -> None:
        home, place = module.absolute(statement), f"{module.file}:{statement.lineno}"
        written = "." * statement.level + (statement.module or "")
        if not f"{home}.".startswith(f"{self.package}."):
            remedy = "take out dots, or let `workspace:` name the folder that holds both"
            self._note(f"{place} imports '{written}', which leads out of the workspace; {remedy}")
        elif self.modules.get(home) is None and find_spec(home) is None:
            self._note(_missing_module(place, written, home), _MOVES)
        else:
            self.enter(home)
            for name in [alias.name for alias in statement.names if alias.name != "*"]:
                self._name(place, written, home, name)

    def _name(self, place: str, written: str, home: str, name: str) -> None:
        target = self.modules.get(home)
        if find_spec(f"{home}.{name}"):
            if target is None or name not in target.bindings:
                self.enter(f"{home}.{name}")
        elif target is None and (spec := find_spec(home)) and spec.origin is None:
            # A folder; what is compiled cannot be told.
            dotted = f"{written}{name}" if written.endswith(".") else f"{written}.{name}"
            self._note(_missing_module(place, dotted, f"{home}.{name}"), _MOVES)
        elif target and not _has(target, name):
            # Another module may give it the name.
            outside = re.compile(rf"\.{name}\b\s*[:=]|setattr\(|__dict__|sys\.modules")
            self._note(_undefined_name(place, name, str(target.file), source.names(target)), outside)

    def _absolute(self, module: source.Module, statement: ast.Import | ast.ImportFrom) -> None:
        place, names = f"{module.file}:{statement.lineno}", [alias.name for alias in statement.names]
        for dotted in [str(statement.module)] if isinstance(statement, ast.ImportFrom) else names:
            top = dotted.partition(".")[0]
            if self._called or top in {*sys.modules, *sys.stdlib_module_names} or find_spec(top):
                continue
            message = no_package(place, top)
            if dots := self._dots(module.file.parent, top):
                package, last = (dotted, ", ".join(names))
                if isinstance(statement, ast.Import):
                    package, _, last = dotted.rpartition(".")
                remedy = f"write `from {dots}{package} import {last}`"
                message = f"{place} imports its neighbour '{top}' absolutely; {remedy}"
            # PaddleRec's folders have scripts of their own, which make data, and none brings paddle.
            self._note(message, _MOVES, anywhere=top not in _REPLACED)

    def _dots(self, folder: Path, name: str) -> str:
        """The dots with which a file in ``folder`` reaches a module of its workspace; ``""`` if there is none."""
        folders = [above for above in (folder, *folder.parents) if self.root and above.is_relative_to(self.root)]
        for dots, above in enumerate(folders, 1):
            if (above / f"{name}.py").is_file() or any(_python_files(above / name)):
                return "." * dots
        return ""

    def _of_ours(self, module: source.Module, statement: ast.ImportFrom) -> None:
        """Whether one of our own modules has a name; their names are imported lazily."""
        place, home = f"{module.file}:{statement.lineno}", str(statement.module)
        target = source.quiet_read(home)
        names = [alias.name for alias in statement.names]
        was_moved = [name for name in names if moved(f"{home}.{name}") and not moved(home)]
        for name in was_moved:
            self._note(f"{place} imports '{name}' from {home}, and {no_module(f'{home}.{name}')}")
        if find_spec(home) is None and not was_moved:
            self._note(f"{place} imports '{home}', and {no_module(home)}")
        known = source.names(target) if target else []
        for name in names if target else ():
            if not (
                name in was_moved or name in known or name.startswith("_") or name == "*" or find_spec(f"{home}.{name}")
            ):
                self._note(_undefined_name(place, name, home, [name for name in known if not name.startswith("_")]))


def _python_files(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.py")
    yield from folder.glob("*/*.py")


def _text(file: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _has(module: source.Module, name: str) -> bool:
    """Whether a module may have a name; every module has some of Python's own, like ``__file__``."""
    try:
        source.define(module, name)
    except source.NotDefinedError as error:
        # Else it imports what another does not define, and that import is at fault.
        return error.args[0] is not module or name.startswith("__")
    return True
