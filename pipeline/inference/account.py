"""The account that is kept while a stage's source is followed: what was used so far, and what is known where."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline import source
from pipeline.inference.flow import ANY, Flow, Path, Use
from pipeline.inference.values import (
    Attribute,
    Const,
    Each,
    Entries,
    Function,
    Items,
    Object,
    Ref,
    Value,
    carries,
    inside,
    merge,
)

MOST_CALLS = 2000
"""After so many calls the rest cannot be told: a check has to end."""
HARMLESS = {"hooks", "checkpointer", "resources", "config", "config_yaml", "run_dir", "train_state", "device", "engine"}
"""Keys of the context whose objects are ours: given the context, they don't change it."""


@dataclass
class Frame:
    """One call of a function.

    Attributes:
        module: where the names in it are looked up.
        names: its local names.
        function: what is called.
        trusted: whether the class says in ``reads`` and ``writes`` what it does, so that what cannot be followed is known.
        returned: the values that it may return.
        may_return: whether a return was met.
    """

    module: source.Module
    names: dict[str, Value]
    function: Function | None = None
    trusted: bool = False
    returned: list[Value] = field(default_factory=list)
    may_return: bool = False


class Account:
    """What a stage does, as far as it was followed.

    Args:
        facts: keys of the context whose value is known before anything runs.
        follow: calls a function with positional and named arguments, and returns its value.

    Attributes:
        sure: whether what is met now happens on every way through the stage.
    """

    def __init__(self, facts: Mapping[str, object], follow: Follow) -> None:
        self.facts = dict(facts)
        self.follow = follow
        self.sure = True
        self.uses: list[Use] = []
        self.active: list[ast.AST] = []
        self.calls = 0
        self._written: set[str] = set()
        self._opaque: set[Path] = set()
        self._unknown = ""
        self._statuses: set[str] = set()

    def flow(self) -> Flow:
        """The result."""
        return Flow(tuple(self.uses), frozenset(self._opaque), self._unknown, frozenset(self._statuses))

    def use(self, path: Path, action: Literal["read", "delete"], place: str, *, needed: bool) -> None:
        """Note a read or a deletion; ``needed``: it fails without the key."""
        if not path:
            return
        sure = needed and self.sure and path[0] != ANY and path[0] not in self._written
        self.uses.append(Use(path, action, place, sure))
        if action == "delete" and len(path) == 1 and self.sure:
            self._written.discard(path[0])

    def write(self, path: Path, value: Value, place: str, frame: Frame) -> None:
        """Note that a value is written at ``path``."""
        if path[0] == ANY:
            self.give_up(place, frame)
            return
        self.uses.append(Use(path, "write", place, self.sure))
        self._written.add(path[0])
        self.facts.pop(path[0], None)
        if path == ("status",):
            choices = value.choices if isinstance(value, Const) else {ANY}
            self._statuses |= {str(each) for each in choices}
        if isinstance(value, Entries) and len(path) < 4:
            for name, each in list(value.values.items()):
                self.write((*path, name), each, place, frame)
            if value.complete:
                return
        elif isinstance(value, Ref) or not isinstance(value, Const):
            self.escape(value, place, frame)
        self._opaque.add(path)

    def give_up(self, place: str, frame: Frame) -> None:
        """From here on the context may hold anything; unless the class says in ``writes`` what it does."""
        if not frame.trusted:
            self._unknown = self._unknown or place

    def escape(self, value: Value, place: str, frame: Frame) -> None:
        """A value goes where it cannot be followed."""
        match value:
            case Ref(()):
                self.give_up(place, frame)
            case Ref(path):
                self._opaque.add(path)
            case Attribute():
                self.escape(value.of, place, frame)
            case Function():
                self._called_by_others(value, place, frame)
            case Object() if carries(value, whole=True):
                self.give_up(place, frame)
            case Items() | Entries() | Each():
                if isinstance(value, Items | Entries):
                    value.complete = False
                for each in inside(value):
                    self.escape(each, place, frame)

    def _called_by_others(self, function: Function, place: str, frame: Frame) -> None:
        """A function of ours is called by code that cannot be read, when and how often nobody knows."""
        if function.owner is None and function.outer is None:
            return
        with self.perhaps():
            self.follow(self, function, [], {}, frame)

    @contextmanager
    def perhaps(self) -> Iterator[None]:
        """What is met within may not happen."""
        before, self.sure = self.sure, False
        try:
            yield
        finally:
            self.sure = before

    def one_of(self, ways: Sequence[Callable[[], bool]], frame: Frame) -> None:
        """Follow ways of which exactly one is taken; each returns whether it counts (it doesn't where it raises)."""
        names, written, sure = dict(frame.names), set(self._written), self.sure
        ends: list[tuple[list[Use], dict[str, Value], set[str]]] = []
        start, counted = len(self.uses), list[set[tuple[str, Path]]]()
        for way in ways:
            frame.names, self._written, self.sure = dict(names), set(written), sure
            counts = way()
            uses = self.uses[start:]
            del self.uses[start:]
            ends.append((uses, frame.names, self._written))
            if counts:
                counted.append({(use.action, use.path) for use in uses if use.sure})
        self.sure = sure
        alike = set.intersection(*counted) if counted else set()
        for uses, _, _ in ends:
            self.uses += [use if (use.action, use.path) in alike else replace(use, sure=False) for use in uses]
        self._written = set().union(*(each for _, _, each in ends))
        frame.names = self._merged([each for _, each, _ in ends], frame)

    def _merged(self, several: Sequence[dict[str, Value]], frame: Frame) -> dict[str, Value]:
        merged = dict(several[0])
        for names in several[1:]:
            for name, value in names.items():
                merged[name] = self.either(merged[name], value, frame) if name in merged else value
        return merged

    def either(self, one: Value, other: Value, frame: Frame) -> Value:
        """A value that is one of two; what can no longer be followed has escaped."""
        value = merge(one, other)
        if value is None:
            for each in (one, other):
                if carries(each):
                    self.escape(each, frame.module.file.name, frame)
        return value


Follow = Callable[[Account, Function, Sequence[Value], Mapping[str, Value], Frame], Value]


def place(node: ast.AST, frame: Frame) -> str:
    """``file.py:14``."""
    return f"{frame.module.file.name}:{getattr(node, 'lineno', 0)}"
