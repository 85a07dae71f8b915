"""The account that is kept while a stage's source is followed: what was used so far, and what is known."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from typing import Literal, TypeAlias

from pipeline import source
from pipeline.inference.flow import ANY, Flow, Path, Use
from pipeline.inference.frame import Frame
from pipeline.inference.members import patched
from pipeline.inference.values import (
    Attribute,
    Const,
    Each,
    Entries,
    Function,
    Items,
    Object,
    Parent,
    Ref,
    Value,
    inside,
    merge,
)

OURS = ("hooks", "checkpointer", "config")
"""Keys of the context whose objects are ours: given the context, they don't change it."""
_MOST_STEPS = 20_000
_DEEPEST = 4


class End(Enum):
    """How a block ends: it goes on, leaves the loop or its round, returns, or raises."""

    ON = auto()
    LOOP = auto()
    RETURN = auto()
    RAISE = auto()


class TooLongError(Exception):
    """Following the source takes too many steps: a check has to end."""


class Account:
    """What a stage does, as far as it was followed.

    Args:
        module: that of the stage.
        facts: keys of the context whose value is known before anything runs.
        value_of, block, follow: what follows an expression, some statements, a call of a function.

    Attributes:
        sure: whether what is met now happens on every way through the stage.
        ways: how many branches and loops there are around: what is assigned now may not be assigned.
        deferred: whether what is met runs later, if at all, and perhaps often.
        here: ``file.py:14``, the statement that is being followed.
        version: grows with each change of what objects and containers hold.
        uses: the reads and writes so far.
        active: the functions that are being followed.
    """

    def __init__(
        self, module: source.Module, facts: Mapping[str, object], value_of: ValueOf, block: Block, follow: Follow
    ) -> None:
        self._patched = patched(module)
        self._facts = dict(facts)
        self._value_of, self._block, self._follow = value_of, block, follow
        self.sure = True
        self.ways = 0
        self.deferred = False
        self.version = 0
        self.here = ""
        self.uses: list[Use] = []
        self.active: list[ast.AST] = []
        self._steps = 0
        self._left = False
        self._written: set[str] = set()
        self._opaque: set[Path] = set()
        self._unknown = ""
        self._statuses: set[str] = set()

    def value_of(self, node: ast.expr, frame: Frame) -> Value:
        """The value of an expression, its effects noted."""
        return self._value_of(node, self, frame)

    def block(self, body: Sequence[ast.stmt], frame: Frame) -> End:
        """Follow statements."""
        return self._block(body, self, frame)

    def follow(self, function: Function, given: Given, frame: Frame) -> Value:
        """Call a function."""
        return self._follow(function, given, self, frame)

    def flow(self) -> Flow:
        """The result."""
        return Flow(tuple(self.uses), frozenset(self._opaque), self._unknown, frozenset(self._statuses))

    def step(self) -> None:
        """One more step.

        Raises:
            TooLongError: there were too many.
        """
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise TooLongError

    def is_patched(self, name: str) -> bool:
        """Whether some code assigns another function or value to a name of a class or module."""
        return name in self._patched or ANY in self._patched

    def fact(self, path: Path) -> object:
        """What is known of a value in the context."""
        return self._facts.get(path[0]) if len(path) == 1 and not self._unknown else None

    def use(self, path: Path, action: Literal["read", "delete"], place: str, *, needed: bool) -> None:
        """Note a read or a deletion; ``needed``: it fails without the key."""
        if not path:
            return
        known = path[0] != ANY and path[0] not in self._written and not self._unknown and not self._left
        self.uses.append(Use(path, action, place, needed and self.sure and known))
        if action == "delete" and len(path) == 1 and self.sure:
            self._written.discard(path[0])

    def write(self, path: Path, value: Value, place: str, frame: Frame) -> None:
        """Note that a value is written at ``path``."""
        if path[0] == ANY or path in {(key,) for key in OURS}:
            self.give_up(place, frame)
        if path[0] == ANY:
            return
        self.uses.append(Use(path, "write", place, self.sure))
        self._written.add(path[0])
        self._facts.pop(path[0], None)
        if path == ("status",):
            self._statuses |= set(map(str, value.choices)) if isinstance(value, Const) else {ANY}
        if isinstance(value, Entries) and len(path) < _DEEPEST:
            value.at.add(path)
            for name, each in list(value.values.items()):
                self.write((*path, name), each, place, frame)
            if value.complete:
                return
        else:
            self.escape(value, place, frame)
        self._opaque.add(path)

    def promise(self, key: str, place: str) -> None:
        """Note that our own code writes a key, as it declares."""
        self.uses.append(Use((key,), "write", place, self.sure))
        self._written.add(key)
        self._opaque.add((key,))

    def give_up(self, place: str, frame: Frame) -> None:
        """From here on the context may hold anything."""
        if not frame.trusted:
            self._unknown = self._unknown or place

    def leave(self) -> None:
        """The program may end here without having failed."""
        self._left = True
        self._statuses.add(ANY)

    def copied(self) -> None:
        """Somebody has a copy of the context: the keys are safe, what lies below them isn't."""
        self._opaque.add((ANY,))

    def escape(self, value: Value, place: str, frame: Frame) -> None:
        """A value goes where it cannot be followed."""
        match value:
            case Ref(()):
                self.give_up(place, frame)
            case Ref(path):
                self._opaque.add(path)
            case Function():
                self.later(value, place, frame)
            case Object():
                self.share(value, place, frame)
                for each in inside(value):
                    self.escape(each, place, frame)
            case Items() | Entries():
                self.spoil(value)
                for each in inside(value):
                    self.escape(each, place, frame)
            case Each() | Attribute() | Parent():
                for each in inside(value):
                    self.escape(each, place, frame)

    def later(self, function: Function, place: str, frame: Frame) -> None:
        """A function of ours is called by code that cannot be read, when and how often nobody knows."""
        if function.owner is None and function.outer is None:
            return
        before, self.deferred = self.deferred, True
        with self.perhaps():
            self.follow(function, Given([], {}, place, sure=False), frame)
        self.deferred = before

    def share(self, owner: Object, place: str, frame: Frame) -> None:
        """From here on others may assign an object's attributes; what lies in the context stays where it is."""
        if owner.shared:
            return
        owner.shared = True
        self.version += 1
        for name, value in list(owner.attributes.items()):
            if not isinstance(value, Ref):
                owner.attributes[name] = None
                self.escape(value, place, frame)

    def spoil(self, value: Items | Entries) -> None:
        """From here on nobody knows what a container holds."""
        if isinstance(value, Entries):
            self._opaque |= value.at
        if value.complete:
            value.complete = False
            self.version += 1

    @property
    def firm(self) -> bool:
        """Whether what is assigned now is certainly assigned, and once."""
        return self.sure and not self.ways

    @contextmanager
    def perhaps(self) -> Iterator[None]:
        """What is met within may not happen."""
        before, self.sure = self.sure, False
        try:
            yield
        finally:
            self.sure = before

    @contextmanager
    def way(self) -> Iterator[None]:
        """What is met within is one way of several, or one round of several."""
        self.ways += 1
        try:
            yield
        finally:
            self.ways -= 1

    def one_of(self, ways: Sequence[Callable[[], End]], frame: Frame) -> list[End]:
        """Follow ways of which exactly one is taken; how each ends."""
        names, written, sure = dict(frame.names), set(self._written), self.sure
        ended: list[tuple[End, list[Use], dict[str, Value], set[str]]] = []
        start = len(self.uses)
        for way in ways:
            frame.names, self._written, self.sure = dict(names), set(written), sure
            with self.way():
                end = way()
            ended.append((end, self.uses[start:], frame.names, self._written))
            del self.uses[start:]
        self.sure = sure
        counted = [
            {(use.action, use.path) for use in uses if use.sure} for end, uses, _, _ in ended if end is not End.RAISE
        ]
        alike = set.intersection(*counted) if counted else set()
        for _, uses, _, _ in ended:
            self.uses += [use if (use.action, use.path) in alike else replace(use, sure=False) for use in uses]
        self._written = set().union(*(each for *_, each in ended))
        going = [each for end, _, each, _ in ended if end is End.ON]
        frame.names = self.merged(going, frame) if going else names
        return [end for end, *_ in ended]

    def merged(self, several: Sequence[dict[str, Value]], frame: Frame) -> dict[str, Value]:
        """The names after one of several ways."""
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
                self.escape(each, self.here, frame)
        return value


class Given:
    """The arguments of a call.

    Args:
        values: by position.
        named: by name.
        place: ``file.py:14``.
        sure: whether these are all.
    """

    def __init__(self, values: Sequence[Value], named: Mapping[str, Value], place: str, *, sure: bool = True) -> None:
        self.values = list(values)
        self.named = dict(named)
        self.place = place
        self.sure = sure

    def all(self) -> list[Value]:
        """Every argument."""
        return [*self.values, *self.named.values()]


ValueOf: TypeAlias = Callable[[ast.expr, Account, Frame], Value]
Block: TypeAlias = Callable[[Sequence[ast.stmt], Account, Frame], End]
Follow: TypeAlias = Callable[[Function, Given, Account, Frame], Value]
