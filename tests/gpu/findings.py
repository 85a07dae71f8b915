"""What a row of the table has measured, and what was expected."""

from __future__ import annotations

from typing import Any


class UnavailableError(Exception):
    """A row cannot be measured here; the message says what it needs."""


class Findings:
    """The numbers and facts of a row.

    Attributes:
        measured: what was measured, in words; whatever was not expected has ``(!)`` after it.
        expected: what was expected.
        is_ok: whether all of it was expected.
    """

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.expected: list[str] = []
        self.is_ok = True

    def add(self, name: str, value: Any, expected: str, *, is_ok: bool) -> None:
        """Add a value, with what was expected of it; ``""`` if that was said already."""
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        self.measured.append(f"{name} {text}{'' if is_ok else ' (!)'}")
        if expected and expected not in self.expected:
            self.expected.append(expected)
        self.is_ok = self.is_ok and is_ok

    def note(self, name: str, value: Any) -> None:
        """Add a value of which nothing is expected."""
        self.add(name, value, "", is_ok=True)

    def equals(self, name: str, value: Any, expected: Any) -> None:
        """Add a value that has to be equal to another one."""
        self.add(name, value, f"{name} {expected}", is_ok=bool(value == expected))

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Add a number that has a limit; nan exceeds it."""
        self.add(name, value, f"≤ {limit:g}", is_ok=value <= limit)

    def more_than(self, name: str, value: float, limit: float) -> None:
        """Add a number that has to be more than another one."""
        self.add(name, value, f"{name} > {limit:g}", is_ok=value > limit)
