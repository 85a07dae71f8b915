"""Calls of Python's own functions: which of them keep or change what they are given, and what the others return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeline.inference.account import Account
from pipeline.inference.containers import Copy, Each, Entries, Items
from pipeline.inference.displays import any_of
from pipeline.inference.given import Given
from pipeline.inference.items import has_items, item_of, rounds
from pipeline.inference.objects import assign, attribute
from pipeline.inference.values import NOTHING, Attribute, Builtin, Const, Imported, Object, Ref, Value, text_of

_LOOK = {
    "abs", "all", "any", "ascii", "bin", "bool", "bytes", "callable", "chr", "complex", "divmod", "float", "format",
    "hasattr", "hash", "hex", "id", "input", "int", "isinstance", "issubclass", "len", "object", "oct", "open", "ord",
    "pow", "print", "repr", "round", "slice", "str", "sum", "type",
}  # fmt: skip
"""They look at their arguments and let go of them."""
_ASK_NOTHING = ("callable", "id", "isinstance", "issubclass", "type")
"""They look without asking, which would run code of what they are given."""
_SEE_NAMES = ("breakpoint", "compile", "delattr", "eval", "exec", "globals", "locals")
"""They reach the names of the code around them."""


def call(builtin: Builtin, given: Given, account: Account) -> Value:
    """What a call of one of Python's own functions returns."""
    name = builtin.name
    if name in _SEE_NAMES or (name == "vars" and not given.values):
        account.give_up()
    known = _KNOWN.get(name)
    if known and given.sure and (name == "dict" or not given.named):
        return known(name, given, account)
    if name in _LOOK and given.sure and (name != "type" or len(given.values) == 1):
        return _looked_at(name, given, account)
    return lost(given, account)


def lost(given: Given, account: Account) -> Value:
    """The arguments go where they cannot be followed."""
    for value in given.all():
        account.escape(value)
    return None


def _looked_at(name: str, given: Given, account: Account) -> Value:
    for value in given.all() if name not in _ASK_NOTHING else ():
        if not isinstance(value, Ref | Const) and not _holds_plain(value):
            account.escape(value)
    known = given.values[0] if len(given.values) == 1 else None
    if name == "len" and isinstance(known, Items) and known.whole:
        return Const(frozenset({len(known.values)}))
    return known if name == "str" and text_of(known) is not None else None


def _holds_plain(value: Value) -> bool:
    return isinstance(value, Items) and not value.views and all(isinstance(each, Ref | Const) for each in value.values)


def _looped(name: str, given: Given, account: Account) -> Value:
    """``list(a)``, ``sorted(a)``, ``enumerate(a)`` …: functions of something to loop over."""
    if len(given.values) != 1:
        return lost(given, account) if given.values else Items([])
    (value,) = given.values
    known = None if name == "iter" and isinstance(value, Items) else rounds(value, account)
    if known is None:
        some, each = has_items(value), item_of(value, account)
        return Each(Items([None, each]) if name == "enumerate" else each, some and name != "iter")
    views = (value,) if isinstance(value, Items) else ()
    match name:
        case "enumerate":
            return Items([Items([Const(frozenset({index})), each]) for index, each in enumerate(known)], views=views)
        case "reversed":
            return Items(known[::-1], views=views)
        case "list" | "tuple":
            return Items(known)
    return any_of(known, account)


def _next(_name: str, given: Given, account: Account) -> Value:
    several = given.values[0] if len(given.values) == 1 else None
    return item_of(several, account) if isinstance(several, Each | Ref) else lost(given, account)


def _side_by_side(_name: str, given: Given, account: Account) -> Value:
    """``zip(a, b)``."""
    columns = [each for each in given.values if isinstance(each, Items) and each.whole and not each.views]
    if len(columns) == len(given.values):
        rows = zip(*(each.values for each in columns), strict=False)
        return Items([Items(list(row)) for row in rows], views=tuple(columns))
    some = all(map(has_items, given.values))
    return Each(Items([item_of(each, account) for each in given.values]), some)


def _count(_name: str, given: Given, _account: Account) -> Value:
    """``range(…)``: whether it has items is known only with its bounds."""
    bounds = [each.only if isinstance(each, Const) else None for each in given.values]
    numbers = [each for each in bounds if isinstance(each, int)]
    told = len(numbers) == len(bounds) in (1, 2, 3) and 0 not in numbers[2:]
    return Each(None, some=told and bool(range(*numbers)))


def _dict(_name: str, given: Given, account: Account) -> Value:
    match given.values:
        case []:
            return Entries(given.named)
        case [Entries() as entries] if entries.whole:
            return Entries({**entries.values, **given.named})
        case [Ref(())] if not given.named:
            return Copy()
    return lost(given, account)


def _get_attribute(_name: str, given: Given, account: Account) -> Value:
    owner, key, *default = (*given.values, None, None)[: max(len(given.values), 2)]
    name = text_of(key)
    if name is None or default:
        # One attribute or another, or something else.
        for each in given.all():
            account.escape(each)
    if name is None:
        return None
    if isinstance(owner, Imported):
        found: Value = replace(owner, dotted=f"{owner.dotted}.{name}")
    else:
        found = attribute(owner, name, account) if isinstance(owner, Object) else Attribute(owner, name)
    if default:
        account.escape(found)
    return found if not default else None


def _set_attribute(_name: str, given: Given, account: Account) -> Value:
    match given.values:
        case [Object() as owner, key, value] if name := text_of(key):
            assign(owner, name, value, account)
            return NOTHING
    return _reached(_name, given, account)


def _reached(_name: str, given: Given, account: Account) -> Value:
    """``vars(a)``, ``setattr(a, unknown, …)``: of an object, any attribute may be assigned."""
    for each in given.values:
        if isinstance(each, Object):
            each.untold = True
    return lost(given, account)


_KNOWN: dict[str, Callable[[str, Given, Account], Value]] = {
    **dict.fromkeys(("list", "tuple", "iter", "sorted", "reversed", "set", "frozenset", "enumerate"), _looped),
    "next": _next,
    "zip": _side_by_side,
    "range": _count,
    "dict": _dict,
    "getattr": _get_attribute,
    "setattr": _set_attribute,
    "vars": _reached,
}
