"""Characters in rows and columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import click
from rich.cells import cell_len


class Style(NamedTuple):
    """How a character looks in a terminal."""

    colour: str | None = None
    bold: bool = False


PLAIN = Style()


class Canvas:
    """A sheet that grows to where something is written."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], tuple[str, Style]] = {}

    def put(self, row: int, column: int, text: str, style: Style = PLAIN) -> None:
        """Write from a place to the right; a wide character takes two columns."""
        for char in text:
            self.cells[row, column] = (char, style)
            for extra in range(1, cell_len(char)):
                self.cells[row, column + extra] = ("", style)
            column += cell_len(char)

    def is_free(self, row: int, column: int) -> bool:
        """Whether nothing is written there."""
        return (row, column) not in self.cells

    def lines(self) -> Iterator[str]:
        """The rows, with the codes of a terminal's styles."""
        for row in range(max(row for row, _ in self.cells) + 1):
            last = max((column for line, column in self.cells if line == row), default=-1)
            cells = [self.cells.get((row, column), (" ", PLAIN)) for column in range(last + 1)]
            yield "".join(_styled(style, run) for style, run in groupby(cells, key=lambda cell: cell[1]))


def _styled(style: Style, run: Iterator[tuple[str, Style]]) -> str:
    text = "".join(char for char, _ in run)
    return text if style == PLAIN else click.style(text, fg=style.colour, bold=style.bold or None)
