"""Charts of curves, drawn by Bokeh: what is shown of each, and how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, DataRange1d, HoverTool, TabPanel, Tabs
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure
from bokeh.resources import Resources

from .run_data import Curve

# A curve with more points than this is thinned, to the ends and extremes in each of so many columns of pixels.
MOST, _COLUMNS = 2000, 500
# Up to so many points, each has a mark.
_MARKED = 40
# So many curves are told of at once where the mouse is, and so many names fit into a legend.
_AT_ONCE, _NAMED = 6, 12
# Characters of a name there.
_LONGEST = 36
# Can be told from each other, and from a white and from a black page.
COLORS = ("#2f7fd6", "#e8743b", "#1a9c6c", "#9a6ae0", "#d64550", "#0f9fb5", "#b08400", "#d857a8", "#6b8e23", "#7d8794")
# What Bokeh has no variable for takes its colors from the page like this.
_TABS = """
:host { --color: inherit; --background-color: transparent; --hover-color: transparent; }
:host { --divider-color: var(--line); --border-color: var(--line); }
"""
_LEGEND = """
:host { background: transparent !important; border: 0 !important; }
.bk-label { color: var(--text) !important; overflow-wrap: anywhere; }
.bk-grid { display: flex !important; flex-wrap: wrap; max-width: min(100vw - 95px, 420px); }
"""


@dataclass(frozen=True)
class Line:
    """A curve in a chart.

    Attributes:
        label: what it belongs to in the legend.
        name: what the mouse is told of it.
        color, dash: how it looks.
    """

    curve: Curve
    label: str
    name: str
    color: str
    dash: str = "solid"


def color(index: int) -> str:
    """A color; of many some are alike."""
    return COLORS[index % len(COLORS)]


def shorten(label: str) -> str:
    """A label that fits into a legend on a narrow page."""
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def thin(x: Sequence[int], y: Sequence[float | None]) -> list[int]:
    """The points of a curve that are shown, by their places: all, or of each column of pixels the four that count.

    These are the first and the last, the smallest and the largest; and the first that is no number, so no gap is lost either.
    """
    if len(x) <= MOST:
        return [*range(len(x))]
    low = min(x)
    width = max(x) - low + 1
    # Column -> first, last, smallest, largest, gap.
    columns: dict[int, list[int | None]] = {}
    for place, (at, number) in enumerate(zip(x, y, strict=True)):
        kept = columns.setdefault((at - low) * _COLUMNS // width, [place, place, None, None, None])
        kept[1] = place
        if number is None:
            kept[4] = place if kept[4] is None else kept[4]
            continue
        smallest, largest = kept[2], kept[3]
        if smallest is None or number < (y[smallest] or 0):
            kept[2] = place
        if largest is None or number > (y[largest] or 0):
            kept[3] = place
    return sorted({place for kept in columns.values() for place in kept if place is not None})


def library() -> str:
    """The JavaScript of Bokeh, to be put into a page."""
    return "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)


def chart(lines: Sequence[Line], target: str) -> Any:
    """A chart as JSON, for the element of a page with that id; twice, with a linear and with a logarithmic scale.

    Args:
        lines: the curves, the first is drawn first.
        target: the id.
    """
    sources = [_sources(line.curve) for line in lines]
    linear = _figure(lines, sources, "linear")
    logarithmic = _figure(lines, sources, "log", x_range=linear.x_range)
    tabs = [TabPanel(child=linear, title="linear"), TabPanel(child=logarithmic, title="log")]
    return json_item(Tabs(tabs=tabs, sizing_mode="stretch_width", stylesheets=[_TABS]), ID(target))


def _sources(curve: Curve) -> tuple[ColumnDataSource, ColumnDataSource]:
    """The points of a curve, and those that need a mark: a line shows none that stands alone between gaps."""
    places = thin(curve.x, curve.y)
    x, y = [curve.x[place] for place in places], [curve.y[place] for place in places]
    ends = [None, *y, None]
    alone = [ends[index] is None and ends[index + 2] is None for index in range(len(y))]
    marked = [index for index in range(len(y)) if alone[index] or len(y) <= _MARKED]
    line: dict[str, list[float]] = {"x": [*x], "y": [float("nan") if number is None else number for number in y]}
    return ColumnDataSource(line), ColumnDataSource({name: [line[name][at] for at in marked] for name in line})


def _figure(
    lines: Sequence[Line],
    sources: Sequence[tuple[ColumnDataSource, ColumnDataSource]],
    scale: Literal["linear", "log"],
    **options: Any,
) -> figure:
    # Of numbers that are all the same.
    span = max((abs(y) for line in lines for y in line.curve.y if y), default=1.0)
    plot = figure(
        height=280,
        sizing_mode="stretch_width",
        y_axis_type=scale,
        y_range=DataRange1d(default_span=span),
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_drag="box_zoom",
        active_scroll=None,
        x_axis_label="iteration",
        **options,
    )
    shown: list[Any] = []
    by_label: dict[str, list[Any]] = {}
    for line, (points, marks) in zip(lines, sources, strict=True):
        drawn = plot.line("x", "y", source=points, name=line.name, color=line.color, line_dash=line.dash, line_width=2)
        marked = plot.scatter("x", "y", source=marks, color=line.color, size=6)
        shown.append(drawn)
        by_label.setdefault(line.label, []).extend((drawn, marked))
    plot.toolbar.logo, plot.toolbar.autohide = None, True
    plot.add_tools(
        HoverTool(
            renderers=shown,
            tooltips=[("", "$name"), ("iteration", "@x"), ("value", "@y{%.6g}")],
            formatters={"@y": "printf"},
            mode="vline" if len(lines) <= _AT_ONCE else "mouse",
            line_policy="nearest",
        )
    )
    if 1 < len(by_label) <= _NAMED:
        items = [LegendItem(label=shorten(label), renderers=own) for label, own in by_label.items()]
        legend = Legend(items=items, click_policy="hide", orientation="horizontal", ncols="auto", location="left")
        legend.update(margin=0, padding=2, spacing=14, stylesheets=[_LEGEND])
        plot.add_layout(legend, "below")
    return plot
