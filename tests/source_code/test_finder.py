"""Where modules are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from pipeline.check.checker import check
from pipeline.user_code.source import find_spec, unchanging


class Counting(MetaPathFinder):
    """Finds nothing, and counts what is looked for."""

    def __init__(self) -> None:
        self.names = Counter[str]()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        self.names[fullname] += 1


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    finder = Counting()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    return finder


def test_a_check_looks_for_each_module_once(linear: Path, counting: Counting) -> None:
    assert check(linear) == []
    assert {name: count for name, count in counting.names.items() if count > 1} == {}


def test_outside_of_a_check_a_module_that_has_come_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with unchanging():
        assert find_spec("came_later") is None
        (tmp_path / "came_later").mkdir()
        assert find_spec("came_later") is None
    assert find_spec("came_later")
