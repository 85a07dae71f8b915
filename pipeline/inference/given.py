"""The arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.inference.values import Value


class Given:
    """The arguments of a call.

    Args:
        values: by position.
        named: by name.
        sure: whether these are all, and in their places.
    """

    def __init__(self, values: Sequence[Value], named: Mapping[str, Value], *, sure: bool = True) -> None:
        self.values = list(values)
        self.named = dict(named)
        self.sure = sure

    def all(self) -> list[Value]:
        """Every argument."""
        return [*self.values, *self.named.values()]
