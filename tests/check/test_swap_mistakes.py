"""Ten typical mistakes in thirty swaps: ``check`` names each, with file, line and remedy, but for those listed here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from swap_mistakes import KINDS, Mistake, is_named, make, mistakes, said_by_check
from thirty_swaps import INSTALLED, SWAPS

UNNAMED = {
    "phase: by_hand: rankiing (by_hand.py:27)": "a name that its own loop writes, and nobody reads",
    "phase: network_tied: rankiing (network_tied.py:13)": "compared with the name of a phase: any text may be",
    "phase: network_subset: train_ata (network_subset.py:17)": "compared with the name of a dataset: likewise",
    "method: runner_patience: is__over (runner_patience.py:22)": "a super() that a return may skip is not certainly reached",
    "super: runner_curriculum: super().train_epoch( (runner_curriculum.py:11)": "a verb may do without what it overrides",
    "super: runner_history: super().run( (runner_history.py:21)": "who has the checkpointer may save by hand",
}
"""Those that ``check`` does not name, and why."""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that one of the swaps comes from."""
    monkeypatch.syspath_prepend(str(INSTALLED))


def unnamed(made: list[Mistake], folder: Path) -> list[str]:
    """The mistakes that ``check`` does not name."""
    silent = []
    for mistake in made:
        said = said_by_check(make(mistake, folder))
        silent += [] if any(is_named(mistake, message) for message in said) else [str(mistake)]
        shutil.rmtree(folder)
    return silent


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_of_each_kind_is_named_in_three_swaps(kind: str, tmp_path: Path) -> None:
    first = {mistake.swap: mistake for mistake in reversed(mistakes(kind)) if str(mistake) not in UNNAMED}
    assert unnamed(list(first.values())[:3], tmp_path / "workspace") == []


@pytest.mark.slow
def test_of_every_sixth_mistake_all_but_the_listed_ones_are_named(tmp_path: Path) -> None:
    """Those of a kind stand together, in the order of the swaps."""
    made = mistakes()[::6]
    assert {mistake.kind for mistake in made} == set(KINDS)
    silent = unnamed(made, tmp_path / "workspace")
    assert sorted(silent) == sorted(str(mistake) for mistake in made if str(mistake) in UNNAMED)


@pytest.mark.release
def test_all_mistakes_but_the_listed_ones_are_named(tmp_path: Path) -> None:
    made = mistakes()
    assert {mistake.swap for mistake in made} == set(SWAPS)
    assert sorted(unnamed(made, tmp_path / "workspace")) == sorted(UNNAMED)
    assert len(UNNAMED) < 0.02 * len(made)


# Two of each stage are quick, and the only one with a note.
PLAIN = [
    pytest.param(name, marks=() if number % 3 == 0 or name == "by_hand" else pytest.mark.slow)
    for number, name in enumerate(SWAPS)
]


@pytest.mark.parametrize("name", PLAIN)
def test_a_swap_without_a_mistake_has_no_note_but_that_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    made = Mistake("none", name, "README.md", "", "", 0)
    notes = [note.partition(" (")[0] for note in said_by_check(make(made, tmp_path / "workspace"))]
    assert [note.rpartition(": ")[2] for note in notes] == (["Runner"] if name == "by_hand" else [])
