"""Worlds of real processes, started once for all tests of this folder in a process of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes: ``two_ranks(function, argument)`` is what the function returns on each."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three processes, likewise."""
    ranks = Ranks(3)
    yield ranks
    ranks.stop()
