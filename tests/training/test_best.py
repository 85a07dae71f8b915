"""The best that a run has been."""

from __future__ import annotations

import math

import pytest

from pipeline.errors import DataError
from pipeline.training.validation import BestTracker


@pytest.mark.parametrize(
    ("mode", "values", "better"),
    [
        ("min", [3.0, 4.0, 2.0, 2.0, 1.0], [True, False, True, False, True]),
        ("max", [3.0, 2.0, 4.0, 4.0, 5.0], [True, False, True, False, True]),
        ("max", [-3.0, -2.0, -4.0], [True, True, False]),
        ("min", [math.nan, 2.0, math.nan, 1.0], [False, True, False, True]),
        ("min", [math.inf, 2.0], [True, True]),
    ],
)
def test_a_number_improves_if_it_is_better_than_all_before(mode: str, values: list[float], better: list[bool]) -> None:
    best = BestTracker("valid_loss", mode)
    assert [best.improves("line", {"valid_loss": value}, at) for at, value in enumerate(values, 1)] == better
    last = max(at for at, each in enumerate(better) if each)
    assert best.as_dict() == {"metric": "valid_loss", "mode": mode, "value": values[last], "iteration": last + 1}


def test_numbers_without_the_one_that_is_watched_change_nothing() -> None:
    best = BestTracker("valid_auc", "max")
    assert not best.improves("line", {"valid_loss": 1.0}, 3)
    assert (math.isnan(best.value), best.iteration) == (True, 0)


def test_a_number_that_was_reported_is_known_even_where_it_is_nan() -> None:
    best = BestTracker("valid_auc", "max")
    best.improves("line", {"valid_auc": math.nan}, 3)
    best.check_reported()
    assert best.iteration == 0


def test_a_number_that_nothing_reported_is_told_with_the_nearest_else_all() -> None:
    best = BestTracker("accuracy", "max")
    best.improves("one", {"valid_bleu": 1.0}, 3)
    message = "keep_best watches 'accuracy', which no validation reports; "
    with pytest.raises(DataError, match=rf"{message}known: valid_bleu"):
        best.check_reported()
    best.improves("two", {"valid_accuracy": 0.5}, 3)
    with pytest.raises(DataError, match=rf"{message}did you mean 'valid_accuracy'\?"):
        best.check_reported()


def test_the_numbers_of_two_phases_are_not_compared() -> None:
    best = BestTracker("valid_loss", "min")
    best.improves("one", {"valid_loss": 1.0}, 3)
    with pytest.raises(DataError, match="'valid_loss', which phases 'one' and 'two' both report; name a metric that"):
        best.improves("two", {"valid_loss": 0.5}, 6)


def test_a_moment_deserves_a_checkpoint_until_it_is_saved_or_a_later_one_is() -> None:
    best = BestTracker("valid_loss", "min", count=2)
    for at, value in enumerate([3.0, 1.0, 2.0], 1):
        best.improves("line", {"valid_loss": value}, at)
        assert best.deserves_checkpoint(at)
    best.saved(1)
    assert [best.deserves_checkpoint(at) for at in (1, 2, 3)] == [False, True, True]
    best.saved(3)
    assert not best.deserves_checkpoint(2)
    assert [each.iteration for each in best.kept] == [3, 1]


def test_a_number_deserves_none_if_enough_better_ones_have_or_will_have_one() -> None:
    best = BestTracker("valid_auc", "max", count=2)
    for at, value in enumerate([0.5, 0.7, 0.6, 0.6, 0.55], 1):
        best.improves("line", {"valid_auc": value}, at)
    assert [best.deserves_checkpoint(at) for at in range(1, 6)] == [True, True, True, False, False]


def test_a_state_knows_of_the_checkpoint_that_carries_it() -> None:
    best, resumed = BestTracker("valid_loss", "min"), BestTracker("valid_loss", "min")
    best.improves("line", {"valid_loss": 3.0}, 4)
    resumed.load_state_dict(best.state_dict(4))
    assert [each.iteration for each in resumed.kept] == [4]
    assert resumed.as_dict() == best.as_dict()
    assert best.state_dict(5)["kept"] == []
