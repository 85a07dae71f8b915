"""Names of modules, and patterns of names."""

from __future__ import annotations

import pytest

from pipeline.checkpoint.weights import covered, empty, near

NAMES = ["encoder.0.weight", "encoder.0.bias", "encoder.10.weight", "encoders.weight", "head.bias"]


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["encoder"], NAMES[:3]),
        (["encoder.1"], []),
        (["encoder.10"], NAMES[2:3]),
        (["*.bias"], [NAMES[1], NAMES[4]]),
        (["head", "encoder.0"], [*NAMES[:2], NAMES[4]]),
        (["head.bias"], NAMES[4:]),
        (["HEAD"], []),
        (["*"], NAMES),
    ],
)
def test_a_module_covers_what_is_in_it_and_a_pattern_what_it_fits(patterns: list[str], wanted: list[str]) -> None:
    assert covered(patterns, NAMES) == wanted


def test_the_first_that_covers_nothing_is_found() -> None:
    assert empty(["head", "haed", "body"], NAMES) == "haed"
    assert empty(["head"], NAMES) is None


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("haed", "; did you mean 'head'?"),
        ("encoder.1", "; did you mean 'encoder.10'?"),
        ("xyz", "; known: encoder, encoders, head"),
    ],
)
def test_what_may_be_meant_is_at_any_depth_else_all_at_the_top_are_named(pattern: str, remedy: str) -> None:
    assert near(pattern, NAMES) == remedy
