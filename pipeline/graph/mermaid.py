"""The graph as Mermaid, which GitHub and many editors draw where it stands in a Markdown file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from pipeline.graph.edges import Graph, printable

_CLASSES = (
    "classDef default fill:#f8fafc,stroke:#64748b,color:#0f172a",
    "classDef custom fill:#eef2ff,stroke:#4f46e5,stroke-width:2px,color:#0f172a",
    "classDef unknown fill:#fff,stroke:#64748b,stroke-dasharray:4 3,color:#0f172a",
    "classDef fault fill:#fef2f2,stroke:#dc2626,stroke-width:2px,color:#991b1b",
)


def mermaid(graphs: Sequence[Graph]) -> str:
    """The text of a ``.mmd`` file."""
    lines = ["flowchart TD"]
    red: list[int] = []
    links = 0
    for number, graph in enumerate(graphs):
        lines.append(f"  subgraph r{number}[{_quoted(graph.runner)}]")
        lines += [f"    {node}" for node in _nodes(graph, f"r{number}")]
        for link, lost in _links(graph, f"r{number}"):
            lines.append(f"    {link}")
            red += [links] if lost else []
            links += 1
        lines.append("  end")
    lines += [f"  {line}" for line in _CLASSES]
    lines += [f"  linkStyle {','.join(map(str, red))} stroke:#dc2626,color:#dc2626"] if red else []
    return "\n".join(lines) + "\n"


def _nodes(graph: Graph, prefix: str) -> Iterator[str]:
    for box in graph.boxes:
        notes = (
            f"{label}: {_listed(keys)}"
            for group in (box.reads, box.writes, box.doubts)
            for label, keys in group.items()
        )
        text = "<br>".join([f"<b>{box.stage}</b>", _escaped(box.caption), *notes])
        yield f'{prefix}_{box.stage}["{text}"]:::{"fault" if box.faults else box.kind}'
        for number, _ in enumerate(box.missing):
            yield f'{prefix}_{box.stage}_missing{number}(("✗")):::fault'


def _links(graph: Graph, prefix: str) -> Iterator[tuple[str, bool]]:
    """The links, each with whether it is of a missing key; those of ``~~~`` are not seen and keep the stages in order."""
    names = [f"{prefix}_{box.stage}" for box in graph.boxes]
    for edge in graph.edges:
        arrow = "-->" if edge.sure else "-.->"
        yield f'{prefix}_{edge.writer} {arrow}|"{_listed(edge.keys)}"| {prefix}_{edge.reader}', False
    for box in graph.boxes:
        for number, key in enumerate(box.missing):
            yield f"{prefix}_{box.stage}_missing{number} -->|{_quoted(key)}| {prefix}_{box.stage}", True
    for above, below in pairwise(names):
        yield f"{above} ~~~ {below}", False


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(_escaped, keys))


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """With entities, ``#34;``, for what Mermaid or HTML would take for more than a letter."""
    return re.sub(r"[^\w\s.,:…?/-]", lambda match: f"#{ord(match[0])};", printable(text))
