"""What is done to a dict by its own methods: to the context, to something in it, to a dict that stands in the source."""

from __future__ import annotations

from pipeline.inference.account import OURS, Account
from pipeline.inference.containers import Copy, Each, Entries, Items
from pipeline.inference.flow import ANY
from pipeline.inference.given import Given
from pipeline.inference.values import NOTHING, Const, Ref, Value, text_of

_TRACED = ("enter", "wrote", "record")
"""Methods that the context has beside those of a dict."""


class ContextMethod:
    """A call of a method of the context, or of something in it."""

    def __init__(self, ref: Ref, given: Given, account: Account) -> None:
        self.ref = ref
        self.given = given
        self.account = account

    def value(self, name: str) -> Value:
        """What it returns."""
        values, path = self.given.values, self.ref.path
        if not self.given.sure or (path and path[0] in OURS):
            return self.other(name)
        match name, values:
            case "get" | "pop" | "setdefault", [key, *default]:
                return self.of_key(name, self.ref.below(key), default)
            case "__getitem__" | "__setitem__" | "__delitem__" | "__contains__", [key, *more]:
                return self.spelt_out(name, self.ref.below(key), more)
            case "update", _:
                return self.update()
            case "copy", [] if not path:
                return Copy()
            case "items" | "values" | "keys", []:
                return self.each(name)
        return self.other(name)

    def each(self, name: str) -> Value:
        """``items()``, ``values()``, ``keys()``."""
        if name == "keys":
            return None
        if not self.ref.path:
            self.account.copied()
        value = Ref((*self.ref.path, ANY))
        return Each(Items([None, value]) if name == "items" else value)

    def of_key(self, name: str, below: Ref, default: list[Value]) -> Value:
        """``get(key)``, ``pop(key)``, ``setdefault(key, value)``."""
        needed = name == "pop" and not default
        self.account.use(below.path, "read", needed=needed)
        if name == "pop":
            self.account.use(below.path, "delete", needed=needed)
        if name == "setdefault":
            self.account.write(below.path, default[0] if default else NOTHING)
            return below
        # What lies there, or something else where nothing does.
        return self.account.either(below, default[0]) if default and default[0] != NOTHING else below

    def spelt_out(self, name: str, below: Ref, more: list[Value]) -> Value:
        """``__setitem__(key, value)`` and the like."""
        if name == "__setitem__":
            self.account.write(below.path, more[0] if more else None)
            return NOTHING
        self.account.use(below.path, "read", needed=name != "__contains__")
        if name == "__delitem__":
            self.account.use(below.path, "delete", needed=True)
        return below if name == "__getitem__" else None

    def update(self) -> Value:
        """``update({…}, key=…)``."""
        for each in (Entries(self.given.named), *map(_pairs, self.given.values)):
            if not isinstance(each, Entries) or not each.complete:
                self.account.escape(self.ref)
                self.account.escape(each)
            for name, value in list(each.values.items()) if isinstance(each, Entries) else ():
                self.account.write((*self.ref.path, name), value)
        return NOTHING

    def other(self, name: str) -> Value:
        """A method that a dict doesn't have, or that changes it in a way that isn't followed."""
        ours = self.ref.path and self.ref.path[0] in OURS
        # A Brain is told the context; whether it writes to it is looked into with the model.
        if ours or (name == "bind" and self.ref.path[:1] == ("model",)):
            for each in self.given.all():
                if not isinstance(each, Ref):
                    self.account.escape(each)
            return None
        if self.ref.path or name not in _TRACED:
            self.account.escape(self.ref)
        for each in self.given.all():
            self.account.escape(each)
        return None


class DictMethod:
    """A call of a method of a dict that stands in the source."""

    def __init__(self, entries: Entries, given: Given, account: Account) -> None:
        self.entries = entries
        self.given = given
        self.account = account

    def value(self, name: str) -> Value:
        """What it returns."""
        known = self.entries.values
        match name, self.given.values:
            case "get", [each, *default] if self.entries.whole and text_of(each) is not None:
                return known.get(text_of(each) or "", default[0] if default else NOTHING)
            case "items", [] if self.entries.whole:
                return Items([Items([Const(frozenset({key})), value]) for key, value in known.items()])
            case "values", [] if self.entries.whole:
                return Items(list(known.values()))
            case "keys", [] if self.entries.whole:
                return Items([Const(frozenset({key})) for key in known])
            case "copy", [] if self.entries.whole:
                return Entries(dict(known))
            case "update", values if self.given.sure and all(
                isinstance(each, Entries) and each.whole for each in values
            ):
                for each in (*values, Entries(self.given.named)):
                    for text, value in each.values.items() if isinstance(each, Entries) else ():
                        put(self.entries, text, value, self.account)
                return NOTHING
        for each in (self.entries, *self.given.all()):
            self.account.escape(each)
        return None


def put(entries: Entries, key: str, value: Value, account: Account) -> None:
    """``entries[key] = value``; ``*`` for a key that isn't known."""
    if entries.at:
        account.spoil(entries)
    if not entries.complete:
        account.escape(value)
    there = key in entries.values
    if not account.firm or key == ANY:
        value = account.either(entries.values[key], value) if there else value
        entries.loose |= set() if there else {key}
    else:
        entries.loose.discard(key)
    if not there or entries.values[key] != value:
        account.changed(entries)
    entries.values[key] = value


def item(entries: Entries, key: Value, account: Account) -> Value:
    """``entries[key]``."""
    name = text_of(key)
    if entries.complete and name in entries.values and name not in entries.loose and ANY not in entries.values:
        return entries.values[name]
    if len(entries.values) == 1 and entries.complete:
        # Whatever the key, it is the only value there is.
        return next(iter(entries.values.values()))
    account.escape(entries)
    return None


def _pairs(value: Value) -> Value:
    """A list of (key, value), which ``update`` takes as well, as the dict that it stands for."""
    if not isinstance(value, Items) or not value.whole or value.views:
        return value
    pairs = [each.values for each in value.values if isinstance(each, Items) and each.whole and len(each.values) == 2]
    names = [text_of(key) for key, _ in pairs]
    known = [name for name in names if name is not None]
    if len(known) < len(value.values):
        return value
    return Entries(dict(zip(known, (each for _, each in pairs), strict=True)))
