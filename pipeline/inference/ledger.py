"""What is noted while a stage's source is followed: the uses of keys, and how far they can be relied on."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Literal

from pipeline.inference.flow import ANY, Flow, Path, Use
from pipeline.inference.frame import Frame, place
from pipeline.inference.values import Const, Value

_MOST_STEPS = 5_000


class TooLongError(Exception):
    """Following the source takes too many steps: a check has to end."""


class Ledger:
    """The notes on one stage.

    Args:
        at: where it begins.
        facts: keys of the context whose value is known before anything runs.

    Attributes:
        at: what is being followed, and in which call.
        sure: whether what is met now happens on every way through the stage.
        ways: how many branches and loops there are around: what is done now may not be done, or more than once.
        uses: the reads and writes so far.
        written: the keys that the stage may have written so far.
        opaque: the values whose own keys cannot be told.
        runs: the methods of ours that the stage certainly runs.
    """

    def __init__(self, at: tuple[ast.AST, Frame], facts: Mapping[str, object]) -> None:
        self.at = at
        self.sure = True
        self.ways = 0
        self.uses: list[Use] = []
        self.written: set[str] = set()
        self.opaque: set[Path] = set()
        self.runs: set[str] = set()
        self._facts = dict(facts)
        self._unknown = ""
        self._left = False
        self._statuses: set[str] = set()
        self._perhaps: set[str] = set()
        self._steps = 0

    def flow(self) -> Flow:
        """The result."""
        statuses = self._statuses | self._perhaps | ({ANY} if self._left else set())
        return Flow(tuple(self.uses), frozenset(self.opaque), self._unknown, frozenset(statuses), frozenset(self.runs))

    @property
    def trusted(self) -> bool:
        """Whether what is being followed is code of ours: it changes what its classes declare in ``writes``, no more."""
        return self.at[1].trusted

    @property
    def firm(self) -> bool:
        """Whether what is assigned now is certainly assigned, and once."""
        return self.sure and not self.ways

    def step(self) -> None:
        """One more step.

        Raises:
            TooLongError: there were too many.
        """
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise TooLongError

    def fact(self, path: Path) -> object:
        """What is known of a value in the context."""
        return self._facts.get(path[0]) if len(path) == 1 and not self._unknown else None

    def use(self, path: Path, action: Literal["read", "delete"], *, needed: bool) -> None:
        """Note a read or a deletion; ``needed``: it fails without the key."""
        if not path:
            return
        told = self.sure and path[0] != ANY and not self._unknown and not self._left
        if action == "read":
            told = told and needed and path[0] not in self.written
        self.uses.append(Use(path, action, place(*self.at), told))
        if action == "delete" and len(path) == 1 and self.sure:
            self.written.discard(path[0])

    def wrote(self, path: Path, value: Value) -> None:
        """Note a write."""
        self.uses.append(Use(path, "write", place(*self.at), self.sure))
        self.written.add(path[0])
        self._facts.pop(path[0], None)
        if path == ("status",):
            found = set(map(str, value.choices)) if isinstance(value, Const) else {ANY}
            # The last one counts, unless it may not be written, or one that may be written may come later.
            self._statuses = found if self.firm else self._statuses | found
            self._perhaps |= set() if self.firm else found

    def give_up(self) -> None:
        """From here on the context may hold anything."""
        if not self.trusted:
            self._unknown = self._unknown or place(*self.at)

    def leave(self) -> None:
        """The program may end here without having failed."""
        self._left = True

    def copied(self) -> None:
        """Somebody has a copy of the context: the keys are safe, what lies below them isn't."""
        self.opaque.add((ANY,))
