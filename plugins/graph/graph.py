"""The stages of a runner and the keys that flow between them, as a table or as Mermaid."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from rich.table import Table
from rich.text import Text

from pipeline.check.data_flow import TRAINER_KEYS, DataFlow, MissingKey, StageFlow
from pipeline.errors import Fault
from pipeline.user_code.context_flow import Flow, Use

Keys = dict[str, list[str]]
"""Keys of one stage, by who else has to do with them: ``{"from the trainer": ["config", "device"]}``."""


def printable(text: str) -> str:
    """Without line breaks and other characters that would spoil a picture."""
    return text if text.isprintable() else repr(text)[1:-1]


@dataclass(frozen=True)
class Edge:
    """The keys that go from the stage that writes them to one that reads them; ``sure``: that one fails without them."""

    writer: str
    reader: str
    sure: bool
    keys: Sequence[str]


@dataclass(frozen=True)
class Box:
    """One stage.

    Attributes:
        stage: which of the five.
        kind: whether its class stands in the place of the default; ``unknown`` where it cannot be told.
        place: ``file.py:14``, where its class stands.
        reads: the keys that it has from elsewhere than another stage.
        writes: the keys that no other stage reads.
        doubts: what cannot be told of it.
        missing: the keys that it reads and nobody writes.
        faults: what is wrong with its class path and its arguments, or with its keys.
    """

    stage: str
    kind: Literal["default", "custom", "unknown"]
    place: str = ""
    reads: Keys = field(default_factory=dict)
    writes: Keys = field(default_factory=dict)
    doubts: Keys = field(default_factory=dict)
    missing: Sequence[str] = ()
    faults: Sequence[str] = ()

    @property
    def caption(self) -> str:
        """``custom your_startup.py:8``, ``default`` or ``?``."""
        return {"default": "default", "custom": f"custom {self.place}", "unknown": "?"}[self.kind]


@dataclass(frozen=True)
class Graph:
    """One runner: the boxes in the order of the stages, and the edges in the order of their readers."""

    runner: str
    boxes: Sequence[Box]
    edges: Sequence[Edge]


def graphs(flows: Mapping[str, DataFlow], faults: Sequence[Fault]) -> list[Graph]:
    """A graph for each runner.

    Args:
        flows: runner name -> how the keys flow through its stages.
        faults: what a check found; a key is missing if it is among them.
    """
    return [_graph(runner, flow, faults) for runner, flow in flows.items()]


def _graph(runner: str, flow: DataFlow, faults: Sequence[Fault]) -> Graph:
    edges = [edge for stage in flow.stages.values() if stage for edge in _edges_into(stage, flow)]
    messages = {fault.message for fault in faults if f"{fault.address}.".startswith(f"runner.{runner}.")}
    missing = [each for each in flow.missing() if each.message in messages]
    boxes = []
    for name, stage in flow.stages.items():
        own = (f"runner.{runner}.{name}_class_path", f"runner.{runner}.{name}_args")
        wrong = [fault.message for fault in faults if fault.address.startswith(own)]
        if stage:
            boxes.append(_box(stage, flow, edges, [each for each in missing if each.reader is stage], wrong))
        else:
            boxes.append(Box(name, "unknown", doubts={"may do more": ["its class cannot be told"]}, faults=wrong))
    return Graph(runner, boxes, edges)


def _edges_into(stage: StageFlow, flow: DataFlow) -> Iterator[Edge]:
    """What a stage reads of the stages before it."""
    needed = {use.key for use in stage.flow.demands()}
    groups: dict[tuple[str, bool], list[str]] = {}
    for key in stage.flow.reads():
        if not _writes_first(stage.flow, key):
            for writer in reversed(_writers(key, stage.stage, flow)):
                groups.setdefault((writer, key in needed), []).append(key)
    return (Edge(writer, stage.stage, sure, keys) for (writer, sure), keys in groups.items())


def _writers(key: str, reader: str, flow: DataFlow) -> list[str]:
    """The stages from which a reader may have a key, the last first: behind one that always writes it is no other."""
    writers = []
    for name in reversed(list(flow.stages)[: list(flow.stages).index(reader)]):
        earlier = stage.flow if (stage := flow.stages[name]) else Flow()
        if key in earlier.removed_keys():
            break
        if key in earlier.writes():
            writers.append(name)
        if any(use.key == key and use.action == "write" and use.sure for use in earlier.uses):
            break
    return writers


def _box(
    stage: StageFlow, flow: DataFlow, edges: Sequence[Edge], missing: Sequence[MissingKey], faults: Sequence[str]
) -> Box:
    """A stage, with the keys that no edge shows."""
    plugins = [plugin for plugin in flow.plugins if plugin]
    lost = {each.use.key for each in missing if not each.use.item}
    own = {key for key in stage.flow.reads() if key in lost or _writes_first(stage.flow, key, surely=False)}
    read = [key for edge in edges if edge.reader == stage.stage for key in edge.keys]
    written = [key for edge in edges if edge.writer == stage.stage for key in edge.keys]
    unknown = stage.flow.unknown
    return Box(
        stage.stage,
        "custom" if stage.custom else "default",
        stage.definition.location,
        _by_owner("from", stage.flow.reads(), {*own, *read}, {key for each in plugins for key in each.writes()}),
        _by_owner("to", stage.flow.writes(), written, {key for each in plugins for key in each.reads()}),
        {"may do more": [f"{unknown} cannot be followed"]} if unknown else {},
        [_address(each.use) for each in missing],
        faults,
    )


def _by_owner(word: str, keys: Iterable[str], drawn: Collection[str], of_plugins: Collection[str]) -> Keys:
    """The keys that are not drawn, by who else has to do with them."""
    groups: Keys = {}
    for key in keys:
        if key not in drawn:
            owner = "the trainer" if key in TRAINER_KEYS else "plugins" if key in of_plugins else "nobody known"
            groups.setdefault(f"{word} {owner}", []).append(key)
    return groups


def _writes_first(flow: Flow, key: str, *, surely: bool = True) -> bool:
    """Whether a stage writes a key itself before it reads it."""
    first = next(use for use in flow.uses if use.key == key)
    return first.action == "write" and (first.sure or not surely)


def _address(use: Use) -> str:
    return f"{use.key}['{use.item}']" if use.item else use.key


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
