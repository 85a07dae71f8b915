"""Which checkpoint is the best."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.errors import CheckpointError


def checkpoints(folder: Path, *numbers: dict[str, dict[str, Any]], of: tuple[int, ...] = ()) -> Checkpointer:
    """Checkpoints 1, 2, … with these numbers: phase -> name -> number; ``of``: the iteration of each one's numbers."""
    made = Checkpointer(folder / "checkpoints")
    for iteration, each in enumerate(numbers, 1):
        iterations = {phase: dict.fromkeys(some, of[iteration - 1]) for phase, some in each.items()} if of else None
        models = {"main": {"model": nn.Linear(1, 1)}}
        made.save(models, {"iteration": iteration}, each, iterations=iterations)
    return made


def as_an_earlier_version(folder: Path) -> None:
    """Take away the iterations of the numbers."""
    for path in folder.rglob("state.json"):
        state = json.loads(path.read_text())
        del state["iterations"]
        path.write_text(json.dumps(state))


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


def test_numbers_of_an_earlier_iteration_do_not_count(tmp_path: Path) -> None:
    made = checkpoints(
        tmp_path, *({"main": {"loss": value}} for value in (3.0, 1.0, 1.0, 2.0, 0.5)), of=(1, 2, 2, 4, 4)
    )
    best = made.best("loss", "min")
    assert best is not None
    assert best.name == "step-000000000002"


def test_where_all_numbers_are_of_earlier_iterations_it_is_said_when_to_save(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, {"main": {"loss": 3.0}}, of=(0,))
    message = "no checkpoint is of an iteration in which 'loss' was reported; save where it is validated, as keep_best"
    with pytest.raises(CheckpointError, match=message):
        made.best("loss", "min")


def test_of_neighbours_that_an_earlier_version_saved_with_the_same_numbers_the_first_counts(tmp_path: Path) -> None:
    made = checkpoints(tmp_path, *({"main": {"loss": value}} for value in (3.0, 1.0, 1.0, 2.0)))
    as_an_earlier_version(tmp_path)
    best = made.best("loss", "min")
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
