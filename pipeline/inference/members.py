"""What a class has under a name, as far as its source and its neighbours tell."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache

from pipeline.inference.flow import ANY
from pipeline.inference.frame import is_ours
from pipeline.inference.plain import constant
from pipeline.inference.values import Value
from pipeline.user_code import classes, source
from pipeline.user_code.source import once

_BY_CODE = {"exec", "eval", "globals", "locals", "vars"}
ancestry = once(classes.ancestry)
UNTOLD = ast.Pass()
"""What is bound in a way that doesn't tell what it is."""


@dataclass(frozen=True)
class Member:
    """What a class has under a name.

    Attributes:
        name: the name.
        node: the statement that binds it; ``UNTOLD`` where several do, or nobody can tell.
        home: the class whose body has it.
    """

    name: str
    node: ast.AST
    home: source.Definition

    @property
    def constant(self) -> Value:
        """The plain value that it is."""
        return constant(self.node.value) if isinstance(self.node, ast.Assign | ast.AnnAssign) else None

    @property
    def is_plain(self) -> bool:
        """Whether it is a method or a plain value, so that an object of the class may hide it and asking for it runs nothing."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return not mark(self.node, self.home.module)
        value = self.node.value if isinstance(self.node, ast.Assign | ast.AnnAssign) else None
        return isinstance(value, ast.Constant | ast.Tuple | ast.List | ast.Dict | ast.Set | ast.UnaryOp | ast.BinOp)


_KINDS = {"property": "property", "staticmethod": "staticmethod", "classmethod": "classmethod"}
_PLAIN = {
    "abc": ("abstractmethod",),
    "functools": ("wraps",),
    "typing": ("override", "final"),
    "typing_extensions": ("override", "final"),
    "pipeline": ("hookimpl",),
    "torch": ("no_grad", "inference_mode", "enable_grad"),
}
"""The decorators that leave a method as it is."""


def root_of(binding: ast.AST) -> str:
    """The package from which an import takes a name; ``""`` for a relative import, and for what is none."""
    if isinstance(binding, ast.ImportFrom):
        return "" if binding.level else (binding.module or "").partition(".")[0]
    return (
        binding.names[0].name.partition(".")[0] if isinstance(binding, ast.Import) and len(binding.names) == 1 else ""
    )


def mark(node: source.FunctionNode, module: source.Module) -> str:
    """How a function is decorated: ``""``, ``property``, ``staticmethod``, ``classmethod``, or ``?`` for anything else."""
    marks = [each for each in (kind_of(each, module) for each in node.decorator_list) if each]
    return marks[0] if len(marks) == 1 else "?" if marks else ""


def kind_of(node: ast.expr, module: source.Module) -> str:
    """What a decorator makes of a method; ``""`` for one that leaves it as it is."""
    first, _, last = ast.unparse(node.func if isinstance(node, ast.Call) else node).partition(".")
    last, binding = last.rpartition(".")[2] or first, module.bindings.get(first)
    if binding is None:
        return _KINDS.get(last, "?")
    root = root_of(binding)
    if root == "functools" and last == "cached_property":
        return "property"
    return "" if last in _PLAIN.get(root, ()) else "?"


@lru_cache(maxsize=1024)
def _members(definition: source.Definition) -> dict[str, ast.AST]:
    """Name -> the statement of the class's own body that binds it."""
    found: dict[str, ast.AST] = {}
    for statement, sometimes in source.top_level(definition.node.body):
        told = (
            isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign) and not sometimes
        )
        if isinstance(statement, ast.AnnAssign) and statement.value is None:
            continue
        for name in source.bound_names(statement):
            found[name] = statement if told and _binds_alone(statement) else UNTOLD
    return found


def _binds_alone(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return all(isinstance(each, ast.Name) for each in targets if each is not None)


def member(definition: source.Definition, name: str, after: source.Definition | None = None) -> Member | None:
    """What a class has under a name, its bases looked through as Python does; ``after``: as ``super()`` there would."""
    above, _ = ancestry(definition)
    keys = [(each.module.file, each.name) for each in above]
    start = keys.index((after.module.file, after.name)) + 1 if after and (after.module.file, after.name) in keys else 0
    for each in above[start:]:
        node = _members(each).get(name)
        if node:
            return Member(name, node, each)
    return None


def declared(definition: source.Definition, attribute: str) -> tuple[str, ...] | None:
    """The literal ``reads`` or ``writes`` of a class, its bases included; None where there is none to see."""
    above, complete = ancestry(definition)
    told = complete and not {attribute, ANY} & patched(definition.module)
    found = member(definition, attribute) if told and not any(_assigns(each, attribute) for each in above) else None
    node = found.node if found else None
    try:
        value = ast.literal_eval(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return tuple(map(str, value)) if isinstance(value, tuple | list) else None


def _assigns(definition: source.Definition, attribute: str) -> bool:
    """Whether a class may assign an attribute to its objects."""
    for node in () if is_ours(definition.module) else ast.walk(definition.node):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if name == attribute:
                return True
            case ast.Attribute(attr="__dict__") | ast.Name(id="setattr" | "vars"):
                return True
            case ast.FunctionDef(name="__getattribute__"):
                return True
    return False


@once
def patched(module: source.Module) -> frozenset[str]:
    """The names that a module or one that it imports relatively assigns to what is not ``self``: methods may be among them."""
    return frozenset(name for each in source.neighbours(module) for name in _survey(each).attributes)


def is_told(module: source.Module, name: str) -> bool:
    """Whether a module's top level says for certain what a name of it is."""
    survey = _survey(module)
    return not survey.by_code and name not in survey.globals


@dataclass
class _Survey:
    """What a module does to names in ways that its top level doesn't show."""

    attributes: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    by_code: bool = False

    def look(self, node: ast.AST, *, inside: bool) -> None:
        """Look at a node; ``inside``: it stands in a function."""
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) if not _is_self(node.value):
                # Such as `function.__defaults__`.
                self.attributes.add(ANY if node.attr.startswith("__") else node.attr)
            case ast.Global():
                self.globals |= set(node.names)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, key, *_]) if not _is_self(owner):
                self.attributes.add(key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ANY)
            case ast.Call(func=ast.Name(id=name)) if name == "globals" or (name in _BY_CODE and not inside):
                self.by_code = True


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


@lru_cache(maxsize=1024)
def _survey(module: source.Module) -> _Survey:
    survey = _Survey()
    waiting: list[tuple[ast.AST, bool]] = [] if is_ours(module) else [(each, False) for each in module.body]
    while waiting:
        node, inside = waiting.pop()
        survey.look(node, inside=inside)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        waiting += ((child, inside) for child in ast.iter_child_nodes(node))
    return survey
