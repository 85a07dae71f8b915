"""What holds other values: a copy of the context, tuples and lists, dicts, something to loop over."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from pipeline.inference.flow import ANY, Path

if TYPE_CHECKING:
    from pipeline.inference.values import Value

now = count().__next__
"""Numbers the moments at which something comes into being."""


@dataclass(eq=False)
class Copy:
    """A copy of the context, in which lies the same; ``complete`` as long as nobody may have changed it."""

    complete: bool = True
    born: int = field(default_factory=now, repr=False)


@dataclass(eq=False)
class Items:
    """A tuple or list, or what goes through some.

    Attributes:
        values: the items in their order.
        complete: as long as nobody may have changed it; after that, all that it holds has escaped.
        views: those that it goes through, once.
        born: when it came into being.
    """

    values: list[Value]
    complete: bool = True
    views: tuple[Items, ...] = ()
    born: int = field(default_factory=now, repr=False)

    @property
    def whole(self) -> bool:
        """Whether it has exactly these items."""
        return self.complete and all(each.whole for each in self.views)


@dataclass(eq=False)
class Entries:
    """A dict that stands in the source.

    Attributes:
        values: its values by key; a key that isn't known is ``*``.
        complete: as long as nobody may have changed it; after that, all that it holds has escaped.
        loose: the keys that may not be there.
        at: where in the context it lies too.
        born: when it came into being.
    """

    values: dict[str, Value]
    complete: bool = True
    loose: set[str] = field(default_factory=set)
    at: set[Path] = field(default_factory=set)
    born: int = field(default_factory=now, repr=False)

    @property
    def whole(self) -> bool:
        """Whether it has exactly these keys."""
        return self.complete and not self.loose and ANY not in self.values


@dataclass(frozen=True)
class Each:
    """Something to loop over whose items are all of one kind; ``some`` where there certainly is one."""

    value: Value
    some: bool = False
