"""Lines that pass each other run in lanes of their own."""

from __future__ import annotations

import pytest

from pipeline.graph.lanes import lanes


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ([], []),
        ([(0, 4)], [0]),
        ([(0, 4), (1, 3)], [1, 0]),  # the longer one outside
        ([(0, 2), (2, 4)], [0, 0]),  # they only meet
        ([(0, 3), (1, 4), (1, 3)], [1, 2, 0]),
        ([(1, 3), (1, 3)], [0, 1]),
        ([(0, 1), (2, 3), (0, 4)], [0, 0, 1]),
    ],
)
def test_a_line_runs_outside_of_the_shorter_ones_that_it_passes(
    ways: list[tuple[int, int]], expected: list[int]
) -> None:
    assert lanes(ways) == expected
