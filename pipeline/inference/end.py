"""How a block of statements ends."""

from __future__ import annotations

from enum import Enum, auto


class End(Enum):
    """How a block ends: it goes on, leaves the loop or its round, returns, or raises."""

    ON = auto()
    LOOP = auto()
    RETURN = auto()
    RAISE = auto()
