"""Python files that are read, not imported: where a module is, and what it defines."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar

_P = ParamSpec("_P")

_T = TypeVar("_T")

# What has been asked, and the answers; None outside of ``file_cache``.
_KNOWN: ContextVar[dict[Any, Any] | None] = ContextVar("known", default=None)


@contextmanager
def file_cache() -> Iterator[None]:
    """A block in which no file changes, so that what depends only on files is computed once."""
    before = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(before)


def once(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function whose results depend only on files."""

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        known = _KNOWN.get()
        if known is None:
            return function(*args, **kwargs)
        question = (function, args, *kwargs.items())
        if question not in known:
            known[question] = function(*args, **kwargs)
        answer: _T = known[question]
        return answer

    return wrapper


@once
def find_spec(dotted: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its parents (``importlib.util.find_spec`` would import them)."""
    spec: ModuleSpec | None = None
    names = dotted.split(".")
    # From the outermost on: a path may have more parts than Python calls functions within each other.
    for module in accumulate(names, "{}.{}".format):
        path = tuple(spec.submodule_search_locations or ()) if spec else None
        if module != names[0] and not path:
            return None
        spec = _spec_within(module, path)
    return spec


@once
def _spec_within(dotted: str, path: tuple[str, ...] | None) -> ModuleSpec | None:
    """The spec of a module whose package has these folders; None: it is in no package."""
    last = dotted.rpartition(".")[2]
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(dotted, path)
        except KeyError:
            # A namespace package within a package asks sys.modules for its parent, which isn't imported.
            spec = ModuleSpec(dotted, None, is_package=True)
            folders = [os.path.join(folder, last) for folder in path or ()]
            spec.submodule_search_locations = list(filter(os.path.isdir, folders))
        if spec is not None:
            return spec
    return None


ClassNode: TypeAlias = ast.ClassDef

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


_WORKSPACES = "pipeline.workspaces."

# Ways to define names that don't stand in the source.
_BY_CODE = re.compile(r"(globals|locals|vars)\(\)|(?<![.\w])exec\(|sys\.modules\[__name__\]|^\s+global ", re.MULTILINE)


class NotDefinedError(LookupError):
    """A module that certainly doesn't define a name; the argument is the module."""


@dataclass(frozen=True)
class Module:
    """A parsed source file.

    Attributes:
        name: its dotted name.
        file: where it is.
        body: its statements.
        bindings: what each top-level name is bound to; ``ast.Pass`` where that depends on a condition.
        stars: the modules of which it imports every name.
        complete: whether it has no other names than these.
    """

    name: str
    file: Path
    body: tuple[ast.stmt, ...] = field(repr=False)
    bindings: dict[str, ast.AST] = field(default_factory=dict, repr=False)
    stars: tuple[str, ...] = field(default=(), repr=False)
    complete: bool = True

    def __hash__(self) -> int:
        """By file: one module is parsed once."""
        return hash(self.file)

    def absolute(self, node: ast.ImportFrom) -> str:
        """The dotted name of the module that ``from … import`` names."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        drop = node.level - (1 if self.file.stem == "__init__" else 0)
        return ".".join(package[: max(len(package) - drop, 0)] + ([node.module] if node.module else []))


@dataclass(frozen=True)
class Definition:
    """A class or function in a source file."""

    node: ClassNode | FunctionNode
    module: Module

    @property
    def name(self) -> str:
        """Its name."""
        return self.node.name

    @property
    def location(self) -> str:
        """``file.py:14``."""
        return f"{self.module.file.name}:{self.node.lineno}"


_HUGE_NUMBER = re.compile("0[xob][0-9a-f_]{1000}", re.IGNORECASE)


class _WithoutHugeNumbers(ast.NodeTransformer):
    """Replaces integers that Python refuses to print by a name, whose value nothing knows."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Keep any other constant."""
        if isinstance(node.value, int) and node.value.bit_length() > 3000:
            return ast.copy_location(ast.Name("_a_huge_number", ast.Load()), node)
        return node


@lru_cache(maxsize=1024)
def _parse(name: str, file: Path, _modified: int) -> Module:
    try:
        with tokenize.open(file) as source:
            text = source.read()
        tree = ast.parse(text, filename=str(file))
        if _HUGE_NUMBER.search(text):
            tree = _WithoutHugeNumbers().visit(tree)
    except LookupError as error:  # an encoding such as rot13
        # The rest of Python's message advises to open the file in another way.
        raise SyntaxError(str(error).partition(";")[0]) from error
    except ValueError as error:  # bytes that are no text
        raise SyntaxError(str(error)) from error
    except (MemoryError, RecursionError) as error:  # how Python's parser answers to thousands of brackets
        raise SyntaxError("is nested too deeply") from error
    module, stars = Module(name, file, tuple(tree.body)), list[str]()
    for statement, sometimes in top_level(tree.body):
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            stars.append(module.absolute(statement))
        for bound_name in bound_names(statement):
            certain = not (sometimes and bound_name in module.bindings)
            module.bindings[bound_name] = statement if certain else ast.Pass()
    complete = "__getattr__" not in module.bindings and not _BY_CODE.search(text)
    return replace(module, stars=tuple(stars), complete=complete)


def top_level(body: Sequence[ast.AST], *, sometimes: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements outside of classes and functions, each with whether it is in a block that may not run."""
    # No function calls itself here or below: an `elif` chain is nested as deeply as it has branches.
    waiting = [(node, sometimes) for node in reversed(body)]
    while waiting:
        node, is_conditional = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node, is_conditional
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            waiting += [(child, True) for child in reversed(list(ast.iter_child_nodes(node)))]


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    else:
        below = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.withitem)]
        parts = [part for node in below for part in ast.walk(node)]
        yield from (part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
        patterns = (part for case in getattr(statement, "cases", ()) for part in ast.walk(case.pattern))
        # ``case x``, ``case [*x]`` and ``case {**x}``.
        yield from (name for part in patterns if (name := getattr(part, "name", None) or getattr(part, "rest", None)))


@once
def read(name: str) -> Module | None:
    """The parsed module; None if there is no Python source (built in, compiled, not found).

    Raises:
        SyntaxError: the file is no Python; also for bytes that are no text.
    """
    spec = find_spec(name)
    file = Path(spec.origin or "") if spec else Path()
    is_source = file.suffix == ".py" and file.is_file()  # unlike one in a zip file
    return _parse(name, file, file.stat().st_mtime_ns) if is_source else None


def definitions(module: Module) -> list[str]:
    """The names of the classes, and then of the functions, that the file itself defines."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [name for kind in kinds for name, node in module.bindings.items() if isinstance(node, kind)]


def heirs(module: Module, name: str) -> list[str]:
    """The classes of the file that derive from a name which the file imports."""
    own = module.bindings.items() if isinstance(module.bindings.get(name), ast.ImportFrom) else ()
    return [heir for heir, node in own if isinstance(node, ast.ClassDef) and name in map(base_name, node.bases)]


def outer_class(module: Module, name: str) -> str | None:
    """The class within which the file defines another class of this name."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    return next((node.name for node in classes if any(getattr(below, "name", "") == name for below in node.body)), None)


def base_name(base: ast.expr) -> str:
    """The name of a base class as written, without its type arguments."""
    return text_of(base.value if isinstance(base, ast.Subscript) else base)


def dotted_name(node: ast.AST) -> str:
    """Return ``torch.nn.Module`` for a name or the attributes of a name; ``""`` for anything else."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(attributes)]) if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST) -> str:
    """Return the source of a node, for messages; ``…`` if it is nested too deeply for ``ast.unparse``."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "…"


def mentions(node: ast.AST, name: str) -> bool:
    """Return whether a node, or one below it, is a name or an attribute that is spelt like this."""
    return any(name in (getattr(part, "id", None), getattr(part, "attr", None)) for part in ast.walk(node))


def names(module: Module) -> list[str]:
    """The names that a module has, as far as they are known: its own, and those of its star imports."""
    stars = [origin for star in module.stars if (origin := quiet_read(star))]
    return [*module.bindings, *(name for origin in stars for name in origin.bindings)]


def offered_classes(module: Module) -> list[str]:
    """Return the public classes of a module, sorted: the ones in ``__all__``, otherwise the ones it defines.

    Protocols and abstract classes are left out, since a config cannot name them.
    """
    statement = module.bindings.get("__all__")
    value = statement.value if isinstance(statement, ast.Assign) else None
    listed = value.elts if isinstance(value, ast.List | ast.Tuple) else []
    names = [str(each.value) for each in listed if isinstance(each, ast.Constant)] or definitions(module)
    return sorted(name for name in names if name[:1].isupper() and not _is_abstract(find(module, name)))


def _is_abstract(definition: Definition | None) -> bool:
    """Return whether a class is a protocol or defines an abstract method."""
    if definition is None or not isinstance(definition.node, ast.ClassDef):
        return False
    marks = [mark for node in definition.node.body for mark in getattr(node, "decorator_list", ())]
    return "Protocol" in map(base_name, definition.node.bases) or "abstractmethod" in map(ast.unparse, marks)


def define(module: Module, name: str, depth: int = 0) -> Definition | None:
    """The definition of ``name`` (dotted for an attribute of a module) in ``module``, across imports; None: unknown.

    Raises:
        NotDefinedError: the module certainly has no such name.
    """
    first, _, rest = name.partition(".")
    node = module.bindings.get(first)
    if depth > 20:
        return None
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None if rest else Definition(node, module)
    if isinstance(node, ast.ImportFrom | ast.Import):
        home, last = _target(module, node, first, rest)
        origin = quiet_read(home)
        return define(origin, last, depth + 1) if origin else None
    return _find_in_stars(module, name, depth) if node is None else None


def is_module(module: Module, name: str) -> bool:
    """Return whether a name of a module is certainly that of another module."""
    node, home = module.bindings.get(name), module.name
    if isinstance(node, ast.Import):
        return True
    # A name that comes by code or with a star may hide a module that is spelt so.
    hides_nothing = module.complete and not module.stars
    if isinstance(node, ast.ImportFrom):
        home, name = _target(module, node, name, "")
        origin = quiet_read(home)
        if origin is None:
            return False
        # A package that imports a name from itself imports one of its modules.
        is_own = origin.file == module.file
        hides_nothing = is_own or (name not in origin.bindings and origin.complete and not origin.stars)
    elif node is not None:
        return False
    return hides_nothing and find_spec(f"{home}.{name}") is not None


def class_definition(cls: type) -> Definition | None:
    """The source of a class at hand, whose module may be a script; None where there is none to read."""
    with suppress(TypeError, OSError, SyntaxError):  # such as a class in a notebook
        file = Path(inspect.getfile(cls))
        module = _parse(cls.__module__, file, file.stat().st_mtime_ns)
        node = module.bindings.get(cls.__qualname__)
        if isinstance(node, ast.ClassDef):
            return Definition(node, module)
        # Of several under a condition, it is the one in whose lines its methods are.
        lines = [value.__code__.co_firstlineno for value in vars(cls).values() if isinstance(value, FunctionType)]
        for statement, _ in top_level(module.body):
            if isinstance(statement, ast.ClassDef) and statement.name == cls.__qualname__ and lines:
                last = statement.end_lineno or statement.lineno
                if all(statement.lineno <= line <= last for line in lines):
                    return Definition(statement, module)
    return None


@once
def loaded_modules(folder: Path) -> list[Module]:
    """The modules that were imported from files in a folder."""
    modules = []
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.suffix == ".py" and file.is_relative_to(folder):
            with suppress(SyntaxError, OSError):
                modules.append(_parse(name, file, file.stat().st_mtime_ns))
    return modules


def find(module: Module, name: str) -> Definition | None:
    """The same; None also where the module certainly has no such name."""
    with suppress(NotDefinedError):
        return define(module, name)
    return None


def _target(module: Module, node: ast.ImportFrom | ast.Import, first: str, rest: str) -> tuple[str, str]:
    """The module, and the name in it, to which an import of ``first`` leads, and its attribute ``rest`` if there is one."""
    alias = next(alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == first)
    if isinstance(node, ast.ImportFrom):
        home = module.absolute(node)
        return (f"{home}.{alias.name}", rest) if rest else (home, alias.name)
    # `import torch.nn as nn; nn.Module` and `import torch; torch.nn.Module`
    home, _, last = f"{alias.name if alias.asname else first}.{rest}".rpartition(".")
    return home, last


def _find_in_stars(module: Module, name: str, depth: int) -> Definition | None:
    origins = [quiet_read(star) for star in module.stars]
    for origin in filter(None, origins):
        with suppress(NotDefinedError):
            return define(origin, name, depth + 1)
    certain = module.complete and all(origins)
    if certain and not find_spec(f"{module.name}.{name.partition('.')[0]}"):
        raise NotDefinedError(module)
    return None


def quiet_read(name: str) -> Module | None:
    """The parsed module; None also if it cannot be read or parsed."""
    with suppress(SyntaxError, OSError, ValueError):
        return read(name)
    return None


def literal(module: Module, name: str) -> ast.expr | None:
    """The expression to which ``name`` (dotted for an attribute of a module) is bound, imports followed; None: cannot tell."""
    first, _, rest = name.partition(".")
    node = module.bindings.get(first) if module.complete else None
    if isinstance(node, ast.ImportFrom):
        home, last = _target(module, node, first, rest)
        origin = quiet_read(home)
        return literal(origin, last) if origin and origin != module else None
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) and not rest else None


def words(body: Iterable[ast.AST]) -> Iterator[str]:
    """The names that code mentions, and the words of its strings; those of docstrings and comments are none."""
    nodes = [node for part in body for node in ast.walk(part)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                yield word
            case ast.alias(name=text):
                yield from re.findall(r"\w+", text)
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield from re.findall(r"\w+", text)


def own_nodes(node: ast.AST, beyond: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """The nodes below a node, without those of definitions within it, and of some other kinds."""
    left_out = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *beyond)
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current is not node:
            yield current
        below = [child for child in ast.iter_child_nodes(current) if not isinstance(child, left_out)]
        waiting += reversed(below)


@once
def is_generator(function: ast.AST) -> bool:
    """Whether a function has a yield."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function))


def is_ours(module: Module) -> bool:
    """Whether a module belongs to this package or its plugins, and not to a workspace."""
    return is_our_name(module.name)


def is_our_name(module: str) -> bool:
    """The same, by the name of the module."""
    return module.startswith(("pipeline.", "pipeline_plugins.")) and not module.startswith(_WORKSPACES)


def package(name: str) -> str:
    """The package of a module: that of a workspace, ``pipeline.stages``, another's top one."""
    depth = 3 if name.startswith(_WORKSPACES) else 2 if name.startswith("pipeline.") else 1
    return ".".join(name.split(".")[:depth])


def neighbours(*modules: Module) -> Iterator[Module]:
    """Modules and the files from which they import relatively, as a script does those beside it; and theirs; each once."""
    found = {module.file: module for module in modules}
    waiting = list(found.values())
    for current in waiting:  # which grows
        yield current
        for neighbour in _imported_files(current):
            if neighbour.file not in found:
                found[neighbour.file] = neighbour
                waiting.append(neighbour)


@once
def _imported_files(module: Module) -> list[Module]:
    """The files from which a module imports relatively, or that are beside it."""
    files: list[Module] = []
    imports = [statement for statement in module.bindings.values() if isinstance(statement, ast.ImportFrom)]
    for statement in dict.fromkeys(imports):
        home = module.absolute(statement)
        beside = module.file.with_name(f"{home.partition('.')[0]}.py")
        if statement.level or beside.is_file():
            names = [home, *(f"{home}.{alias.name}" for alias in statement.names)]
            files += filter(None, map(quiet_read, names))
    return files
