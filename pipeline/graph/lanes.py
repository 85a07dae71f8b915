"""Which lines run beside each other at the side of the boxes, and which may share a lane."""

from __future__ import annotations

from collections.abc import Sequence


def lanes(ways: Sequence[tuple[int, int]]) -> list[int]:
    """The lane of each line, counted from the boxes; a long one runs outside of the shorter ones that it passes.

    Args:
        ways: from which box each line comes and to which it goes; two that just meet at a box don't pass each other.
    """
    found: dict[int, int] = {}
    for index in sorted(range(len(ways)), key=lambda each: (ways[each][1] - ways[each][0], ways[each])):
        first, last = ways[index]
        passed = [lane for other, lane in found.items() if ways[other][0] < last and first < ways[other][1]]
        found[index] = max(passed, default=-1) + 1
    return [found[index] for index in range(len(ways))]
