"""Where everything stands in a drawing of a graph, in pixels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from rich.cells import cell_len

from pipeline.graph.edges import Box, Graph
from pipeline.graph.lanes import lanes

LETTER = 7.25
"""How wide a letter is where the size is 12; all widths are counted, since who draws the file has the font."""
PILL = 20
"""How high the label of an edge is."""
LINE = 18
"""From one line of text to the next."""
HEAD = 40
"""From the top of a box to the middle of its first note."""
LABELS = 128
"""How wide the labels of the notes are."""
_STACK, _GAP, _NOTE, _TITLE = 24, 40, 40, 34


@dataclass
class Placed:
    """A box; ``lines`` are its notes as they are broken, each with its label or ``""``."""

    box: Box
    lines: list[tuple[str, str]]
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0


@dataclass(frozen=True)
class Pill:
    """The label of an edge, and its middle."""

    text: str
    x: float
    y: float

    @property
    def width(self) -> float:
        """How wide it is, counted."""
        return pill_width(self.text)


@dataclass(frozen=True)
class Wire:
    """A line with its labels, from corner to corner; ``lost``: of a missing key."""

    corners: list[tuple[float, float]]
    pills: list[Pill]
    sure: bool = True
    lost: bool = False


@dataclass
class _Bundle:
    """The keys that go from one stage to another, and how they run."""

    first: int
    last: int
    sure: bool
    keys: list[str]
    lane: int = 0
    leaves: float = 0
    arrives: float = 0
    x: float = 0


def pill_width(text: str) -> float:
    """How wide a label is."""
    return cell_len(text) * LETTER + 18


class Layout:
    """One graph, its corner at (0, 0).

    Attributes:
        boxes: the stages.
        wires: the edges, and the missing keys.
        idle: where no key goes from a box to the next: (x, top, bottom).
        width: of all.
        height: of all.
    """

    def __init__(self, graph: Graph) -> None:
        bundles = _bundles(graph)
        self._straight = [each for each in bundles if each.last == each.first + 1]
        self._around = [each for each in bundles if each.last > each.first + 1]
        # Within a box what arrives stands above what leaves.
        spans = [(2 * each.first + 1, 2 * each.last) for each in self._around]
        for bundle, lane in zip(self._around, lanes(spans), strict=True):
            bundle.lane = lane
        self.boxes = [Placed(box, _lines(box)) for box in graph.boxes]
        self._place_boxes()
        self._place_lanes()
        self.idle = [
            (above.x + above.width / 2, above.y + above.height, below.y)
            for (above, below), gap in zip(pairwise(self.boxes), self._gaps(), strict=True)
            if not gap
        ]
        self.wires = [*self._lost(), *self._run_straight(), *self._run_around()]

    def _place_boxes(self) -> None:
        names = [pill_width(key) for placed in self.boxes for key in placed.box.missing]
        side = max(names) + 44 if names else 0
        width = max(
            [_width(placed) for placed in self.boxes] + [sum(map(_stack_width, row)) + 60 for row in self._gaps()]
        )
        y = float(_TITLE)
        for index, (placed, gap) in enumerate(zip(self.boxes, [*self._gaps(), []], strict=True)):
            ports = [sum(index in (each.first, each.last) for each in self._around), len(placed.box.missing)]
            placed.x, placed.y, placed.width = side, y, width
            placed.height = max(HEAD + LINE * len(placed.lines) + 2, _STACK * (max(ports) + 1))
            y += placed.height + _GAP + _STACK * max((len(each.keys) for each in gap), default=0)
        self.height = self.boxes[-1].y + self.boxes[-1].height

    def _gaps(self) -> list[list[_Bundle]]:
        """What runs straight down between two boxes."""
        return [[each for each in self._straight if each.first == index] for index in range(len(self.boxes) - 1)]

    def _place_lanes(self) -> None:
        widths = [
            max(_stack_width(each) for each in self._around if each.lane == lane)
            for lane in range(1 + max((each.lane for each in self._around), default=-1))
        ]
        side = self.boxes[0].x + self.boxes[0].width
        edges = list(accumulate(widths, lambda x, width: x + width + 14, initial=side + 26))
        for bundle in self._around:
            bundle.x = edges[bundle.lane] + widths[bundle.lane] / 2
        self.width = edges[-1] - 14 if widths else side
        for index, placed in enumerate(self.boxes):
            arriving = sorted((each for each in self._around if each.last == index), key=lambda each: each.lane)
            leaving = sorted((each for each in self._around if each.first == index), key=lambda each: -each.lane)
            for bundle, y in zip([*arriving, *leaving], _spread(placed, len(arriving) + len(leaving)), strict=True):
                if bundle in arriving:
                    bundle.arrives = y
                else:
                    bundle.leaves = y

    def _lost(self) -> Iterator[Wire]:
        for placed in self.boxes:
            for key, y in zip(placed.box.missing, _spread(placed, len(placed.box.missing)), strict=True):
                tail = placed.x - 36 - pill_width(key)
                yield Wire([(tail, y), (placed.x, y)], [Pill(key, tail + 8 + pill_width(key) / 2, y)], lost=True)

    def _run_straight(self) -> Iterator[Wire]:
        for (above, below), bundles in zip(pairwise(self.boxes), self._gaps(), strict=True):
            x = above.x + above.width / 2 - (sum(map(_stack_width, bundles)) + 20 * (len(bundles) - 1)) / 2
            top, bottom = above.y + above.height, below.y
            for bundle in bundles:
                middle = x + _stack_width(bundle) / 2
                # A little higher than the middle: below is the head of the arrow.
                yield _wire(bundle, [(middle, top), (middle, bottom)], middle, (top + bottom) / 2 - 3)
                x += _stack_width(bundle) + 20

    def _run_around(self) -> Iterator[Wire]:
        side = self.boxes[0].x + self.boxes[0].width
        for each in self._around:
            corners = [(side, each.leaves), (each.x, each.leaves), (each.x, each.arrives), (side, each.arrives)]
            yield _wire(each, corners, each.x, self._clear(each))

    def _clear(self, bundle: _Bundle) -> float:
        """The middle of the longest part of a lane that no other line crosses."""
        others = [each for each in self._around if each.lane > bundle.lane]
        crossings = [y for each in others for y in (each.leaves, each.arrives) if bundle.leaves < y < bundle.arrives]
        parts = pairwise(sorted([bundle.leaves, *crossings, bundle.arrives]))
        above, below = max(parts, key=lambda part: part[1] - part[0])
        return (above + below) / 2


def _bundles(graph: Graph) -> list[_Bundle]:
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for edge in graph.edges:
        groups.setdefault((edge.writer, edge.reader, edge.sure), []).append(edge.key)
    return [
        _Bundle(graph.position(writer), graph.position(reader), sure, keys)
        for (writer, reader, sure), keys in groups.items()
    ]


def _wire(bundle: _Bundle, corners: list[tuple[float, float]], x: float, y: float) -> Wire:
    top = y - _STACK * (len(bundle.keys) - 1) / 2
    return Wire(corners, [Pill(key, x, top + _STACK * index) for index, key in enumerate(bundle.keys)], bundle.sure)


def _stack_width(bundle: _Bundle) -> float:
    return max(map(pill_width, bundle.keys))


def _spread(placed: Placed, count: int) -> Sequence[float]:
    return [placed.y + placed.height * (index + 1) / (count + 1) for index in range(count)]


def _lines(box: Box) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for label, keys in box.notes.items():
        parts = textwrap.wrap(", ".join(keys), _NOTE, break_long_words=False, break_on_hyphens=False)
        lines += [(label if index == 0 else "", part) for index, part in enumerate(parts)]
    return lines


def _width(placed: Placed) -> float:
    heading = cell_len(placed.box.stage) * LETTER * 1.4 + cell_len(placed.box.kind) * LETTER + 70
    return max([heading] + [LABELS + 36 + cell_len(text) * LETTER for _, text in placed.lines])
