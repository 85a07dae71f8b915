"""What a name stands for: a local value, a constant, a function or class of the module or of one that it imports."""

from __future__ import annotations

import ast
import builtins

from pipeline import classes, source
from pipeline.inference.account import Frame
from pipeline.inference.values import Builtin, Class, Function, Imported, Object, Value, literal

_BUILTINS = frozenset(name for name in dir(builtins) if callable(getattr(builtins, name)))


def look_up(name: str, frame: Frame) -> Value:
    """The value of a name, where Python would find it."""
    scope: Frame | None = frame
    while scope:
        if name in scope.names:
            return scope.names[name]
        scope = scope.function.outer if scope.function else None
    node = frame.module.bindings.get(name)
    if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
        return Imported(frame.module, name)
    if node:
        return of_module(frame.module, name)
    return Builtin(name) if name in _BUILTINS else None


def resolve(value: Value) -> Value:
    """The value itself, looked up in the package that has it."""
    if not isinstance(value, Imported):
        return value
    found = of_module(value.module, value.dotted)
    above, _, last = value.dotted.rpartition(".")
    owner = of_module(value.module, above) if found is None and above else None
    return unbound(owner, last) if isinstance(owner, Class) else found


def unbound(cls: Class, name: str) -> Value:
    """``Startup.startup``, to be called with the object as its first argument."""
    method = Object(cls.definition).method(name)
    return Function(method.node, method.module, home=method.home) if method else None


def of_module(module: source.Module, dotted: str) -> Value:
    """A constant, function or class that a module defines or imports."""
    try:
        definition = source.define(module, dotted)
    except source.NotDefinedError:
        return None
    if definition and isinstance(definition.node, ast.ClassDef):
        return Class(definition)
    if definition and not isinstance(definition.node, ast.ClassDef):
        return Function(definition.node, definition.module)
    return _constant(module, dotted)


def _constant(module: source.Module, dotted: str, depth: int = 0) -> Value:
    first, _, rest = dotted.partition(".")
    node = module.bindings.get(first)
    if isinstance(node, ast.Assign | ast.AnnAssign) and not rest:
        return _literal(node.value) if _is_alone(node, first) else None
    if isinstance(node, ast.ImportFrom) and depth < 8:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == first)
        home = f"{module.absolute(node)}.{original}" if rest else module.absolute(node)
        found = source.quiet_read(home)
        return _constant(found, rest or original, depth + 1) if found else None
    return None


def _is_alone(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _literal(node: ast.expr | None) -> Value:
    try:
        return literal(ast.literal_eval(node)) if node else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def of_object(owner: Object, name: str) -> Value:
    """An attribute of an object: its own, a method, or a constant of its class."""
    if name in owner.attributes:
        return owner.attributes[name]
    if method := owner.method(name):
        return method
    for each in classes.ancestry(owner.definition)[0]:
        for node in each.node.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and _is_alone(node, name):
                return _literal(node.value)
    return None
