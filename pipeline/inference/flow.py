"""The result: the keys that a stage uses, where, and how sure that is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Path: TypeAlias = tuple[str, ...]
"""The keys that lead to a value: ``("model", "*", "updater")`` for ``context["model"][name]["updater"]``."""

ANY = "*"
"""A key that the source doesn't tell."""


@dataclass(frozen=True)
class Use:
    """One use of a key.

    Attributes:
        path: the key, and those above it.
        action: what is done with it.
        place: ``file.py:14``.
        sure: whether it happens on every way through the stage; for a read also, that it fails without the key and that
            the stage didn't write the key itself before.
        unless: a key for lack of which it happens, where it isn't sure otherwise.
    """

    path: Path
    action: Literal["read", "write", "delete"]
    place: str
    sure: bool
    unless: str = ""

    @property
    def key(self) -> str:
        """The key of the context itself."""
        return self.path[0]


@dataclass(frozen=True)
class Flow:
    """What one stage does with the context.

    Attributes:
        uses: in the order of the source.
        opaque: the values whose own keys cannot be told.
        unknown: where it does something to the context that cannot be followed; ``""`` where there is no such place.
        statuses: what it may write to ``context["status"]``.
        runs: the methods of ours that it certainly runs: ``Runner.run``.
    """

    uses: tuple[Use, ...] = ()
    opaque: frozenset[Path] = frozenset()
    unknown: str = ""
    statuses: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()

    def demands(self, there: Collection[str] | None = None) -> Iterator[Use]:
        """The reads that certainly fail without their key; each path once.

        Args:
            there: the keys that the context may hold before the stage; None where that isn't known.
        """
        first: dict[Path, Use] = {}
        for use in self.uses:
            lacks = bool(use.unless) and there is not None and use.unless not in there
            if use.action == "read" and (use.sure or lacks):
                first.setdefault(use.path, use)
        yield from first.values()

    def reads(self) -> list[str]:
        """The keys of the context that are read, or may be."""
        return list(dict.fromkeys(use.key for use in self.uses if use.action == "read" and use.key != ANY))

    def writes(self) -> list[str]:
        """The keys of the context that are written, or may be."""
        return list(dict.fromkeys(use.key for use in self.uses if use.action == "write" and len(use.path) == 1))

    def written(self) -> set[Path]:
        """Every path that is written, or may be."""
        return {use.path for use in self.uses if use.action == "write"}

    def removed(self) -> set[str]:
        """The keys of the context that are certainly gone afterwards."""
        last = {use.key: use for use in self.uses if len(use.path) == 1 and use.action != "read"}
        # What is not sure to be written where it stands may be written later.
        perhaps = {use.key for use in self.uses if use.action == "write" and not use.sure}
        return {key for key, use in last.items() if use.action == "delete" and use.sure} - perhaps


def matches(path: Path, other: Path) -> bool:
    """Whether two paths of the same length may be the same."""
    return len(path) == len(other) and all(ANY in pair or pair[0] == pair[1] for pair in zip(path, other, strict=True))


def leads_to(prefix: Path, path: Path) -> bool:
    """Whether ``path`` lies at or below ``prefix``."""
    return matches(prefix, path[: len(prefix)])


def shown(path: Path) -> str:
    """``model[…]['updater']``."""
    return path[0] + "".join("[…]" if key == ANY else f"['{key}']" for key in path[1:])


def any_leads_to(prefixes: Iterable[Path], path: Path) -> bool:
    """Whether ``path`` lies at or below one of ``prefixes``."""
    return any(leads_to(prefix, path) for prefix in prefixes)
