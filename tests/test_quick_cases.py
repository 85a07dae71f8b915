"""Which cases of a function are quick: the mark ``quick_cases`` of ``tests/conftest.py``."""

from __future__ import annotations

import pytest

from tests.conftest import evenly


@pytest.mark.parametrize(
    ("number", "chosen"), [(1, "a"), (2, "ae"), (3, "ace"), (4, "abde"), (5, "abcde"), (9, "aabbccdde")]
)
def test_quick_cases_are_evenly_spread(number: int, chosen: str) -> None:
    assert evenly("abcde", number)[0] == "a"
    assert set(evenly("abcde", number)) == set(chosen)


def test_quick_cases_of_a_single_case_are_this_case() -> None:
    assert set(evenly("a", 3)) == {"a"}
