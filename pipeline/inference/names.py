"""What a name stands for: a local value, a constant, a function or class of the module or of one that it imports."""

from __future__ import annotations

import ast
import builtins

from pipeline.inference.account import Account
from pipeline.inference.containers import Copy, Entries, Items
from pipeline.inference.frame import Frame
from pipeline.inference.given import Given
from pipeline.inference.members import is_told, kind_of, mark
from pipeline.inference.plain import constant
from pipeline.inference.values import Builtin, Class, Function, Imported, Value
from pipeline.user_code import source

_BUILTINS = frozenset(name for name in dir(builtins) if callable(getattr(builtins, name)))


def look_up(name: str, account: Account, frame: Frame) -> Value:
    """The value of a name, where Python would find it."""
    scope: Frame | None = frame
    while scope:
        within = scope is not frame
        if name in scope.scope.foreign or (within and name in scope.scope.unsettled):
            return None  # its values have escaped
        if name in scope.names:
            value = scope.names[name]
            if within and account.deferred and isinstance(value, Items | Entries | Copy):
                account.spoil(value)
            return value
        if name in scope.scope.bound:
            # A function within may be called when it is bound.
            scope.pending.add(name)
            return None
        scope = scope.outer
    return _of_top_level(name, frame.module, account)


def _of_top_level(name: str, module: source.Module, account: Account) -> Value:
    node = module.bindings.get(name)
    if not is_told(module, name):
        return None
    if isinstance(node, ast.Import | ast.ImportFrom):
        return Imported(module, name, node)
    if node or module.stars:
        found = of_module(module, name, account)
        if node or found or not _is_certainly_absent(module, name):
            return found
    return Builtin(name) if name in _BUILTINS else None


def _is_certainly_absent(module: source.Module, name: str) -> bool:
    try:
        source.define(module, name)
    except source.NotDefinedError:
        return True
    return False


def settled(value: Value, account: Account) -> Value:
    """The value itself, looked up in the module that has it: one of ours, or of the package that the stage is in."""
    if not isinstance(value, Imported) or not _is_near(value):
        return value
    found = of_module(value.module, value.dotted, account)
    return value if found is None or account.is_patched(value.dotted.rpartition(".")[2]) else found


def _is_near(value: Imported) -> bool:
    return value.package in {"", "pipeline", value.module.name.partition(".")[0]}


def imported(node: ast.Import | ast.ImportFrom, module: source.Module) -> dict[str, Value]:
    """The names that an import within a function binds; None for what isn't a package's."""
    names = [(alias.asname or alias.name.partition(".")[0]) for alias in node.names]
    found = {name: Imported(module, name, node) for name in names}
    return {name: None if _is_near(each) else each for name, each in found.items()}


def of_module(module: source.Module, dotted: str, account: Account) -> Value:
    """A constant, function or class that a module defines or imports; None where the source doesn't tell."""
    try:
        definition = source.define(module, dotted)
    except source.NotDefinedError:
        return None
    if definition is None:
        return _constant(module, dotted)
    if not is_told(definition.module, definition.name):
        return None
    if isinstance(definition.node, ast.ClassDef):
        return Class(definition)
    function = Function(definition.node, definition.module)
    return decorated(function, account) if mark(definition.node, definition.module) else function


def decorated(function: Function, account: Account) -> Function | None:
    """What decorators that can be read make of a function; None where the source doesn't tell."""
    frame, value = Frame(function.module), function
    for each in () if isinstance(function.node, ast.Lambda) else reversed(function.node.decorator_list):
        if kind_of(each, function.module) == "":
            continue
        decorator = settled(account.value_of(each, frame), account)
        made = account.follow(decorator, Given([value], {})) if isinstance(decorator, Function) else None
        if not isinstance(made, Function):
            return None
        value = made
    return value


def _constant(module: source.Module, dotted: str, depth: int = 0) -> Value:
    first, _, rest = dotted.partition(".")
    node = module.bindings.get(first)
    if isinstance(node, ast.Assign | ast.AnnAssign) and not rest:
        return constant(node.value) if is_told(module, first) and _is_alone(node) else None
    if isinstance(node, ast.ImportFrom) and depth < 8:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == first)
        home = f"{module.absolute(node)}.{original}" if rest else module.absolute(node)
        found = source.quiet_read(home)
        return _constant(found, rest or original, depth + 1) if found else None
    return None


def _is_alone(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(target, ast.Name) for target in targets)
