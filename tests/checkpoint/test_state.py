"""The parts of the training state, and their trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.checkpoint.state import EngineState, EntryState, MeterState
from pipeline.errors import CheckpointError
from pipeline.metrics.meters import Meter

Tree = dict[str, Any]


def open_pass() -> Tree:
    """A pass that is open after two batches."""
    counts = dict.fromkeys(("batches", "samples", "nonfinite", "_count", "_recent_count"), 0)
    meter = {**counts, "first": (1, float("inf")), "_total": 1.5, "_recent_total": 0.0}
    return {
        "step": 2,
        "cursor": {
            "epoch": 3,
            "taken": 2,
            "stand_ins": 0,
            "place": None,
            "begun": None,
            "ahead": None,
            "is_own": False,
        },
        "began": 4,
        "train_loss": meter,
        "logged": {"x": meter},
        "discarded": [(1, "w")],
        "metrics": {},
        "average": 0.75,
        "nonfinite": 0,
    }


def engine(*, leader: int | None = 1, best: Tree | None = None) -> Tree:
    """An engine in epoch 3, in an open pass over the phase `a`."""
    epochs = EntryState.new("epochs", "", 3).to_tree()
    running = EntryState.new("pass", "a", 3, done=2).to_tree()
    return {
        "outer": [epochs],
        "inner": [{**running, "state": open_pass()}],
        "leader": leader,
        "passes": {"a": 4},
        "validation": {"validated": {"a": 4}, "running": False, "best": best},
        "iterations": {"a": {"loss": 5}},
        "asked_updates": None,
        "epoch_began": {"iteration": 4, "update": 4},
        "generators": {},
    }


def test_engine_from_its_tree_is_the_same() -> None:
    tree = engine()
    state = EngineState.from_tree(tree, "here")
    assert state.has_open_pass()
    assert state.to_tree() == tree


@pytest.mark.parametrize("leader", [0, 2])
def test_engine_whose_leader_is_not_open_is_refused(leader: int) -> None:
    with pytest.raises(CheckpointError, match=f"its leader, {leader}, is no open pass"):
        EngineState.from_tree(engine(leader=leader), "here")


@pytest.mark.parametrize("kept", [[], [[0.5, 3], [0.25, 1]]])
def test_best_from_its_tree_is_the_same(kept: list[Any]) -> None:
    best = {"value": 0.5, "iteration": 3, "kept": kept, "reported": {"loss": "a"}}
    state = EngineState.from_tree(engine(best=best), "here")
    assert state.validation.best
    assert [list(entry) for entry in state.validation.best.kept] == kept
    assert EngineState.from_tree(state.to_tree(), "here") == state


@pytest.mark.parametrize("samples", [3, 1.5, torch.tensor(3)])
def test_a_mean_over_a_number_of_samples_of_any_kind_goes_on_from_its_state(samples: Any) -> None:
    meter, other = Meter(), Meter()
    meter.add(torch.tensor(0.5), samples)
    other.load_state_dict(MeterState.from_tree(meter.state_dict(), "here").to_tree())
    other.add(torch.tensor(1.5), samples)
    assert other.mean() == 1.0
    assert (type(other.samples), other.samples) == (type(samples), 2 * samples)
