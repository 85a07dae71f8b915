"""Calls: of functions and classes that can be read, and of everything else."""

from __future__ import annotations

import ast

from pipeline.inference import builtin_calls
from pipeline.inference.account import Account
from pipeline.inference.builtin_calls import lost
from pipeline.inference.containers import Each, Entries, Items
from pipeline.inference.dicts import ContextMethod, DictMethod
from pipeline.inference.frame import Frame, is_ours
from pipeline.inference.given import Given
from pipeline.inference.members import ancestry, member
from pipeline.inference.names import settled
from pipeline.inference.objects import bound
from pipeline.inference.reach import matters
from pipeline.inference.scopes import parameters
from pipeline.inference.values import Attribute, Builtin, Class, Function, Imported, Object, Parent, Ref, Value

_LOOKS_UP = {"sys._getframe", "inspect.currentframe", "inspect.stack"}
_LEAVES = {"exit", "_exit", "quit", "abort", "kill", "execv", "execve", "execvp"}
"""Functions and methods that may end the program: ``sys.exit``, ``parser.exit``."""


def call(node: ast.Call, account: Account, frame: Frame) -> Value:
    """What a call returns."""
    if isinstance(node.func, ast.Name) and node.func.id == "super":
        return _parent(node, account, frame)
    callee = account.value_of(node.func, frame)
    match callee:
        case Imported() if callee.home in _LOOKS_UP:
            account.give_up()
        case Imported() if callee.home.rpartition(".")[2] in _LEAVES:
            account.leave()
        case Builtin(name) | Attribute(name=name) if name in _LEAVES:
            account.leave()
    return value(callee, _arguments(node, account, frame), account)


def value(callee: Value, given: Given, account: Account) -> Value:  # noqa: PLR0911 - one return a kind
    """What a call of ``callee`` returns."""
    callee = settled(callee, account)
    match callee:
        case Attribute(of=Ref() as ref, name=name):
            return ContextMethod(ref, given, account).value(name)
        case Attribute(of=Entries() as entries, name=name):
            return DictMethod(entries, given, account).value(name)
        case Attribute(of=Object() as owner, name=name):
            return _of_object(owner, name, given, account)
        case Function():
            return _of_function(callee, given, account)
        case Class():
            return _of_class(callee, given, account)
        case Object():
            return _of_object(callee, "__call__", given, account)
        case Builtin():
            return builtin_calls.call(callee, given, account)
        case Imported() if callee.home.rpartition(".")[2] == "DataLoader":
            lost(given, account)
            return Each(None, some=True)
    account.escape(callee)
    return lost(given, account)


def _parent(node: ast.Call, account: Account, frame: Frame) -> Value:
    """``super()``, or ``super(Class, self)``."""
    function = frame.function
    while function and function.home is None and function.outer:
        function = function.outer.function
    if function is None or not function.home:
        return None
    given = [settled(account.value_of(each, frame), account) for each in node.args]
    owner = (
        given[1] if len(given) == 2 else function.owner or frame.names.get(next(iter(parameters(function.node)), ""))
    )
    after = given[0] if given else Class(function.home)
    return Parent(owner, after.definition) if isinstance(owner, Object | Class) and isinstance(after, Class) else None


def _arguments(node: ast.Call, account: Account, frame: Frame) -> Given:
    given = Given([], {})
    for each in node.args:
        found = account.value_of(each.value if isinstance(each, ast.Starred) else each, frame)
        if not isinstance(each, ast.Starred):
            given.values.append(found)
        elif isinstance(found, Items) and found.whole and not found.views:
            given.values += found.values
        else:
            # From here on, nobody knows which is which.
            given.values.append(found)
            given.sure = False
    for keyword in node.keywords:
        found = account.value_of(keyword.value, frame)
        if keyword.arg:
            given.named[keyword.arg] = found
        elif isinstance(found, Entries) and found.whole:
            given.named |= found.values
        else:
            given.values.append(found)
            given.sure = False
    return given


def _of_function(function: Function, given: Given, account: Account) -> Value:
    """A function, followed where the context may matter in it."""
    if not given.sure:
        account.escape(function)
        return lost(given, account)
    matter = function.owner or function.outer or any(map(matters, given.all()))
    if is_ours(function.module) and not matter:
        return None
    if account.trusted and function.owner is None and function.module is not account.at[1].module:
        return None
    return account.follow(function, given)


def _of_class(cls: Class, given: Given, account: Account) -> Value:
    """A new object."""
    node = cls.definition.node
    if isinstance(node, ast.ClassDef) and node.bases and not any(map(matters, given.all())):
        # Its bases, torch's perhaps, are not looked at: it has nothing that could reach the context.
        lost(given, account)
        return Object(cls.definition, shared=True)
    constructor = member(cls.definition, "__init__")
    complete = ancestry(cls.definition)[1] and not member(cls.definition, "__new__")
    if account.trusted and constructor and constructor.home.module is not account.at[1].module:
        return None
    built = Object(cls.definition)
    if complete and not constructor and not given.all():
        return built
    if not complete or not constructor or not given.sure:
        return lost(given, account)
    value(bound(constructor, built, account), given, account)
    return built


def _of_object(owner: Object, name: str, given: Given, account: Account) -> Value:
    """A method of an object, or the object itself, called."""
    if owner.shared and not matters(owner) and not any(map(matters, given.all())):
        return lost(given, account)
    complete = ancestry(owner.definition)[1]
    known = complete and not owner.untold and name not in owner.attributes
    found = member(owner.definition, name) if known else None
    if found is None:
        account.escape(owner)
        return lost(given, account)
    method = bound(found, owner, account)
    return value(method, given, account)
