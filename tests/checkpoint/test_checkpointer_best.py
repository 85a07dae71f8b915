"""Which checkpoint is the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.errors import CheckpointError


def checkpoints(folder: Path, *numbers: dict[str, dict[str, Any]]) -> Checkpointer:
    """Checkpoints 1, 2, … with these numbers: phase -> name -> number."""
    made = Checkpointer(folder / "checkpoints")
    for iteration, each in enumerate(numbers, 1):
        made.save({"main": {"model": nn.Linear(1, 1)}}, {"iteration": iteration}, each)
    return made


@pytest.mark.parametrize(
    ("values", "mode", "step"),
    [
        ([3.0, 1.0, 2.0], "min", 2),
        ([3.0, 1.0, 2.0], "max", 1),
        ([1.0, 2.0, 1.0], "min", 3),
        ([2.0, 2.0, 1.0], "max", 2),
        ([-3.0, -1.0, -2.0], "max", 2),
        ([math.nan, 2.0, math.nan], "min", 2),
        ([None, 2, 5.0], "max", 3),
    ],
)
def test_the_best_has_the_lowest_or_highest_number_and_is_the_newest_of_equals(
    tmp_path: Path, values: list[Any], mode: str, step: int
) -> None:
    made = checkpoints(tmp_path, *({"main": {"loss": 9.0 - at, "score": value}} for at, value in enumerate(values)))
    assert made.best("score", mode) == tmp_path / "checkpoints" / f"step-{step:012d}"


def test_the_number_may_be_of_any_phase_and_be_missing_in_some_checkpoints(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, {"one": {"loss": 1.0}}, {"one": {"loss": 2.0}, "two": {"auc": 0.5}}, {})
    best = made.best("auc", "max")
    assert best is not None
    assert best.name == "step-000000000002"


def test_without_a_checkpoint_there_is_no_best(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "checkpoints").best("loss", "min") is None


def test_a_number_that_no_checkpoint_knows_is_told_with_the_nearest_else_all(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, {"main": {"loss": 1.0, "valid_auc": 0.5}})
    with pytest.raises(
        CheckpointError, match=r"checkpoints: no checkpoint knows 'valid_acu'; did you mean 'valid_auc'\?"
    ):
        made.best("valid_acu", "max")
    with pytest.raises(CheckpointError, match="no checkpoint knows 'bleu'; known: loss, valid_auc"):
        made.best("bleu", "max")


@pytest.mark.parametrize("damage", ["no json", '{"train_state": {}}', '{"metrics": [1]}'])
def test_one_whose_numbers_cannot_be_read_is_refused(tmp_path: Path, damage: str) -> None:
    made = checkpoints(tmp_path, {"main": {"loss": 1.0}})
    (tmp_path / "checkpoints" / "step-000000000001" / "state.json").write_text(damage)
    with pytest.raises(
        CheckpointError, match=r"step-000000000001/state.json: cannot be read \(.*; remove this checkpoint"
    ):
        made.best("loss", "min")
