"""A call of a function that can be read: its arguments bound, its body followed."""

from __future__ import annotations

import ast
from functools import lru_cache

from pipeline.context import STAGES
from pipeline.inference.account import Account
from pipeline.inference.builtin_calls import lost
from pipeline.inference.containers import Entries, Items
from pipeline.inference.end import End
from pipeline.inference.frame import Frame
from pipeline.inference.given import Given
from pipeline.inference.members import declared, mark
from pipeline.inference.plain import constant
from pipeline.inference.reach import matters, reachable
from pipeline.inference.scopes import defaults, parameters, scope_of
from pipeline.inference.values import NOTHING, Function, Ref, Value
from pipeline.user_code import source

_DEEPEST = 30
_ENTRIES = set(STAGES.values())
"""The methods of the stages that the trainer calls."""


def follow(function: Function, given: Given, account: Account) -> Value:
    """Call a function; what it returns."""
    node = function.node
    account.step()
    if not isinstance(node, ast.Lambda) and account.is_patched(node.name):
        account.escape(function.owner)
        return lost(given, account)
    if node in account.active or len(account.active) > _DEEPEST:
        return _again(function, given, account)
    frame = Frame(function.module, function=function, scope=scope_of(node))
    frame.names = _arguments(function, given)
    for name in frame.scope.unsettled & set(frame.names):
        account.escape(frame.names[name])
    account.active.append(node)
    value = account.value_of(node.body, frame) if isinstance(node, ast.Lambda) else _body(node, account, frame)
    account.active.pop()
    return value


def _again(function: Function, given: Given, account: Account) -> Value:
    """A function that calls itself does so with values that aren't known."""
    if _reaches_context(function):
        account.give_up()
    for value in given.all():
        account.escape(value)
    return None


def _reaches_context(function: Function) -> bool:
    """Whether a function has the context without being given it: from its object, or from the function around it."""
    if any(each == Ref() for each in reachable(function)):
        return True
    used = {part.id for part in ast.walk(function.node) if isinstance(part, ast.Name)}
    scope = function.outer
    while scope:
        held = [value for name, value in scope.names.items() if name in used and value != function]
        if any(matters(value) for value in held):
            return True
        scope = scope.outer
    return False


def _body(node: source.FunctionNode, account: Account, frame: Frame) -> Value:
    start, sure, deferred = len(account.uses), account.sure, account.deferred
    if is_suspended(node):
        # It runs when it is asked for its items, or awaited.
        account.sure, account.deferred = False, True
    end = account.block(node.body, frame)
    account.sure, account.deferred = sure, deferred
    home = frame.function.home if frame.function else None
    if home and frame.trusted and node.name in _ENTRIES:
        _keep_promises(home, node, account, start)
    if is_suspended(node):
        for each in frame.returned:
            account.escape(each)
        return None
    returned = [*frame.returned, *([NOTHING] if end is End.ON else [])]
    value = returned[0] if returned else None
    for other in returned[1:]:
        value = account.either(value, other)
    return value


def _keep_promises(home: source.Definition, node: source.FunctionNode, account: Account, start: int) -> None:
    """Note what a stage of ours writes in code that isn't followed: its class declares it."""
    seen = {use.key for use in account.uses[start:] if use.action == "write"}
    for key in declared(home, "writes") or ():
        if key not in seen:
            account.wrote((key,), None)
            account.opaque.add((key,))
    account.runs |= {f"{home.name}.{node.name}"} if account.firm else set()


@lru_cache(maxsize=4096)
def is_suspended(node: source.FunctionNode) -> bool:
    """Whether a call of a function runs none of it yet."""
    return isinstance(node, ast.AsyncFunctionDef) or _yields(node.body)


def _yields(nodes: list[ast.stmt]) -> bool:
    waiting: list[ast.AST] = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False


def _arguments(function: Function, given: Given) -> dict[str, Value]:
    """The names that a call binds."""
    takes = function.node.args
    positional = [each.arg for each in (*takes.posonlyargs, *takes.args)]
    values = [function.owner, *given.values] if function.owner else given.values
    names = _defaults(function) if given.sure else {}
    names |= dict(zip(positional, values, strict=False))
    known = {*positional, *(each.arg for each in takes.kwonlyargs)}
    names |= {name: value for name, value in given.named.items() if name in known}
    if takes.vararg:
        names[takes.vararg.arg] = Items(values[len(positional) :], complete=given.sure)
    if takes.kwarg:
        more = {name: value for name, value in given.named.items() if name not in known}
        names[takes.kwarg.arg] = Entries(more, complete=given.sure)
    return dict.fromkeys(parameters(function.node)) | names


def _defaults(function: Function) -> dict[str, Value]:
    """What parameters are unless a call says otherwise."""
    takes = function.node.args
    positional = [each.arg for each in (*takes.posonlyargs, *takes.args)]
    first = len(positional) - len(takes.defaults)
    found = {name: constant(node) for name, node in zip(positional[first:], takes.defaults, strict=True)}
    named = zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
    return found | {each.arg: constant(node) for each, node in named if node}


def define(node: source.FunctionNode | ast.Lambda, account: Account, frame: Frame) -> Value:
    """A function within a function: called later, by whoever gets it."""
    for each in defaults(node):
        account.escape(account.value_of(each, frame))
    home = frame.function.home if frame.function else None
    function = Function(node, frame.module, outer=frame, home=home)
    account.escape(function)
    if isinstance(node, ast.Lambda) or not node.decorator_list:
        return function
    for each in node.decorator_list:
        account.escape(account.value_of(each, frame))
    return function if not mark(node, frame.module) else None


def define_class(node: ast.ClassDef, account: Account, frame: Frame) -> None:
    """A class within a function: its methods are called later, by whoever gets it."""
    for each in (*node.bases, *node.decorator_list, *(keyword.value for keyword in node.keywords)):
        account.escape(account.value_of(each, frame))
    for below in ast.walk(node):
        if isinstance(below, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            account.escape(Function(below, frame.module, outer=frame))
    names = dict(frame.names)
    account.block([each for each in node.body if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)], frame)
    frame.names = names | {node.name: None}
