"""What was recorded of a run, and where two of them part."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline_plugins.resume_test.compare import first_difference
from pipeline_plugins.resume_test.recorder import Recording


def recording(batches: str, first: int = 1, loss: float = 0.5) -> Recording:
    """A letter for each batch; the loss is the same in all."""
    numbered = dict(enumerate(batches, first))
    return Recording(numbered, {iteration: {"loss": loss.hex()} for iteration in numbered})


def test_equal_recordings_do_not_differ() -> None:
    assert first_difference(recording("abcd"), recording("abcd")) is None


def test_another_batch_is_found_before_what_follows_from_it() -> None:
    other = recording("abxd")
    other.losses[3] = {"loss": (0.7).hex()}
    assert first_difference(recording("abcd"), other) == "the batch of iteration 3"


def test_a_batch_that_the_straight_run_had_elsewhere_is_told() -> None:
    expected = "the batch of iteration 3, which is the one of iteration 1 in the straight run"
    assert first_difference(recording("abcd"), recording("abab")) == expected


def test_a_loss_is_told_with_both_values() -> None:
    other = recording("abcd")
    other.losses[2] = {"loss": (0.5).hex(), "penalty": (0.25).hex()}
    assert first_difference(recording("abcd"), other) == "the penalty of iteration 2: none straight, 0.25 interrupted"
    other.losses[1] = {"loss": (0.7).hex()}
    assert first_difference(recording("abcd"), other) == "the loss of iteration 1: 0.5 straight, 0.7 interrupted"


def test_a_loss_that_is_not_finite_is_the_same_as_itself() -> None:
    assert first_difference(recording("ab", loss=float("nan")), recording("ab", loss=float("nan"))) is None


def test_an_iteration_that_only_one_has_is_told() -> None:
    assert first_difference(recording("ab"), recording("abc")) == "iteration 3, which only the interrupted run has"
    assert first_difference(recording("abc"), recording("ab")) == "iteration 3, which only the straight run has"


def test_the_last_use_of_an_iteration_counts() -> None:
    whole = recording("abXX").merge(recording("cd", first=3))
    assert first_difference(recording("abcd"), whole) is None


def test_those_before_a_kill_are_compared_up_to_it() -> None:
    assert recording("abcd").cut_to(recording("ab")).batches == {1: "a", 2: "b"}


def test_a_file_is_read_for_one_runner(tmp_path: Path) -> None:
    lines = [
        {"runner": "a", "iteration": 1, "batch": "x"},
        {"runner": "a", "iteration": 1, "losses": {"loss": "0x1.0p+0"}},
        {"runner": "a", "volatile": {"Plot": ["plot.png"]}},
        {"runner": "b", "iteration": 1, "batch": "y"},
    ]
    (tmp_path / "recording").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert Recording.read(tmp_path / "recording", "a") == Recording(
        {1: "x"}, {1: {"loss": "0x1.0p+0"}}, {"Plot": ["plot.png"]}
    )
    assert Recording.read(tmp_path / "nothing", "a") == Recording()
