"""Which edges run beside each other, and which may share a lane."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]


def lanes(spans: Sequence[Span]) -> list[int]:
    """The lane of each span, counted from the boxes: a long span runs outside of the shorter ones that it passes."""
    found: dict[int, int] = {}
    for index in sorted(range(len(spans)), key=lambda each: (spans[each][1] - spans[each][0], spans[each])):
        first, last = spans[index]
        passed = [lane for other, lane in found.items() if spans[other][0] <= last and first <= spans[other][1]]
        found[index] = max(passed, default=-1) + 1
    return [found[index] for index in range(len(spans))]
