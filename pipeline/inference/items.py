"""What a loop over a value comes to, and what lies at an index of it."""

from __future__ import annotations

from pipeline.inference.account import Account
from pipeline.inference.containers import Each, Items
from pipeline.inference.flow import ANY
from pipeline.inference.values import Const, Ref, Value

_MOST_ROUNDS = 32


def rounds(value: Value, account: Account) -> list[Value] | None:
    """The items, one after the other, where they are known and few."""
    if not isinstance(value, Items) or not value.whole or not 0 < len(value.values) <= _MOST_ROUNDS:
        return None
    found = list(value.values)
    if value.views:
        # It is at its end.
        account.spoil(value)
    return found


def item_of(value: Value, account: Account) -> Value:
    """What is known of every item."""
    match value:
        case Each():
            return value.value
        case Ref(()):
            return None
        case Ref(path):
            return Ref((*path, ANY))
        case Items() if value.whole and not value.views and all(isinstance(each, Const) for each in value.values):
            kinds = [each.choices for each in value.values if isinstance(each, Const)]
            return Const(frozenset().union(*kinds))
    account.escape(value)
    return None


def at_index(value: Value, key: Value, account: Account) -> Value:
    """``value[key]`` of something that is no dict."""
    index = key.only if isinstance(key, Const) else None
    if (
        isinstance(value, Items)
        and value.whole
        and isinstance(index, int)
        and -len(value.values) <= index < len(value.values)
    ):
        return value.values[index]
    if isinstance(value, Each) and isinstance(index, int):
        return value.value
    account.escape(value)
    return None


def has_items(value: Value) -> bool:
    """Whether a loop over a value certainly comes to an item: a loader without a batch is an error of its own."""
    match value:
        case Each():
            return value.some
        case Items():
            return value.whole and bool(value.values)
        case Ref():
            return len(value.path) > 1 and value.path[0] == "dataset"
    return False
