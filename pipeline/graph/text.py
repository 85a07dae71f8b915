"""The graph as text: a box for each stage, and at their right the keys from one to another."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich.cells import cell_len

from pipeline.graph.canvas import PLAIN, Canvas, Style
from pipeline.graph.edges import Box, Graph
from pipeline.graph.lanes import lanes

_NOTE = 44
"""How wide a note may be before it goes on in the next line."""
_LANE = 4
"""Columns from the side of the boxes to the first lane."""
_LINES = {"default": tuple("╭─╮│├╰╯"), "custom": tuple("┏━┓┃┠┗┛"), "unknown": tuple("┌╌┐┆├└┘")}
_BOLD, _CYAN, _RED = Style(bold=True), Style("cyan", bold=True), Style("red", bold=True)


@dataclass
class _Net:
    """A key of one writer, and those who read it.

    Attributes:
        lane: the lane in which it runs.
        start: the row in which it leaves its writer.
        ends: the rows in which it arrives, each with whether that reader fails without the key.
    """

    key: str
    writer: str
    readers: dict[str, bool]
    lane: int = 0
    start: int = 0
    ends: list[tuple[int, bool]] = field(default_factory=list)


def text(graphs: Sequence[Graph]) -> str:
    """All graphs, below each other, with the codes of a terminal's colours."""
    return "\n".join("".join(f"{line}\n" for line in _Drawing(graph).lines()) for graph in graphs)


class _Drawing:
    """One graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.canvas = Canvas()
        self.nets = _nets(graph)
        self.side = max(map(self.width, graph.boxes)) - 1

    def lines(self) -> Iterator[str]:
        """Draw it; each line is as long as it has to be."""
        self.canvas.put(0, 0, self.graph.runner, _BOLD)
        row = 1
        for box in self.graph.boxes:
            row = self.box(box, row)
        for net in self.nets:
            self.lane(net)
        for net in self.nets:
            self.branches(net)
        yield from self.canvas.lines()
        yield from self.legend()

    def ports(self, box: Box) -> list[tuple[str, _Net | None]]:
        """The keys at the side of a box, ordered so that the lines cross as little as can be."""
        read = sorted((net for net in self.nets if box.stage in net.readers), key=lambda net: net.lane)
        written = sorted((net for net in self.nets if box.stage == net.writer), key=lambda net: -net.lane)
        return [*((key, None) for key in box.missing), *((net.key, net) for net in [*read, *written])]

    def width(self, box: Box) -> int:
        """How wide a box has to be."""
        rows = zip_longest(_notes(box), (key for key, _ in self.ports(box)), fillvalue="")
        body = [cell_len(note) + cell_len(key) + (6 if note and key else 4) for note, key in rows]
        return max([cell_len(_heading(box)) + cell_len(box.caption) + 9, *body])

    def box(self, box: Box, top: int) -> int:
        """Draw a box and the keys in it; the row below it."""
        style, side, caption = _style(box), self.side, f" {box.caption} "
        left, line, right, upright, _, low_left, low_right = _LINES[box.kind]
        self.canvas.put(top, 0, f"{left}{line * (side - 1)}{right}", style)
        self.canvas.put(top, 2, f" {_heading(box)} ", style)
        self.canvas.put(top, side - 1 - cell_len(caption), caption, style)
        row = top + 1
        for note, port in zip_longest(_notes(box), self.ports(box)):
            self.canvas.put(row, 0, upright, style)
            self.canvas.put(row, 2, note or "")
            self.canvas.put(row, side, upright, style)
            if port:
                self.port(box, row, *port)
            row += 1
        self.canvas.put(row, 0, f"{low_left}{line * (side - 1)}{low_right}", style)
        return row + 1

    def port(self, box: Box, row: int, key: str, net: _Net | None) -> None:
        """Draw a key at the side of its box, and note where its line begins or ends."""
        column = self.side - 1 - cell_len(key)
        if net is None:
            self.canvas.put(row, column, f"{key} ◄─✗", _RED)
            return
        self.canvas.put(row, column, key, _BOLD)
        if net.writer == box.stage:
            self.canvas.put(row, self.side, _LINES[box.kind][4], _style(box))
            net.start = row
        else:
            self.canvas.put(row, self.side, "◄")
            net.ends.append((row, net.readers[box.stage]))

    def lane(self, net: _Net) -> None:
        """Draw what runs downwards."""
        for row in range(net.start + 1, net.ends[-1][0]):
            self.canvas.put(row, self.column(net), "│")

    def branches(self, net: _Net) -> None:
        """Draw what runs to and from the boxes; behind the lanes that it crosses."""
        last, _ = net.ends[-1]
        for row, sure in [(net.start, True), *net.ends]:
            for column in range(self.side + 1, self.column(net)):
                if self.canvas.is_free(row, column):
                    self.canvas.put(row, column, "─" if sure else "╌")
            self.canvas.put(row, self.column(net), "╮" if row == net.start else "╯" if row == last else "┤")

    def column(self, net: _Net) -> int:
        """Where its lane is."""
        return self.side + _LANE + 2 * net.lane

    def legend(self) -> Iterator[str]:
        """What the signs mean that are not plain."""
        signs = ["╌ perhaps read"] if any(not edge.sure for edge in self.graph.edges) else []
        signs += ["✗ nobody writes it"] if any(box.missing for box in self.graph.boxes) else []
        signs += ["! at fault"] if any(box.faults for box in self.graph.boxes) else []
        if signs:
            yield "  ".join(signs)


def _nets(graph: Graph) -> list[_Net]:
    """The edges of each key of each writer as one, each in its lane."""
    nets: dict[tuple[str, str], _Net] = {}
    for edge in graph.edges:
        nets.setdefault((edge.writer, edge.key), _Net(edge.key, edge.writer, {})).readers[edge.reader] = edge.sure
    found = list(nets.values())
    ways = [(graph.position(net.writer), max(map(graph.position, net.readers))) for net in found]
    for net, lane in zip(found, lanes(ways), strict=True):
        net.lane = lane
    return found


def _style(box: Box) -> Style:
    return _RED if box.faults else _CYAN if box.kind == "custom" else PLAIN


def _heading(box: Box) -> str:
    return f"! {box.stage}" if box.faults else box.stage


def _notes(box: Box) -> list[str]:
    lines: list[str] = []
    for label, keys in box.notes.items():
        lines += textwrap.wrap(f"{label}: {', '.join(keys)}", _NOTE, subsequent_indent="  ", break_long_words=False)
    return lines
