"""The graph as a table: a row for each stage, with the keys that it reads, from whom, and those that it writes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pipeline.graph.edges import Graph, printable

_WIDTH = 40
"""How wide a list of keys may be before it goes on in the next line."""
_RED = "bold red"
_STYLES = {"default": "", "custom": "bold cyan", "unknown": "bold"}


def table(graph: Graph) -> Table:
    """One runner."""
    rows = Table(title=Text(printable(graph.runner)), title_justify="left", title_style="bold", show_lines=True)
    for title in ("stage", "class", "reads", "writes"):
        rows.add_column(title, max_width=_WIDTH, overflow="fold")
    for box in graph.boxes:
        stage = Text(f"{box.stage}\nat fault", _RED) if box.faults else Text(box.stage)
        reads = [
            _line(f"{'' if edge.sure else 'perhaps '}from {edge.writer}", edge.keys)
            for edge in graph.edges
            if edge.reader == box.stage
        ]
        reads += [_line(label, keys) for label, keys in box.reads.items()]
        reads += [_line("from nobody", box.missing, _RED)] if box.missing else []
        reads += [_line(label, keys) for label, keys in box.doubts.items()]
        keys = dict.fromkeys(key for edge in graph.edges if edge.writer == box.stage for key in edge.keys)
        writes = [Text(printable(", ".join(keys)))] if keys else []
        writes += [_line(label, keys) for label, keys in box.writes.items()]
        caption = Text(printable(box.caption), _STYLES[box.kind])
        rows.add_row(stage, caption, Text("\n").join(reads), Text("\n").join(writes))
    return rows


def _line(label: str, keys: Sequence[str], style: str = "") -> Text:
    return Text(printable(f"{label}: {', '.join(keys)}"), style)
