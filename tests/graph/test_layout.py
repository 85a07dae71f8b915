"""Boxes, lines and labels don't lie upon each other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import pytest

from pipeline.graph.edges import Graph
from pipeline.graph.layout import PILL, Layout, Wire

Drawn = Callable[..., list[Graph]]
Rectangle = tuple[float, float, float, float]


@pytest.fixture(params=["five_stages", "custom_startup", "crowd", "small"])
def layout(request: pytest.FixtureRequest, drawn: Drawn) -> Layout:
    """The layout of an example, or of a graph that a fixture makes."""
    own = request.param in {"crowd", "small"}
    return Layout((request.getfixturevalue(request.param) if own else drawn(request.param))[0])


def labels(wire: Wire) -> list[Rectangle]:
    """(left, top, right, bottom) of each label of a line."""
    return [
        (pill.x - pill.width / 2, pill.y - PILL / 2, pill.x + pill.width / 2, pill.y + PILL / 2) for pill in wire.pills
    ]


def parts(wire: Wire) -> list[Rectangle]:
    """The straight parts of a line, as rectangles without a width."""
    return [(min(x, to_x), min(y, to_y), max(x, to_x), max(y, to_y)) for (x, y), (to_x, to_y) in pairwise(wire.corners)]


def overlap(one: Rectangle, other: Rectangle) -> bool:
    """Whether two rectangles have a point in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_no_label_lies_upon_another(layout: Layout) -> None:
    found = [each for wire in layout.wires for each in labels(wire)]
    assert len(found) >= 3
    assert [pair for pair in combinations(found, 2) if overlap(*pair)] == []


def test_no_label_lies_upon_a_box(layout: Layout) -> None:
    boxes = [(each.x, each.y, each.right, each.bottom) for each in layout.boxes]
    assert [box for box in boxes for wire in layout.wires for each in labels(wire) if overlap(box, each)] == []


def test_no_line_runs_through_the_label_of_another(layout: Layout) -> None:
    crossed = [
        (label, part)
        for wire in layout.wires
        for other in layout.wires
        for label in labels(wire)
        for part in parts(other)
        if other is not wire and overlap(label, part)
    ]
    assert crossed == []


def test_no_two_lines_run_upon_each_other(layout: Layout) -> None:
    upright = [part for wire in layout.wires for part in parts(wire) if part[0] == part[2]]
    level = [part for wire in layout.wires for part in parts(wire) if part[1] == part[3]]
    assert [
        1 for one, other in combinations(upright, 2) if one[0] == other[0] and overlap_along(one[1::2], other[1::2])
    ] == []
    assert [
        1 for one, other in combinations(level, 2) if one[1] == other[1] and overlap_along(one[::2], other[::2])
    ] == []


def test_lines_cross_only_where_they_have_to(drawn: Drawn) -> None:
    wires = Layout(drawn("five_stages")[0]).wires
    crossings = [
        (one.pills[0].text, other.pills[0].text)
        for one in wires
        for other in wires
        for left, y, right, _ in parts(one)
        for x, top, _, bottom in parts(other)
        if left < x < right and top < y < bottom
    ]
    assert crossings == [("model", "points")]


def overlap_along(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two lines on the same axis have a point in common."""
    return one[0] < other[1] and other[0] < one[1]


def test_where_no_key_goes_to_the_next_stage_their_order_is_still_drawn(drawn: Drawn) -> None:
    layout = Layout(drawn("five_stages")[0])
    gaps = [(above.bottom, below.y) for above, below in pairwise(layout.boxes)]
    assert [(top, bottom) for _, top, bottom in layout.idle] == [gaps[0], gaps[2]]
