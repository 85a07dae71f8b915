"""What a picture of a runner shows: five boxes, and the keys that go from one to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.checks.data_flow import GIVEN, DataFlow, StageFlow
from pipeline.errors import Fault
from pipeline.inference.flow import Flow, Path, shown

_MORE = "may do more"


@dataclass(frozen=True)
class Edge:
    """A key that goes from the stage that writes it to one that reads it; ``sure``: that one fails without it."""

    key: str
    writer: str
    reader: str
    sure: bool


@dataclass(frozen=True)
class Box:
    """One stage.

    Attributes:
        stage: which of the five.
        kind: whether its class stands in the place of the default; ``unknown`` where it cannot be told.
        place: ``file.py:14``, where its class stands.
        notes: what else there is to say of its keys: ``{"from the trainer": ["config", "device"]}``.
        missing: the keys that it reads and nobody writes.
        faults: what is wrong with its class path and its arguments.
    """

    stage: str
    kind: Literal["default", "custom", "unknown"]
    place: str
    notes: Mapping[str, Sequence[str]]
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

    def position(self, stage: str) -> int:
        """Which box it is, counted from 0."""
        return [box.stage for box in self.boxes].index(stage)


def graphs(flows: Mapping[str, DataFlow], faults: Sequence[Fault]) -> list[Graph]:
    """A graph for each runner.

    Args:
        flows: runner name -> how the keys flow through its stages.
        faults: what a check found; a key is missing if it is among them.
    """
    return [_Tracing(runner, flow, faults).graph() for runner, flow in flows.items()]


class _Tracing:
    """Follows the keys of one runner from stage to stage."""

    def __init__(self, runner: str, flow: DataFlow, faults: Sequence[Fault]) -> None:
        self.runner = runner
        self.stages = flow.stages
        self.plugins = [plugin for plugin in flow.plugins if plugin]
        self.faults = [fault for fault in faults if f"{fault.address}.".startswith(f"runner.{runner}.")]
        wrong = {fault.message for fault in self.faults}
        self.missing = [each for each in flow.missing() if each.message in wrong]

    def graph(self) -> Graph:
        """The whole picture."""
        edges = [edge for stage in self.stages.values() if stage for edge in self.into(stage)]
        boxes = [self.box(name, stage, edges) for name, stage in self.stages.items()]
        return Graph(_printable(self.runner), boxes, edges)

    def into(self, stage: StageFlow) -> Iterator[Edge]:
        """What a stage reads of the stages before it."""
        needed = {use.key for use in stage.flow.demands()}
        for key in stage.flow.reads():
            if not _is_made_first(stage.flow, key):
                for writer in reversed(self.writers(key, stage.stage)):
                    yield Edge(_printable(key), writer, stage.stage, key in needed)

    def writers(self, key: str, reader: str) -> list[str]:
        """The stages from which a reader may have a key, the last first: behind one that always writes it is no other."""
        found = []
        for name in reversed(list(self.stages)[: list(self.stages).index(reader)]):
            flow = stage.flow if (stage := self.stages[name]) else Flow()
            if key in flow.removed():
                break
            if key in flow.writes():
                found.append(name)
            if any(use.path == (key,) and use.action == "write" and use.sure for use in flow.uses):
                break
        return found

    def box(self, name: str, stage: StageFlow | None, edges: Sequence[Edge]) -> Box:
        """A stage, with the keys that no edge shows."""
        address = f"runner.{self.runner}.{name}"
        own = (f"{address}_class_path", f"{address}_args")
        faults = [fault.message for fault in self.faults if fault.address.startswith(own)]
        if stage is None:
            return Box(name, "unknown", "", {_MORE: ["its class cannot be told"]}, faults=faults)
        notes: dict[str, list[str]] = {}
        for label, key in [*self.origins(stage, edges), *self.ends(stage, edges)]:
            notes.setdefault(label, []).append(_printable(key))
        if stage.flow.unknown:
            notes[_MORE] = [f"{_printable(stage.flow.unknown)} cannot be followed"]
        lost = [_printable(shown(path)) for path in self.lost(stage)]
        kind: Literal["default", "custom"] = "custom" if stage.custom else "default"
        return Box(name, kind, _printable(stage.definition.place), notes, lost, faults)

    def lost(self, stage: StageFlow) -> list[Path]:
        """What it reads and nobody writes."""
        return [each.use.path for each in self.missing if each.reader is stage]

    def origins(self, stage: StageFlow, edges: Sequence[Edge]) -> Iterator[tuple[str, str]]:
        """Where else than from another stage it has its keys."""
        drawn = {edge.key for edge in edges if edge.reader == stage.stage}
        written = {key for plugin in self.plugins for key in plugin.writes()}
        lost = self.lost(stage)
        for key in stage.flow.reads():
            if (
                _printable(key) not in drawn
                and (key,) not in lost
                and not _is_made_first(stage.flow, key, surely=False)
            ):
                given = "the trainer" if key in GIVEN else "plugins" if key in written else "nobody known"
                yield f"from {given}", key

    def ends(self, stage: StageFlow, edges: Sequence[Edge]) -> Iterator[tuple[str, str]]:
        """Where else than to another stage its keys go."""
        drawn = {edge.key for edge in edges if edge.writer == stage.stage}
        read = {key for plugin in self.plugins for key in plugin.reads()}
        for key in stage.flow.writes():
            if _printable(key) not in drawn:
                taken = "the trainer" if key in GIVEN else "plugins" if key in read else "nobody known"
                yield f"to {taken}", key


def _is_made_first(flow: Flow, key: str, *, surely: bool = True) -> bool:
    """Whether a stage writes a key itself before it reads it."""
    first = next(use for use in flow.uses if use.key == key)
    return first.action == "write" and first.path == (key,) and (first.sure or not surely)


def _printable(text: str) -> str:
    """Without line breaks and other characters that would spoil a picture."""
    return text if text.isprintable() else repr(text)[1:-1]
