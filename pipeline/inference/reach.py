"""What can be reached from a value, and what is known of one that is one of two."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.inference.containers import Each, Entries, Items
from pipeline.inference.flow import ANY
from pipeline.inference.values import Attribute, Const, Function, Object, Parent, Ref, Value

_MOST_CHOICES = 16


def inside(value: Value) -> Iterable[Value]:
    """The values that can be reached from another."""
    match value:
        case Items():
            return value.values
        case Entries():
            return list(value.values.values())
        case Object():
            return list(value.attributes.values())
        case Each():
            return [value.value]
        case Attribute():
            return [value.of]
        case Parent() | Function():
            return [value.owner]
    return []


def carries(value: Value) -> bool:
    """Whether something in the context can be reached from a value."""
    return any(isinstance(each, Ref) for each in reachable(value))


def matters(value: Value) -> bool:
    """Whether a value brings the context itself along, or a method or function within a function, that may."""
    return any(
        each == Ref() or (isinstance(each, Function) and (each.owner or each.outer)) for each in reachable(value)
    )


def reachable(value: Value) -> Iterable[Value]:
    """A value and all that can be reached from it."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += inside(each)


def merge(one: Value, other: Value) -> Value:
    """What is known of a value that is one of two."""
    if one is other or one == other:
        return one
    if isinstance(one, Const) and isinstance(other, Const):
        choices = one.choices | other.choices
        return Const(choices) if len(choices) <= _MOST_CHOICES else None
    if isinstance(one, Ref) and isinstance(other, Ref) and one.path and len(one.path) == len(other.path):
        return Ref(tuple(a if a == b else ANY for a, b in zip(one.path, other.path, strict=True)))
    return None
