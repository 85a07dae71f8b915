"""Calls: of functions and classes that can be read, and of everything else."""

from __future__ import annotations

import ast

from pipeline import classes
from pipeline.inference import builtin_calls
from pipeline.inference.account import Account, Given
from pipeline.inference.builtin_calls import lost
from pipeline.inference.dicts import ContextMethod, DictMethod
from pipeline.inference.frame import Frame, is_ours, place
from pipeline.inference.members import member
from pipeline.inference.names import settled
from pipeline.inference.objects import bound
from pipeline.inference.scopes import parameters
from pipeline.inference.values import (
    Attribute,
    Builtin,
    Class,
    Each,
    Entries,
    Function,
    Imported,
    Items,
    Object,
    Parent,
    Ref,
    Value,
    matters,
)

_LOOKS_UP = {"sys._getframe", "inspect.currentframe", "inspect.stack"}
_ENDS = {"sys.exit", "os._exit", "os.abort", "os.kill"}


def call(node: ast.Call, account: Account, frame: Frame) -> Value:
    """What a call returns."""
    if isinstance(node.func, ast.Name) and node.func.id == "super":
        return _parent(node, account, frame)
    callee = account.value_of(node.func, frame)
    if (isinstance(callee, Imported) and callee.dotted in _ENDS) or callee in (Builtin("exit"), Builtin("quit")):
        account.leave()
    if isinstance(callee, Imported) and callee.dotted in _LOOKS_UP:
        account.give_up(place(node, frame), frame)
    return value(callee, _arguments(node, account, frame), account, frame)


def value(callee: Value, given: Given, account: Account, frame: Frame) -> Value:  # noqa: PLR0911 - one return a kind
    """What a call of ``callee`` returns."""
    callee = settled(callee, account, frame)
    match callee:
        case Attribute(of=Ref() as ref, name=name):
            return ContextMethod(ref, given, account, frame).value(name)
        case Attribute(of=Entries() as entries, name=name):
            return DictMethod(entries, given, account, frame).value(name)
        case Attribute(of=Object() as owner, name=name):
            return _of_object(owner, name, given, account, frame)
        case Function():
            return _of_function(callee, given, account, frame)
        case Class():
            return _of_class(callee, given, account, frame)
        case Object():
            return _of_object(callee, "__call__", given, account, frame)
        case Builtin():
            return builtin_calls.call(callee, given, account, frame)
        case Imported(dotted=dotted) if dotted.rpartition(".")[2] == "DataLoader":
            lost(given, account, frame)
            return Each(None, some=True)
    account.escape(callee, given.place, frame)
    return lost(given, account, frame)


def _parent(node: ast.Call, account: Account, frame: Frame) -> Value:
    """``super()``, or ``super(Class, self)``."""
    function = frame.function
    while function and function.home is None and function.outer:
        function = function.outer.function
    if function is None or not function.home:
        return None
    given = [settled(account.value_of(each, frame), account, frame) for each in node.args]
    owner = (
        given[1] if len(given) == 2 else function.owner or frame.names.get(next(iter(parameters(function.node)), ""))
    )
    after = given[0] if given else Class(function.home)
    return Parent(owner, after.definition) if isinstance(owner, Object | Class) and isinstance(after, Class) else None


def _arguments(node: ast.Call, account: Account, frame: Frame) -> Given:
    given = Given([], {}, place(node, frame))
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


def _of_function(function: Function, given: Given, account: Account, frame: Frame) -> Value:
    """A function, followed where the context may matter in it."""
    if not given.sure:
        account.escape(function, given.place, frame)
        return lost(given, account, frame)
    matter = function.owner or function.outer or any(map(matters, given.all()))
    if is_ours(function.module) and not matter:
        return None
    if frame.trusted and function.owner is None and function.module is not frame.module:
        return None
    return account.follow(function, given, frame)


def _of_class(cls: Class, given: Given, account: Account, frame: Frame) -> Value:
    """A new object."""
    if cls.definition.node.bases and not any(map(matters, given.all())):
        # Its bases, torch's perhaps, are not looked at: it has nothing that could reach the context.
        lost(given, account, frame)
        return Object(cls.definition, shared=True)
    constructor = member(cls.definition, "__init__")
    complete = classes.ancestry(cls.definition)[1] and not member(cls.definition, "__new__")
    if frame.trusted and constructor and constructor.home.module is not frame.module:
        return None
    built = Object(cls.definition)
    if complete and not constructor and not given.all():
        return built
    if not complete or not constructor or not given.sure:
        return lost(given, account, frame)
    value(bound(constructor, built, account, frame, given.place), given, account, frame)
    return built


def _of_object(owner: Object, name: str, given: Given, account: Account, frame: Frame) -> Value:
    """A method of an object, or the object itself, called."""
    if owner.shared and not matters(owner) and not any(map(matters, given.all())):
        return lost(given, account, frame)
    complete = classes.ancestry(owner.definition)[1]
    known = complete and not owner.untold and name not in owner.attributes
    found = member(owner.definition, name) if known else None
    if found is None:
        account.escape(owner, given.place, frame)
        return lost(given, account, frame)
    method = bound(found, owner, account, frame, given.place)
    return value(method, given, account, frame)
