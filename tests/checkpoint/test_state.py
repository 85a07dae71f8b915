"""The training state: what it has to have, and how those of earlier versions are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.checkpoint.pytree import load_state
from pipeline.checkpoint.state import EntryState, LoopState, LoopState1, MeterState
from pipeline.training.meters import Meter
from tests.run.test_stopped_run import CHECKPOINT

Tree = dict[str, Any]
PHASES = ["a", "b", "c"]
LATER = {"metrics": {}, "average": None, "nonfinite": 0}
VALIDATION = {"validated": {"a": 4}, "running": False, "best": None}


def meter(**changes: Any) -> Tree:
    counts = dict.fromkeys(("batches", "samples", "nonfinite", "_count", "_recent_count"), 0)
    return {**counts, "first": None, "_total": 0.0, "_recent_total": 0.0, **changes}


def open_pass(**changes: Any) -> Tree:
    lists = {"logged": {"x": meter(first=(1, float("inf")))}, "discarded": [(1, "w")]}
    return {"step": 2, "taken": 2, "data": None, "began": 4, "train_loss": meter(_total=1.5), **lists, **changes}


def entry(**changes: Any) -> EntryState:
    """A pass that has begun in epoch 3."""
    flags = {"over": False, "repeat": False, "validated": False}
    return EntryState(
        **{"kind": "pass", "number": 3, "first": 0, "numbers": {}, "done": 0, "state": None, **flags, **changes}
    )


def upgraded(index: int, running: Tree | None = None, *, trained: bool = False) -> LoopState:
    """A state of version 1 in epoch 3 of the phases a, b and c."""
    iterations = {"a": {"loss": 5}}
    old = {"pass": running, "trained": trained, "validation": VALIDATION, "iterations": iterations}
    metrics: Any = {"a": {"loss": 0.5, "valid_loss": 0.25}, "b": {"loss": 0.75}}
    loop = LoopState1.model_validate(old).upgrade(3, index, PHASES, metrics)
    assert (loop.validation.to_tree(), loop.iterations) == (VALIDATION, iterations)
    assert loop.outer == [entry(kind="epochs", phase="", number=3)]
    return loop


def test_between_two_epochs_of_version_1_nothing_is_in_work() -> None:
    loop = upgraded(0)
    assert (loop.inner, loop.leader, loop.passes) == (None, None, {"a": 3, "b": 3, "c": 3})


def test_phases_before_the_current_one_of_version_1_are_over_and_validated() -> None:
    loop = upgraded(2)
    numbers: Any = {"loss": 0.5, "valid_loss": 0.25}, {"loss": 0.75}
    over = [
        entry(phase=phase, over=True, validated=True, numbers=each) for phase, each in zip("ab", numbers, strict=True)
    ]
    assert loop.inner == over
    assert (loop.leader, loop.passes) == (None, {"a": 4, "b": 4, "c": 3})


def test_the_pass_in_which_version_1_was_saved_leads() -> None:
    loop = upgraded(1, open_pass())
    assert loop.inner
    leader = [*loop.outer, *loop.inner][loop.leader or 0]
    assert leader == loop.inner[1]
    assert (leader.phase, leader.over, leader.number, leader.validated) == ("b", False, 3, False)
    assert leader.state
    assert leader.state.to_tree() == {**open_pass(), **LATER}
    assert loop.passes == {"a": 4, "b": 4, "c": 3}


def test_a_phase_that_version_1_has_trained_is_over_and_not_validated() -> None:
    loop = upgraded(1, trained=True)
    assert loop.inner
    assert loop.inner[1] == entry(phase="b", over=True, numbers={"loss": 0.75})
    assert (loop.leader, loop.passes) == (None, {"a": 4, "b": 4, "c": 3})


def test_the_loop_of_a_run_that_an_earlier_version_left_is_read() -> None:
    tree = load_state(CHECKPOINT / "training.safetensors")
    loop = LoopState1.model_validate(tree["loop"]).upgrade(1, 0, ["line"], tree["metrics"])
    assert loop.inner
    assert loop.inner[0].state
    assert (loop.inner[0].state.taken, loop.inner[0].state.train_loss.samples, loop.passes) == (3, 6, {"line": 2})
    assert loop.inner[0].state.to_tree() == {**tree["loop"]["pass"], **LATER}


def test_the_loop_comes_back_from_its_tree() -> None:
    loop = upgraded(1, open_pass())
    assert LoopState.model_validate(loop.to_tree()) == loop


@pytest.mark.parametrize("kept", [[], [[0.5, 3], [0.25, 1]]])
def test_the_best_comes_back_from_its_tree(kept: list[Any]) -> None:
    best = {"value": 0.5, "iteration": 3, "kept": kept, "reported": {"loss": "a"}}
    loop = LoopState1.model_validate(
        {"pass": None, "trained": False, "validation": {**VALIDATION, "best": best}, "iterations": {}}
    )
    assert loop.validation.best
    assert [iteration for _, iteration in loop.validation.best.kept] == [iteration for _, iteration in kept]
    assert LoopState1.model_validate(loop.to_tree()) == loop


@pytest.mark.parametrize("samples", [3, 1.5, torch.tensor(3)])
def test_a_mean_over_a_number_of_samples_of_any_kind_goes_on_from_its_state(samples: Any) -> None:
    meter, other = Meter(), Meter()
    meter.add(torch.tensor(0.5), samples)
    other.load_state_dict(MeterState.from_tree(meter.state_dict(), "here").to_tree())
    other.add(torch.tensor(1.5), samples)
    assert other.mean() == 1.0
    assert (type(other.samples), other.samples) == (type(samples), 2 * samples)
