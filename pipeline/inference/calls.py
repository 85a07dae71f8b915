"""Calls: of the context's own methods, of functions that can be read, and of everything else."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from pipeline import classes
from pipeline.inference.account import HARMLESS, Account, Frame, place
from pipeline.inference.flow import ANY
from pipeline.inference.names import resolve
from pipeline.inference.values import (
    Attribute,
    Builtin,
    Class,
    Const,
    Each,
    Entries,
    Function,
    Imported,
    Items,
    Object,
    Ref,
    Value,
    carries,
    has_items,
)

_ESCAPES = {"setattr", "exec", "eval", "map", "filter", "__import__"}
_SAME_ITEMS = {"list", "tuple", "sorted", "reversed", "set", "frozenset", "iter"}
_TRACED = {"enter", "wrote", "record"}


class Call:
    """One call, its arguments evaluated."""

    def __init__(
        self, node: ast.Call, account: Account, frame: Frame, given: Sequence[Value], named: Mapping[str, Value]
    ) -> None:
        self.account = account
        self.frame = frame
        self.given = given
        self.named = named
        self.place = place(node, frame)

    def of(self, callee: Value) -> Value:
        """What a call of ``callee`` returns."""
        match callee:
            case Attribute(of=Ref() as ref, name=name):
                return self.of_context(ref, name)
            case Attribute(of=Entries() as entries, name=name):
                return self.of_dict(entries, name)
            case Attribute(of=Const(), name=_):
                return None
            case Function():
                return self.of_function(callee)
            case Class():
                return self.of_class(callee)
            case Builtin(name):
                return self.of_builtin(name)
            case Imported():
                return self.of_imported(callee)
        if isinstance(callee, Attribute):
            self.account.escape(callee.of, self.place, self.frame)
        return self.lost()

    def of_imported(self, callee: Imported) -> Value:
        """Something of a package: looked up only where it gets at the context, or calls what does."""
        values = [*self.given, *self.named.values()]
        if any(carries(each, whole=True) for each in values):
            found = resolve(callee)
            return self.lost() if isinstance(found, Imported) else self.of(found)
        self.lost()
        return Each(None, some=True) if callee.dotted.endswith("Loader") else None

    def lost(self) -> Value:
        """The arguments go where they cannot be followed."""
        for value in (*self.given, *self.named.values()):
            self.account.escape(value, self.place, self.frame)
        return None

    def of_function(self, function: Function) -> Value:
        """A function, followed where the context may matter in it."""
        values = [function.owner, *self.given, *self.named.values()]
        own = function.module.name.startswith("pipeline.workspaces.") or function.outer is not None
        if not own and not any(carries(each) for each in values):
            return None
        if self.frame.trusted and function.owner is None and function.module is not self.frame.module:
            return None
        return self.account.follow(self.account, function, self.given, self.named, self.frame)

    def of_class(self, cls: Class) -> Value:
        """A new object."""
        built = Object(cls.definition)
        constructor = built.method("__init__")
        _, complete = classes.ancestry(cls.definition)
        if constructor and not (self.frame.trusted and constructor.module is not self.frame.module):
            self.of_function(constructor)
        elif not constructor and not complete:
            self.lost()
        return built

    def of_builtin(self, name: str) -> Value:
        """One of Python's own functions: none of them changes the context, but for a few."""
        first = self.given[0] if self.given else None
        if name in _ESCAPES:
            return self.lost()
        if name in _SAME_ITEMS:
            return Items(list(first.values), first.complete) if isinstance(first, Items) else first
        if name == "enumerate":
            return _pairs(first)
        if name == "range":
            return Each(None, some=True)
        if name == "dict" and not self.given:
            return Entries(dict(self.named))
        return None

    def of_dict(self, entries: Entries, name: str) -> Value:
        """A method of a dict that stands in the source."""
        match name, self.given:
            case "items", []:
                known = [Items([Const(frozenset({key})), value]) for key, value in entries.values.items()]
                return Items(list(known), entries.complete and ANY not in entries.values)
            case (("keys" | "values" | "copy"), []):
                return None
            case "get", _:
                return None
            case "update", [Entries() as more] if more.complete:
                entries.values.update({**more.values, **self.named})
                return None
            case "update", []:
                entries.values.update(self.named)
                return None
        entries.complete = False
        return self.lost()

    def of_context(self, ref: Ref, name: str) -> Value:
        """A method of the context, or of something in it."""
        key = self.given[0] if self.given else None
        below = ref.below(key)
        match name:
            case "get":
                self.read(below, needed=False)
                return below
            case "pop":
                needed = len(self.given) < 2
                self.read(below, needed=needed)
                self.account.use(below.path, "delete", self.place, needed=needed)
                return below
            case "setdefault":
                self.read(below, needed=False)
                self.account.write(below.path, self.given[1] if len(self.given) > 1 else None, self.place, self.frame)
                return below
            case "update":
                return self.update(ref)
            case "items" | "values":
                each: Value = Ref((*ref.path, ANY))
                return Each(Items([None, each]) if name == "items" else each)
            case "keys" | "copy":
                return None
        return self.method(ref, name)

    def method(self, ref: Ref, name: str) -> Value:
        """A method that a dict doesn't have, or that changes it in a way that isn't followed."""
        if not ref.path and name in _TRACED:
            return None
        if ref.path and ref.path[0] in HARMLESS:
            return None
        self.account.escape(ref, self.place, self.frame)
        return self.lost()

    def read(self, ref: Ref, *, needed: bool) -> None:
        """Note a read."""
        self.account.use(ref.path, "read", self.place, needed=needed)

    def update(self, ref: Ref) -> Value:
        """``update({…}, key=…)``, on the context or on something in it."""
        new = [Entries(dict(self.named)), *self.given]
        for each in new:
            if not isinstance(each, Entries) or not each.complete:
                self.account.escape(ref, self.place, self.frame)
                self.account.escape(each, self.place, self.frame)
            if isinstance(each, Entries):
                for name, value in each.values.items():
                    self.account.write((*ref.path, name), value, self.place, self.frame)
        return None


def _pairs(value: Value) -> Value:
    """``enumerate(…)``."""
    if isinstance(value, Items):
        return Items([Items([None, each]) for each in value.values], value.complete)
    return Each(Items([None, value.value if isinstance(value, Each) else None]), has_items(value))
