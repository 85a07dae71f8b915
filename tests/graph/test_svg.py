"""The graph as SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from rich.cells import cell_len

from pipeline.graph.edges import Graph
from pipeline.graph.svg import svg

Drawn = Callable[..., list[Graph]]
SVG = "{http://www.w3.org/2000/svg}"
RED = "#dc2626"
GRAPHS = [
    "five_stages",
    "custom_startup",
    "movielens_deepfm",
    "crowd",
    "missing",
    "small",
    "unclear",
    "named_at_length",
]
Rectangle = tuple[float, float, float, float]


@pytest.fixture(params=GRAPHS)
def drawing(request: pytest.FixtureRequest, drawn: Drawn) -> Element:
    """The drawing of an example, or of a graph that a fixture makes."""
    name = request.param
    return ElementTree.fromstring(svg(request.getfixturevalue(name) if name in GRAPHS[3:] else drawn(name)))


@pytest.fixture
def named_at_length(missing: list[Graph]) -> list[Graph]:
    """A small graph with a long name."""
    return [replace(missing[0], runner="a_runner_with_a_name_that_is_longer_than_any_of_its_boxes_is_wide")]


def boxes(drawing: Element) -> list[tuple[str | None, str | None]]:
    """(stage, kind) of each box."""
    return [
        (each.get("data-stage"), each.get("data-kind")) for each in drawing.iter(f"{SVG}g") if each.get("data-stage")
    ]


def texts(drawing: Element) -> list[str]:
    """Everything that is written."""
    return [each.text or "" for each in drawing.iter(f"{SVG}text")]


def rectangles(drawing: Element) -> Iterator[tuple[str, Rectangle]]:
    """Text -> (left, top, right, bottom) of each, by the size of its letters."""
    for group in drawing.findall(f"{SVG}g"):
        across, down = map(float, re.findall(r"[\d.]+", group.get("transform", "")))
        for each in group.iter(f"{SVG}text"):
            size, x, y = (float(each.get(name, "")) for name in ("font-size", "x", "y"))
            width = cell_len(each.text or "") * size * 0.602
            left = across + x - width * {"start": 0, "middle": 0.5, "end": 1}[each.get("text-anchor", "")]
            yield each.text or "", (left, down + y - 0.8 * size, left + width, down + y + 0.2 * size)


def overlap(one: Rectangle, other: Rectangle) -> bool:
    """Whether two rectangles have a point in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_no_two_texts_overlap(drawing: Element) -> None:
    found = list(rectangles(drawing))
    assert len(found) > 8
    assert [(one[0], other[0]) for one, other in combinations(found, 2) if overlap(one[1], other[1])] == []


def test_every_text_lies_on_the_sheet(drawing: Element) -> None:
    width, height = float(drawing.get("width", "")), float(drawing.get("height", ""))
    lefts, tops, rights, bottoms = zip(*(each for _, each in rectangles(drawing)), strict=True)
    assert (min(lefts) >= 32, min(tops) >= 32) == (True, True)
    assert (max(rights) <= width - 32, max(bottoms) <= height - 20) == (True, True)


def test_the_legend_stands_below_the_boxes(small: list[Graph]) -> None:
    drawing = ElementTree.fromstring(svg(small))
    signs = ["certainly read", "perhaps read", "nobody writes it"]
    assert texts(drawing)[-3:] == signs
    terminal = next(top for text, (_, top, _, _) in rectangles(drawing) if text == "terminal")
    assert {top > terminal + 40 for text, (_, top, _, _) in rectangles(drawing) if text in signs} == {True}


def test_it_needs_nothing_but_itself(drawing: Element) -> None:
    tags = {each.tag.removeprefix(SVG) for each in drawing.iter()}
    assert tags <= {"svg", "rect", "defs", "marker", "path", "g", "text", "circle", "title"}
    links = [value for each in drawing.iter() for value in each.attrib.values() if "url(" in value or "//" in value]
    assert set(links) <= {"url(#arrow)", "url(#arrow-lost)"}


def test_it_has_a_white_sheet_with_round_corners(drawing: Element) -> None:
    sheet = drawing[0]
    assert (sheet.tag, sheet.get("fill"), sheet.get("rx")) == (f"{SVG}rect", "#ffffff", "14")


def test_a_box_for_each_stage_says_which_are_custom(drawn: Drawn) -> None:
    drawing = ElementTree.fromstring(svg(drawn("custom_startup")))
    assert boxes(drawing) == [
        ("instance", "custom"),
        ("network", "default"),
        ("startup", "custom"),
        ("runner", "default"),
        ("terminal", "default"),
    ]
    assert {"custom pretrain.py:12", "custom startup.py:10", "default"} <= set(texts(drawing))


def test_the_keys_are_written_at_their_lines(drawn: Drawn) -> None:
    found = texts(ElementTree.fromstring(svg(drawn("five_stages"))))
    assert sorted(each for each in found if each in {"model", "points", "optimizer", "loss"}) == [
        *["loss", "model", "model", "model"],
        *["optimizer", "points"],
    ]


def test_what_is_perhaps_read_is_dashed(drawn: Drawn) -> None:
    drawing = ElementTree.fromstring(svg(drawn("custom_startup")))
    lines = [each for each in drawing.iter(f"{SVG}path") if each.get("marker-end")]
    assert [each.get("stroke-dasharray") for each in lines] == [None, "5 4", None]
    assert texts(drawing)[-2:] == ["certainly read", "perhaps read"]


def test_a_missing_key_is_red_and_so_is_the_box_at_fault(missing: list[Graph]) -> None:
    drawing = ElementTree.fromstring(svg(missing))
    (line,) = (each for each in drawing.iter(f"{SVG}path") if each.get("marker-end") == "url(#arrow-lost)")
    assert line.get("stroke") == RED
    assert [each.get("fill") for each in drawing.iter(f"{SVG}text") if each.text == "optimizer"] == [RED]
    assert dict(boxes(drawing))["runner"] == "fault"
    (title,) = drawing.iter(f"{SVG}title")
    assert (title.text or "").startswith("runner (stages.py:13) reads context['optimizer']; no earlier stage writes it")


def test_nothing_is_red_without_a_fault(drawn: Drawn) -> None:
    drawing = ElementTree.fromstring(svg(drawn("five_stages")))
    assert [each for each in drawing.iter() if each.get("stroke") == RED] == []


def test_names_are_escaped(crowd: list[Graph]) -> None:
    drawing = svg(crowd)
    assert '&lt;x&gt;"y"</text>' in drawing
    assert "a&amp;b</text>" in drawing
    assert {"a&b", '<x>"y"', "größe数据", "no\\nsuch"} <= set(texts(ElementTree.fromstring(drawing)))


def test_what_cannot_be_told_is_in_question(unclear: list[Graph]) -> None:
    drawing = ElementTree.fromstring(svg(unclear))
    found = texts(drawing)
    assert dict(boxes(drawing)) | {"instance": "custom", "startup": "unknown"} == dict(boxes(drawing))
    assert "?" in found
    assert {"its class cannot be told", "stages.py:4 cannot be followed"} <= set(found)


def test_two_runners_stand_below_each_other(drawn: Drawn) -> None:
    drawing = ElementTree.fromstring(svg(drawn("movielens_deepfm")))
    heights = {text: top for text, (_, top, _, _) in rectangles(drawing) if text.endswith("_runner")}
    assert heights["train_runner"] < heights["infer_runner"]
    assert len(boxes(drawing)) == 10
