"""The graph as Mermaid, which GitHub and many editors draw where it stands in a Markdown file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from pipeline.graph.edges import Graph, printable

_CLASSES = (
    "  classDef default fill:#f8fafc,stroke:#64748b,color:#0f172a",
    "  classDef custom fill:#eef2ff,stroke:#4f46e5,stroke-width:2px,color:#0f172a",
    "  classDef unknown fill:#fff,stroke:#64748b,stroke-dasharray:4 3,color:#0f172a",
    "  classDef fault fill:#fef2f2,stroke:#dc2626,stroke-width:2px,color:#991b1b",
)


def mermaid(graphs: Sequence[Graph]) -> str:
    """The text of a ``.mmd`` file."""
    lines = ["flowchart TD"]
    for number, graph in enumerate(graphs):
        lines.append(f'  subgraph r{number}["{_escaped(graph.runner)}"]')
        lines += [f"    {line}" for line in (*_nodes(graph, f"r{number}"), *_links(graph, f"r{number}"))]
        lines.append("  end")
    return "\n".join([*lines, *_CLASSES, ""])


def _nodes(graph: Graph, prefix: str) -> Iterator[str]:
    for box in graph.boxes:
        groups = [*box.reads.items(), *box.writes.items(), *box.doubts.items()]
        notes = [f"{label}: {_listed(keys)}" for label, keys in groups]
        text = "<br>".join([f"<b>{box.stage}</b>", _escaped(box.caption), *notes])
        yield f'{prefix}_{box.stage}["{text}"]:::{"fault" if box.faults else box.kind}'
        for number, _ in enumerate(box.missing):
            yield f'{prefix}_{box.stage}_missing{number}(("✗")):::fault'


def _links(graph: Graph, prefix: str) -> Iterator[str]:
    for edge in graph.edges:
        arrow = "-->" if edge.sure else "-.->"
        yield f'{prefix}_{edge.writer} {arrow}|"{_listed(edge.keys)}"| {prefix}_{edge.reader}'
    for box in graph.boxes:
        for number, key in enumerate(box.missing):
            yield f'{prefix}_{box.stage}_missing{number} -->|"{_escaped(key)}"| {prefix}_{box.stage}'
    for above, below in pairwise(graph.boxes):  # not seen; keeps the stages in order
        yield f"{prefix}_{above.stage} ~~~ {prefix}_{below.stage}"


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(map(_escaped, keys))


def _escaped(text: str) -> str:
    """With entities, ``#34;``, for what Mermaid or HTML would take for more than a letter."""
    return re.sub(r"[^\w\s.,:…?/-]", lambda match: f"#{ord(match[0])};", printable(text))
