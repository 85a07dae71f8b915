"""The keys that one stage writes and another reads, as one line with several labels."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.graph.edges import Graph


@dataclass(frozen=True)
class Bundle:
    """The keys that go from one box to another; ``sure``: the reader fails without them.

    Attributes:
        first: the number of the box that writes them.
        last: the number of the box that reads them.
    """

    first: int
    last: int
    sure: bool
    keys: tuple[str, ...]

    @property
    def is_straight(self) -> bool:
        """Whether it goes to the next box."""
        return self.last == self.first + 1


def bundles(graph: Graph) -> list[Bundle]:
    """All edges of a graph, what is certainly read apart from what may be."""
    groups: dict[tuple[int, int, bool], list[str]] = {}
    for edge in graph.edges:
        way = (graph.position(edge.writer), graph.position(edge.reader), edge.sure)
        groups.setdefault(way, []).append(edge.key)
    return [Bundle(*way, tuple(keys)) for way, keys in groups.items()]
