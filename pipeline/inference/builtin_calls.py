"""Calls of Python's own functions: which of them keep or change what they are given, and what the others return."""

from __future__ import annotations

from pipeline.inference.account import Account, Given
from pipeline.inference.displays import any_of
from pipeline.inference.frame import Frame
from pipeline.inference.items import item_of, rounds
from pipeline.inference.objects import assign, attribute
from pipeline.inference.values import (
    NOTHING,
    Attribute,
    Builtin,
    Const,
    Each,
    Entries,
    Items,
    Object,
    Ref,
    Value,
    has_items,
    text_of,
)

_LOOKS = set(
    "abs all any ascii bin bool bytes callable chr complex divmod float format hasattr hash hex id input int isinstance "
    "issubclass len object oct open ord pow print repr round slice str sum type".split()
)
"""They look at their arguments and let go of them."""
_ASK_NOTHING = {"callable", "id", "isinstance", "issubclass", "type"}
"""They look without asking."""
_RUNS = set("breakpoint compile delattr eval exec globals locals vars".split())
"""They reach the names of the code around them."""


def call(builtin: Builtin, given: Given, account: Account, frame: Frame) -> Value:
    """What a call of one of Python's own functions returns."""
    name, values = builtin.name, given.values
    if name in ("setattr", "vars") and values and isinstance(values[0], Object):
        values[0].untold = values[0].untold or name == "vars" or text_of(values[1]) is None
    if name in _RUNS and not (name == "vars" and values):
        account.give_up(given.place, frame)
    if not given.sure or (given.named and name not in ("dict", "print", "open")):
        return lost(given, account, frame)
    match name, values:
        case (("list" | "tuple" | "iter" | "sorted" | "reversed" | "set" | "frozenset" | "enumerate"), [value]):
            return _looped(name, value, given, account, frame)
        case "next", [Each() | Ref() as several]:
            return item_of(several, account, frame, given.place)
        case (("list" | "tuple"), []):
            return Items([])
        case "zip", _:
            return _side_by_side(values, given, account, frame)
        case "range", _:
            return _count(values)
        case "dict", []:
            return Entries(given.named)
        case "dict", [Ref(())]:
            account.copied()
            return None
        case "dict", [Entries() as entries] if entries.whole:
            return Entries({**entries.values, **given.named})
        case "getattr", [owner, key, *default]:
            return _get_attribute(owner, key, default, given, account, frame)
        case "setattr", [Object() as owner, key, value] if text_of(key):
            assign(owner, text_of(key) or "", value, account, frame, given.place)
            return NOTHING
    if name in _LOOKS and not (name == "type" and len(values) > 1):
        return _looked_at(name, given, account, frame)
    return lost(given, account, frame)


def lost(given: Given, account: Account, frame: Frame) -> Value:
    """The arguments go where they cannot be followed."""
    for value in given.all():
        account.escape(value, given.place, frame)
    return None


def _looked_at(name: str, given: Given, account: Account, frame: Frame) -> Value:
    known = given.values[0] if len(given.values) == 1 else None
    for value in given.all() if name not in _ASK_NOTHING else ():
        plain = (
            isinstance(value, Items) and not value.views and all(isinstance(each, Ref | Const) for each in value.values)
        )
        if not plain and not isinstance(value, Ref | Const):
            # What it is asked runs code of its own.
            account.escape(value, given.place, frame)
    if name == "len" and isinstance(known, Items) and known.whole:
        return Const(frozenset({len(known.values)}))
    return known if name == "str" and text_of(known) is not None else None


def _looped(name: str, value: Value, given: Given, account: Account, frame: Frame) -> Value:
    """Functions of something to loop over."""
    if isinstance(value, Items) and (name == "iter" or value.views):
        account.escape(value, given.place, frame)
        return None
    known = rounds(value, account)
    if known is None:
        some, each = has_items(value), item_of(value, account, frame, given.place)
        return Each(Items([None, each]) if name == "enumerate" else each, some and name != "iter")
    assert isinstance(value, Items)
    match name:
        case "enumerate":
            return Items([Items([Const(frozenset({index})), each]) for index, each in enumerate(known)], views=(value,))
        case "reversed":
            return Items(known[::-1], views=(value,))
        case "list" | "tuple":
            return Items(known)
    return any_of(known, account, frame, given.place)


def _side_by_side(values: list[Value], given: Given, account: Account, frame: Frame) -> Value:
    columns = [each for each in values if isinstance(each, Items) and each.whole and not each.views]
    if len(columns) == len(values):
        rows = zip(*(each.values for each in columns), strict=False)
        return Items([Items(list(row)) for row in rows], views=tuple(columns))
    some = all(map(has_items, values))
    return Each(Items([item_of(each, account, frame, given.place) for each in values]), some)


def _count(values: list[Value]) -> Value:
    """``range(…)``: whether it has items is known only with its bounds."""
    bounds = [each.only if isinstance(each, Const) else None for each in values]
    numbers = [each for each in bounds if isinstance(each, int)]
    return Each(
        None, some=bool(numbers and len(numbers) == len(bounds) <= 3 and 0 not in numbers[2:] and range(*numbers))
    )


def _get_attribute(
    owner: Value, key: Value, default: list[Value], given: Given, account: Account, frame: Frame
) -> Value:
    name = text_of(key)
    for each in default:
        account.escape(each, given.place, frame)
    if name is None:
        account.escape(owner, given.place, frame)
        return None
    found = attribute(owner, name, account, frame, given.place) if isinstance(owner, Object) else Attribute(owner, name)
    if default and found is not None:
        account.escape(found, given.place, frame)
        return None
    return found
