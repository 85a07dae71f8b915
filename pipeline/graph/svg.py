"""The graph as SVG: one file without fonts or scripts, on a white sheet of its own."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from pipeline.graph.edges import Graph
from pipeline.graph.layout import HEAD, LABELS, LETTER, LINE, PILL, Layout, Placed, Wire

_SANS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_INK, _GREY, _LINE, _RED = "#0f172a", "#64748b", "#475569", "#dc2626"
_LOOKS = {
    "default": {"fill": "#f8fafc", "stroke": "#94a3b8", "stroke-width": "1"},
    "custom": {"fill": "#eef2ff", "stroke": "#4f46e5", "stroke-width": "2"},
    "unknown": {"fill": "#ffffff", "stroke": "#64748b", "stroke-width": "1.5", "stroke-dasharray": "5 4"},
    "fault": {"fill": "#fef2f2", "stroke": _RED, "stroke-width": "2"},
}
_MARGIN, _APART, _BEND = 32, 44, 12


def svg(graphs: Sequence[Graph]) -> str:
    """The text of a ``.svg`` file, the graphs below each other."""
    layouts = [Layout(graph) for graph in graphs]
    signs = _signs(graphs)
    width = max(_signs_width(signs), *(each.width for each in layouts)) + 2 * _MARGIN
    height = sum(each.height + _APART for each in layouts) - _APART + 2 * _MARGIN + (36 if signs else 0)
    root = Element("svg", _text({"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height}))
    root.set("viewBox", f"0 0 {root.get('width')} {root.get('height')}")
    _put(root, "rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=14, fill="#ffffff", stroke="#e2e8f0")
    marks = SubElement(root, "defs")
    for name, colour in (("arrow", _LINE), ("arrow-lost", _RED)):
        _marker(marks, name, colour)
    y = float(_MARGIN)
    for graph, layout in zip(graphs, layouts, strict=True):
        _draw(_put(root, "g", transform=f"translate({_MARGIN} {y:g})"), graph, layout)
        y += layout.height + _APART
    _legend(_put(root, "g", transform=f"translate({_MARGIN} {height - _MARGIN:g})"), signs)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _draw(sheet: Element, graph: Graph, layout: Layout) -> None:
    _write(sheet, graph.runner, 0, 12, size=17, weight=600)
    for x, top, bottom in layout.idle:
        # The order of the stages, where no key goes from one to the next.
        _put(sheet, "path", d=f"M{x:g} {top:g}V{bottom:g}", stroke="#e2e8f0", stroke_width=6)
    for placed in layout.boxes:
        _box(sheet, placed)
    for wire in layout.wires:
        _wire(sheet, wire)
    for wire in layout.wires:
        _pills(sheet, wire)


def _box(sheet: Element, placed: Placed) -> None:
    box = placed.box
    kind = "fault" if box.faults else box.kind
    look = _LOOKS[kind]
    group = _put(sheet, "g", data_stage=box.stage, data_kind=kind)
    if box.faults:
        SubElement(group, "title").text = "\n".join(box.faults)
    _put(group, "rect", x=placed.x, y=placed.y, width=placed.width, height=placed.height, rx=9, **look)
    left, right = placed.x + 18, placed.right - 18
    _write(group, box.stage, left, placed.y + 18, size=15, weight=600, colour=_RED if box.faults else _INK)
    colour = _GREY if kind == "default" else look["stroke"]
    _write(group, box.caption, right, placed.y + 18, mono=True, anchor="end", colour=colour)
    for number, (label, keys) in enumerate(placed.lines):
        y = placed.y + HEAD + LINE * number
        _write(group, label, left, y, colour=_GREY)
        _write(group, keys, left + LABELS, y, mono=True)


def _wire(sheet: Element, wire: Wire) -> None:
    name, colour = ("arrow-lost", _RED) if wire.lost else ("arrow", _LINE)
    data = {"stroke": colour, "stroke_width": 1.6, "fill": "none", "marker_end": f"url(#{name})"}
    _put(sheet, "path", d=_path(wire.corners), **data, **_dashes(wire.sure))
    if wire.lost:
        x, y = wire.corners[0]
        _put(sheet, "circle", cx=x, cy=y, r=4, fill="#ffffff", stroke=_RED, stroke_width=1.6)


def _path(corners: Sequence[tuple[float, float]]) -> str:
    """From corner to corner; round where it turns."""
    if len(corners) == 2:
        (x, y), (to_x, to_y) = corners
        # It ends where the arrow's head begins.
        return f"M{x:g} {y:g}L{to_x - 5 * (to_x > x):g} {to_y - 5 * (to_y > y):g}"
    (x, y), (lane, _), (_, below), _ = corners
    turns = f"Q{lane:g} {y:g} {lane:g} {y + _BEND:g}V{below - _BEND:g}Q{lane:g} {below:g} {lane - _BEND:g} {below:g}"
    return f"M{x:g} {y:g}H{lane - _BEND:g}{turns}H{x + 5:g}"


def _pills(sheet: Element, wire: Wire) -> None:
    colour, ink = (_RED, _RED) if wire.lost else (_LINE, _INK)
    for pill in wire.pills:
        place = {"x": pill.x - pill.width / 2, "y": pill.y - PILL / 2, "width": pill.width, "height": PILL}
        _put(sheet, "rect", **place, rx=PILL / 2, fill="#ffffff", stroke=colour, **_dashes(wire.sure))
        _write(sheet, pill.text, pill.x, pill.y, mono=True, anchor="middle", colour=ink)


def _dashes(sure: bool) -> dict[str, str]:
    return {} if sure else {"stroke_dasharray": "5 4"}


def _signs(graphs: Sequence[Graph]) -> list[tuple[str, str, bool]]:
    """What the lines mean, each with its colour and whether it is solid; nothing where that is plain."""
    perhaps = any(not edge.sure for graph in graphs for edge in graph.edges)
    lost = any(box.missing for graph in graphs for box in graph.boxes)
    signs = [("certainly read", _LINE, True)] if perhaps else []
    signs += [("perhaps read", _LINE, False)] if perhaps else []
    return signs + ([("nobody writes it", _RED, True)] if lost else [])


def _signs_width(signs: Sequence[tuple[str, str, bool]]) -> float:
    return sum(48 + len(text) * LETTER for text, _, _ in signs)


def _legend(sheet: Element, signs: Sequence[tuple[str, str, bool]]) -> None:
    x = 0.0
    for text, colour, sure in signs:
        _put(sheet, "path", d=f"M{x:g} 0h26", stroke=colour, stroke_width=1.6, **_dashes(sure))
        _write(sheet, text, x + 34, 0, colour=_GREY)
        x += _signs_width([(text, colour, sure)])


def _marker(marks: Element, name: str, colour: str) -> None:
    size = {"viewBox": "0 0 10 10", "refX": 5, "refY": 5, "markerWidth": 10, "markerHeight": 10}
    marker = _put(marks, "marker", id=name, orient="auto", markerUnits="userSpaceOnUse", **size)
    _put(marker, "path", d="M0 0L10 5L0 10Z", fill=colour)


def _write(
    sheet: Element,
    text: str,
    x: float,
    y: float,
    *,
    size: float = 12,
    weight: int = 400,
    anchor: str = "start",
    colour: str = _INK,
    mono: bool = False,
) -> None:
    """A line of text, ``y`` its middle."""
    if text:
        font = {"font_family": _MONO if mono else _SANS, "font_size": size, "font_weight": weight}
        _put(sheet, "text", x=x, y=y + size * 0.35, text_anchor=anchor, fill=colour, **font).text = text


def _put(parent: Element, tag: str, **attributes: object) -> Element:
    """A new element; ``_`` in a name stands for ``-``."""
    return SubElement(parent, tag, _text({name.replace("_", "-"): value for name, value in attributes.items()}))


def _text(attributes: dict[str, object]) -> dict[str, str]:
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
