"""Numbers of numpy in what is saved: they are taken as those of Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, Checkpointer, GeneralTrainer, Stage, hookimpl
from pipeline.checkpoint.pytree import load_state, save_state
from pipeline.errors import CheckpointError
from tests.training.conftest import Kill, KilledError, linear_config, mse

numpy = pytest.importorskip("numpy")


def types_in(value: Any) -> Any:
    """A state with the type of each key and value in place of it."""
    if isinstance(value, dict):
        return [(type(key), types_in(item)) for key, item in value.items()]
    return [types_in(item) for item in value] if isinstance(value, list | tuple) else type(value)


def test_numpy_numbers_when_saved_load_as_python_numbers(tmp_path: Path) -> None:
    state = {
        "scalars": [numpy.int64(-3), numpy.uint64(2**64 - 1), numpy.float32(0.5), numpy.bool_(True)],
        numpy.int32(4): {"nested": (numpy.float64(0.1), numpy.str_("text"))},
    }
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state")
    assert loaded == {"scalars": [-3, 2**64 - 1, 0.5, True], 4: {"nested": (0.1, "text")}}
    assert types_in(loaded) == [(str, [int, int, float, bool]), (int, [(str, [float, str])])]


@pytest.mark.parametrize("value", [numpy.longdouble(1), numpy.timedelta64(5, "ns"), numpy.zeros(2)], ids=str)
def test_other_numpy_values_when_saved_are_refused(value: Any, tmp_path: Path) -> None:
    """Python has no number that says all of what they are."""
    with pytest.raises(CheckpointError, match=r"state\['a'\]: is a numpy\..*, which cannot be saved"):
        save_state(tmp_path / "state", {"a": value})


def test_save_without_numpy_does_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever imports numpy then gets an ImportError."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    save_state(tmp_path / "state", {1: [True, 0.5]})
    with pytest.raises(CheckpointError, match=r"state\[0\]: is a set"):
        save_state(tmp_path / "state", [{1}])


class Counting:
    """A plugin that counts batches by numpy's integers, under a key of numpy's."""

    def __init__(self) -> None:
        self.counts = {numpy.int64(7): numpy.int64(0)}

    @hookimpl
    def after_batch(self) -> None:
        self.counts[7] += numpy.int64(1)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert types_in(state["counts"]) == [(int, int)]
        self.counts = {numpy.int64(key): numpy.int64(count) for key, count in state["counts"].items()}

    @hookimpl
    def extend_metrics(self) -> dict[str, Any]:
        return {"batches": self.counts[7]}


class CountingBrain(Brain):
    """Weights what it logs, and counts faults and updates, by numpy's numbers."""

    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        self.log("one", numpy.float32(1), batch_size=numpy.int64(2))
        return mse(predictions, batch[1])

    def fit_batch(self, batch: Any) -> Tensor:
        loss = super().fit_batch(batch)
        self.nonfinite_count = numpy.int64(1)
        self.optimizer_step = numpy.int64(self.optimizer_step)
        return loss


def test_numpy_counts_of_killed_run_resume_bit_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a plugin's state and in that of a pass, which is saved in its middle."""
    config = linear_config(save_interval=1)
    config["plugins"] += [Counting, Kill]
    config["phase"][0] |= {"model": CountingBrain, "loss": None}
    monkeypatch.setattr(Kill, "at", -1)
    straight = GeneralTrainer({**config, "name": "straight"}).run()
    monkeypatch.setattr(Kill, "at", 4)
    with pytest.raises(KilledError):
        GeneralTrainer({**config, "name": "killed"}).run()
    monkeypatch.setattr(Kill, "at", -1)
    resumed = GeneralTrainer({**config, "name": "killed"}, resume="auto").run()
    weights = [context["model"]["line"].brain.modules.state_dict() for context in (straight, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert resumed["metrics"] == straight["metrics"]
    assert resumed["metrics"]["line"]["batches"] == resumed["train_state"]["update"] == 6


class Recoverable:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_numpy_numbers_of_fit_load_as_python_numbers(tmp_path: Path) -> None:
    """They are in a recoverable, and in the meta of a checkpoint, also as keys."""
    data = [(torch.randn(4, 3), torch.randn(4, 1))] * 2

    def fit(recoverable: Recoverable) -> Checkpointer:
        checkpointer = Checkpointer(tmp_path / "checkpoints")
        checkpointer.add_recoverable("own", recoverable)
        brain = CountingBrain()
        Brain.__init__(brain, {"net": nn.Linear(3, 1)}, lambda own: torch.optim.SGD(own, 0.1), None, None, checkpointer)
        brain.fit(range(1), data)
        return checkpointer

    saved = fit(Recoverable({numpy.int64(2): [numpy.float32(0.5)]}))
    saved.save_checkpoint(meta={"WER": numpy.float32(0.25), "classes": {numpy.int64(3): numpy.bool_(True)}})
    loaded = Recoverable(None)
    found = fit(loaded).find_checkpoint(min_key="WER")
    assert loaded.value == {2: [0.5]}
    assert types_in(loaded.value) == [(int, [float])]
    assert found is not None
    assert (found.meta["WER"], found.meta["classes"]) == (0.25, {"3": True})
