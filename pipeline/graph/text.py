"""The graph as a table: a row for each stage, with the keys that it reads, from whom, and those that it writes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from pipeline.graph.edges import Box, Graph, Keys

_WIDTH = 40
"""How wide a list of keys may be before it goes on in the next line."""
_STYLES = {"default": "", "custom": "bold cyan", "unknown": "bold"}


def table(graph: Graph) -> Table:
    """One runner."""
    rows = Table(title=graph.runner, title_justify="left", title_style="bold", show_lines=True)
    for title in ("stage", "class", "reads", "writes"):
        rows.add_column(title, max_width=_WIDTH, overflow="fold")
    for box in graph.boxes:
        stage = Text(f"{box.stage}\nat fault", "bold red") if box.faults else Text(box.stage)
        reads = Text("\n").join(_reads(box, graph))
        rows.add_row(stage, Text(box.caption, _STYLES[box.kind]), reads, Text("\n".join(_writes(box, graph))))
    return rows


def _reads(box: Box, graph: Graph) -> Iterator[Text]:
    for edge in graph.edges:
        if edge.reader == box.stage:
            yield Text(f"{'' if edge.sure else 'perhaps '}from {edge.writer}: {', '.join(edge.keys)}")
    yield from map(Text, _lines(box.reads))
    if box.missing:
        yield Text(f"from nobody: {', '.join(box.missing)}", "bold red")
    yield from map(Text, _lines(box.doubts))


def _writes(box: Box, graph: Graph) -> Iterator[str]:
    keys = dict.fromkeys(key for edge in graph.edges if edge.writer == box.stage for key in edge.keys)
    if keys:
        yield ", ".join(keys)
    yield from _lines(box.writes)


def _lines(keys: Keys) -> Iterator[str]:
    return (f"{label}: {', '.join(names)}" for label, names in keys.items())
