"""Where everything stands in a drawing of a graph, in pixels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.cells import cell_len

from pipeline.graph.bundles import Bundle, bundles
from pipeline.graph.edges import Box, Graph
from pipeline.graph.lanes import lanes

LETTER = 7.25
"""How wide a letter is where the size is 12; widths are counted, since the fonts are those of who looks at it."""
PILL = 20
"""How high the label of a line is."""
LINE = 18
"""From one line of text to the next."""
HEAD = 40
"""From the top of a box to the middle of its first note."""
LABELS = 128
"""How wide the labels of the notes are."""
_STACK, _GAP, _TITLE, _TAIL = 24, 40, 34, 36
"""From one label to the next; between two boxes; above the first; the free part of a missing key's line."""
_NOTE = 40
"""How many letters of a note stand in one line."""


@dataclass(frozen=True)
class Placed:
    """A box; ``lines`` are its notes as they are broken, each with its label or ``""``."""

    box: Box
    lines: Sequence[tuple[str, str]]
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right side."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its lower side."""
        return self.y + self.height

    def ports(self, count: int) -> list[float]:
        """Where lines end at one of its sides, from above."""
        return [self.y + self.height * (index + 1) / (count + 1) for index in range(count)]


@dataclass(frozen=True)
class Pill:
    """The label of a line, and its middle."""

    text: str
    x: float
    y: float

    @property
    def width(self) -> float:
        """How wide it is."""
        return _pill_width(self.text)


@dataclass(frozen=True)
class Wire:
    """A line from corner to corner, with its labels; ``lost``: of a missing key."""

    corners: Sequence[tuple[float, float]]
    pills: Sequence[Pill]
    sure: bool = True
    lost: bool = False


class Layout:
    """One graph, its corner at (0, 0).

    Attributes:
        boxes: the stages.
        wires: the keys between them, and the missing keys.
        idle: where no key goes from a box to the next: (x, top, bottom).
        width: of all.
        height: of all.
    """

    def __init__(self, graph: Graph) -> None:
        found = bundles(graph)
        self._gaps = [[each for each in found if each.is_straight and each.first == i] for i in range(len(graph.boxes))]
        self._around = [each for each in found if not each.is_straight]
        self._lanes = dict(zip(self._around, lanes([(each.first, each.last) for each in self._around]), strict=True))
        self.boxes = list(self._placed(graph.boxes))
        self.height = self.boxes[-1].bottom
        self._middles, right = self._columns()
        self.width = max(right, cell_len(graph.runner) * LETTER * 1.5)
        self._leaves, self._arrives = self._sides()
        self.wires = [*self._lost(), *self._run_straight(), *self._run_around()]
        steps = zip(pairwise(self.boxes), self._gaps, strict=False)
        self.idle = [(each.x + each.width / 2, each.bottom, below.y) for (each, below), gap in steps if not gap]

    def _placed(self, boxes: Sequence[Box]) -> Iterator[Placed]:
        lost = [_pill_width(key) for box in boxes for key in box.missing]
        side = max(lost) + _TAIL + 8 if lost else 0
        width = max([_box_width(box) for box in boxes] + [_row_width(gap) + 2 * _TAIL for gap in self._gaps])
        y = float(_TITLE)
        for index, (box, gap) in enumerate(zip(boxes, self._gaps, strict=True)):
            ports = max(sum(index in (each.first, each.last) for each in self._around), len(box.missing))
            lines = _lines(box)
            height = max(HEAD + LINE * len(lines) + 2, _STACK * (ports + 1))
            yield Placed(box, lines, side, y, width, height)
            y += height + _GAP + _STACK * max((len(each.keys) for each in gap), default=0)

    def _columns(self) -> tuple[list[float], float]:
        """The middle of each lane, and where the last one ends."""
        widths = [
            max(_stack_width(each) for each in self._around if self._lanes[each] == lane)
            for lane in range(len(set(self._lanes.values())))
        ]
        right = self.boxes[0].right
        starts = list(accumulate(widths, lambda x, width: x + width + 14, initial=right + 26))
        middles = [start + width / 2 for start, width in zip(starts, widths, strict=False)]
        return middles, starts[-1] - 14 if widths else right

    def _sides(self) -> tuple[dict[Bundle, float], dict[Bundle, float]]:
        """The heights at which the lines leave and arrive, ordered so that they cross as little as can be."""
        leaves: dict[Bundle, float] = {}
        arrives: dict[Bundle, float] = {}
        for index, placed in enumerate(self.boxes):
            to = sorted((each for each in self._around if each.last == index), key=lambda each: self._lanes[each])
            of = sorted((each for each in self._around if each.first == index), key=lambda each: -self._lanes[each])
            heights = placed.ports(len(to) + len(of))
            arrives.update(zip(to, heights, strict=False))
            leaves.update(zip(of, heights[len(to) :], strict=True))
        return leaves, arrives

    def _lost(self) -> Iterator[Wire]:
        for placed in self.boxes:
            for key, y in zip(placed.box.missing, placed.ports(len(placed.box.missing)), strict=True):
                tail = placed.x - _TAIL - _pill_width(key)
                yield Wire([(tail, y), (placed.x, y)], [Pill(key, tail + 8 + _pill_width(key) / 2, y)], lost=True)

    def _run_straight(self) -> Iterator[Wire]:
        for (above, below), gap in zip(pairwise(self.boxes), self._gaps, strict=False):
            x = above.x + (above.width - _row_width(gap)) / 2
            for bundle in gap:
                middle = x + _stack_width(bundle) / 2
                # A little higher than the middle, for the head of the arrow.
                y = (above.bottom + below.y) / 2 - 3
                yield _wire(bundle, [(middle, above.bottom), (middle, below.y)], middle, y)
                x += _stack_width(bundle) + 20

    def _run_around(self) -> Iterator[Wire]:
        right = self.boxes[0].right
        for each in self._around:
            x, top, bottom = self._middles[self._lanes[each]], self._leaves[each], self._arrives[each]
            yield _wire(each, [(right, top), (x, top), (x, bottom), (right, bottom)], x, self._clear(each))

    def _clear(self, bundle: Bundle) -> float:
        """The middle of the longest part of a line that no line further out crosses."""
        top, bottom = self._leaves[bundle], self._arrives[bundle]
        outer = [each for each in self._around if self._lanes[each] > self._lanes[bundle]]
        crossings = [y for each in outer for y in (self._leaves[each], self._arrives[each]) if top < y < bottom]
        above, below = max(pairwise(sorted([top, *crossings, bottom])), key=lambda part: part[1] - part[0])
        return (above + below) / 2


def _wire(bundle: Bundle, corners: list[tuple[float, float]], x: float, y: float) -> Wire:
    top = y - _STACK * (len(bundle.keys) - 1) / 2
    return Wire(corners, [Pill(key, x, top + _STACK * index) for index, key in enumerate(bundle.keys)], bundle.sure)


def _pill_width(text: str) -> float:
    return cell_len(text) * LETTER + 18


def _stack_width(bundle: Bundle) -> float:
    return max(map(_pill_width, bundle.keys))


def _row_width(gap: Iterable[Bundle]) -> float:
    return sum(_stack_width(bundle) + 20 for bundle in gap) - 20


def _box_width(box: Box) -> float:
    heading = cell_len(box.stage) * LETTER * 1.4 + cell_len(box.caption) * LETTER + 70
    return max([heading] + [LABELS + 36 + cell_len(text) * LETTER for _, text in _lines(box)])


def _lines(box: Box) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for label, keys in box.notes.items():
        parts = textwrap.wrap(", ".join(keys), _NOTE, break_long_words=False, break_on_hyphens=False)
        lines += [(label if index == 0 else "", part) for index, part in enumerate(parts)]
    return lines
