"""The account that is kept while a stage's source is followed: what was noted, and what is known of values and names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipeline.inference.containers import Copy, Each, Entries, Items, now
from pipeline.inference.end import End
from pipeline.inference.flow import ANY, Path, Use
from pipeline.inference.frame import Frame
from pipeline.inference.given import Given
from pipeline.inference.ledger import Ledger
from pipeline.inference.members import patched
from pipeline.inference.reach import inside, merge
from pipeline.inference.values import Attribute, Function, Object, Parent, Ref, Value

OURS = ("hooks", "checkpointer", "config")
"""Keys of the context whose objects are ours: given the context, they don't change it."""
_DEEPEST = 4


@dataclass
class Round:
    """One round of a loop.

    Attributes:
        started: when.
        told_news: whether anything older came to hold something else.
    """

    started: int
    told_news: bool = False


class Account(Ledger):
    """What a stage does, as far as it was followed.

    Args:
        at: where it begins.
        facts: keys of the context whose value is known before anything runs.
        value_of, block, follow: what follows an expression, some statements, a call of a function.

    Attributes:
        deferred: whether what is met runs later, if at all, and perhaps often.
        active: the functions that are being followed.
    """

    def __init__(
        self, at: tuple[ast.AST, Frame], facts: Mapping[str, object], value_of: ValueOf, block: Block, follow: Follow
    ) -> None:
        super().__init__(at, facts)
        self._value_of, self._block, self._follow = value_of, block, follow
        self._patched = patched(at[1].module)
        self.deferred = False
        self._rounds: list[Round] = []
        self.active: list[ast.AST] = []

    def value_of(self, node: ast.expr, frame: Frame) -> Value:
        """The value of an expression, its effects noted."""
        before, self.at = self.at, (node, frame)
        value = self._value_of(node, self, frame)
        self.at = before
        return value

    def block(self, body: Sequence[ast.stmt], frame: Frame) -> End:
        """Follow statements."""
        before = self.at
        end = self._block(body, self, frame)
        self.at = before
        return end

    def follow(self, function: Function, given: Given) -> Value:
        """Call a function."""
        return self._follow(function, given, self)

    def is_patched(self, name: str) -> bool:
        """Whether some code assigns another function or value to a name of a class or module."""
        return name in self._patched or ANY in self._patched

    def write(self, path: Path, value: Value) -> None:
        """Note that a value is written at ``path``."""
        if path[0] == ANY or path in {(key,) for key in OURS}:
            self.give_up()
        if path[0] == ANY:
            return
        self.wrote(path, value)
        if isinstance(value, Entries) and len(path) < _DEEPEST:
            value.at.add(path)
            for name, each in list(value.values.items()):
                self.write((*path, name), each)
            if value.complete:
                return
        else:
            self.escape(value)
        self.opaque.add(path)

    def escape(self, value: Value) -> None:
        """A value goes where it cannot be followed."""
        match value:
            case Ref(()):
                self.give_up()
            case Ref(path):
                self.opaque.add(path)
            case Function():
                self.later(value)
            case Object():
                self.share(value)
            case Items() | Entries() | Copy() if not value.complete:
                return  # and so has what it holds
            case Items() | Entries() | Copy():
                self.spoil(value)
        if isinstance(value, Object | Items | Entries | Each | Attribute | Parent):
            for each in inside(value):
                self.escape(each)

    def later(self, function: Function) -> None:
        """A function of ours is called by code that cannot be read, when and how often nobody knows."""
        if function.owner is None and function.outer is None:
            return
        before, self.deferred = self.deferred, True
        with self.perhaps():
            self.follow(function, Given([], {}, sure=False))
        self.deferred = before

    def share(self, owner: Object) -> None:
        """From here on others may assign an object's attributes; what lies in the context stays where it is."""
        if owner.shared:
            return
        owner.shared = True
        self.changed(owner)
        for name, value in list(owner.attributes.items()):
            if not isinstance(value, Ref):
                owner.attributes[name] = None
                self.escape(value)

    def spoil(self, value: Items | Entries | Copy) -> None:
        """From here on nobody knows what a container holds."""
        if isinstance(value, Entries):
            self.opaque |= value.at
        if isinstance(value, Copy):
            self.copied()
        if value.complete:
            value.complete = False
            self.changed(value)

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

    @contextmanager
    def round(self) -> Iterator[Round]:
        """What is met within is one round of a loop."""
        self._rounds.append(Round(now()))
        with self.way():
            yield self._rounds[-1]
        self._rounds.pop()

    def changed(self, value: Object | Items | Entries | Copy) -> None:
        """Note that an object or container holds something else from here on."""
        for each in self._rounds:
            each.told_news = each.told_news or value.born < each.started

    def one_of(self, ways: Sequence[Callable[[], End]], frame: Frame) -> list[End]:
        """Follow ways of which exactly one is taken; how each ends."""
        names, written, sure, start = dict(frame.names), set(self.written), self.sure, len(self.uses)
        ended: list[tuple[End, list[Use], dict[str, Value], set[str]]] = []
        for way in ways:
            frame.names, self.written, self.sure = dict(names), set(written), sure
            with self.way():
                end = way()
            ended.append((end, self.uses[start:], frame.names, self.written))
            del self.uses[start:]
        self.sure = sure
        # A way that raises is no way through.
        through = [uses for end, uses, _, _ in ended if end is not End.RAISE]
        alike = [{(use.action, use.path) for use in uses if use.sure} for uses in through]
        on_each = set.intersection(*alike) if alike else set()
        for _, uses, _, _ in ended:
            self.uses += [
                use if (use.action, use.path) in on_each else replace(use, sure=False, unless="") for use in uses
            ]
        self.written = set().union(*(each for *_, each in ended))
        going = [each for end, _, each, _ in ended if end is End.ON]
        frame.names = self.merged(going) if going else names
        return [end for end, *_ in ended]

    def merged(self, several: Sequence[dict[str, Value]]) -> dict[str, Value]:
        """The names after one of several ways."""
        merged = dict(several[0])
        for names in several[1:]:
            for name, value in names.items():
                merged[name] = self.either(merged[name], value) if name in merged else value
        return merged

    def either(self, one: Value, other: Value) -> Value:
        """A value that is one of two; what can no longer be followed has escaped."""
        value = merge(one, other)
        if value is None:
            self.escape(one)
            self.escape(other)
        return value


ValueOf: TypeAlias = Callable[[ast.expr, Account, Frame], Value]
Block: TypeAlias = Callable[[Sequence[ast.stmt], Account, Frame], End]
Follow: TypeAlias = Callable[[Function, Given, Account], Value]
