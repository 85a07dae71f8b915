"""A run that a signal ends anywhere in its loop, and that goes on: equal bit for bit to one that was not stopped."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.stopping import StoppedError


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3) + index, torch.tensor([index / 10.0])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


class Signals:
    """A plugin that sends SIGTERM at the ``at``-th call of a hook, once."""

    hook, at, calls = "", 0, 0

    def called(self, hook: str) -> None:
        if hook == self.hook:
            Signals.calls += 1
            if self.calls == self.at:
                signal.raise_signal(signal.SIGTERM)

    @hookimpl
    def before_epoch(self) -> None:
        self.called("before_epoch")

    @hookimpl
    def after_batch(self) -> None:
        self.called("after_batch")

    @hookimpl
    def before_validation(self) -> None:
        self.called("before_validation")

    @hookimpl
    def after_validation(self) -> None:
        self.called("after_validation")

    @hookimpl
    def after_epoch(self) -> None:
        self.called("after_epoch")

    @hookimpl
    def after_checkpoint_saved(self) -> None:
        self.called("after_checkpoint_saved")


def config(**changed: Any) -> dict[str, Any]:
    """Two epochs of two phases of 4 and 3 batches, with accumulation, and validation by interval and after each."""
    schedule = {"optim_type": "Adam", "optim_conf": {"lr": 0.01}, "accum_grad": 3, "grad_clip": 1.0}
    phase = {
        "model": Net,
        "loss": nn.functional.mse_loss,
        "valid_dataset_name": "valid",
        "optim_schedulers": {"main": {"class": "noam", "args": {**schedule, "warmup_steps": 3}}},
    }
    runner = {"name": "t", "class": "train", "device": "cpu", "epochs": 2, "valid_interval": [3, "1 epoch"]}
    return {
        "name": "config",
        "plugins": [{"progress_bar": False}, Signals],
        "dataset": [
            {"name": "four", "class_path": Noisy, "batch_size": 3, "shuffle": True},
            {"name": "three", "class_path": Noisy, "batch_size": 4, "shuffle": True},
            {"name": "valid", "class_path": Noisy, "batch_size": 2},
        ],
        "runner": [{**runner, "print_interval": 2, **changed}],
        "phase": [{**phase, "name": "a", "dataset_name": "four"}, {**phase, "name": "b", "dataset_name": "three"}],
    }


def end(context: Context) -> dict[str, Any]:
    models = {name: entry["model"].state_dict() for name, entry in context["model"].items()}
    weights = {f"{name}.{key}": value.tolist() for name, each in models.items() for key, value in each.items()}
    lines = (context["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8")
    return {"weights": weights, "lines": lines, "state": dict(context["train_state"]), "metrics": context["metrics"]}


CALLS = {"before_epoch": 2, "after_batch": 14, "before_validation": 8, "after_validation": 8, "after_epoch": 2}
"""How often each is called in an unbroken run."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return end(GeneralTrainer({**config(), "output_dir": str(tmp_path_factory.mktemp("unbroken"))}).run())


@pytest.mark.parametrize(("hook", "at"), [(hook, at) for hook, times in CALLS.items() for at in range(1, times + 1)])
def test_a_run_that_is_stopped_at_any_moment_saves_and_goes_on_exactly(
    hook: str, at: int, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"hook": hook, "at": at, "calls": 0}.items():
        monkeypatch.setattr(Signals, name, value)
    with pytest.raises(StoppedError, match="asked to end by SIGTERM"):
        GeneralTrainer(config()).run()
    assert Signals.calls == at
    torch.manual_seed(at + 100)
    context = GeneralTrainer(config(), resume="auto").run()
    assert end(context) == unbroken


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("hook", ["before_validation", "after_validation"])
@pytest.mark.parametrize("limit", [{"max_steps": 12}, {"epochs": 1}])
def test_a_run_that_is_stopped_in_its_last_validation_makes_it_again(
    hook: str, at: int, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(valid_interval=[5, 6], **limit)
    expected = end(GeneralTrainer({**chosen, "output_dir": "unbroken"}).run())
    for name, value in {"hook": hook, "at": at, "calls": 0}.items():
        monkeypatch.setattr(Signals, name, value)
    with pytest.raises(StoppedError):
        GeneralTrainer(chosen).run()
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected


@pytest.mark.parametrize("at", range(1, 9))
def test_a_validation_that_was_stopped_is_made_again_and_nothing_of_the_training_is(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"hook": "before_validation", "at": at, "calls": 0}.items():
        monkeypatch.setattr(Signals, name, value)
    trainer = GeneralTrainer(config())
    with pytest.raises(StoppedError):
        trainer.run()
    monkeypatch.setattr(Signals, "hook", "after_batch")
    monkeypatch.setattr(Signals, "calls", 100)
    batches = 14 - GeneralTrainer(config(), resume="auto").run()["train_state"]["iteration"]
    assert batches == 0
    ran = Signals.calls - 100
    assert ran < 14
