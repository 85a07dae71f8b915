"""A window that is discarded is an update without an optimizer step; the log says how many there were in an epoch."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pipeline import Brain, Context, ExperimentBase, GeneralTrainer, RunnerBase, Stage, hookimpl, optimize
from pipeline.optim.schedules import Constant
from tests.training.conftest import Kill, KilledError, linear_config, mse

TAIL = ": each counts as an update, but the optimizer made no step\n"


def discarded(log_lines: list[str]) -> list[str]:
    """The log lines, from their place on."""
    return [line.removesuffix(TAIL).partition(" ")[2] for line in log_lines if " discarded in epoch " in line]


class NonFiniteLoss:
    """A plugin that makes the loss of some iterations, counted from 0, not finite."""

    at: tuple[int, ...] = ()

    @hookimpl
    def before_backward(self, context: Context, losses: dict[str, Any]) -> None:
        if context["train_state"]["iteration"] in self.at:
            losses["loss"] = losses["loss"] * math.nan


class Skipping(NonFiniteLoss):
    @hookimpl
    def before_update(self, context: Context, optim_scheduler: Any) -> None:
        if context["train_state"]["iteration"] == 5:
            optim_scheduler.skip_update()


def config(*at: int, plugin: Any = NonFiniteLoss, **runner: Any) -> dict[str, Any]:
    """Two epochs of 3 batches."""
    NonFiniteLoss.at = at
    chosen = linear_config(**{"nonfinite_patience": 9, **runner})
    chosen["plugins"] += [plugin]
    return chosen


def test_discarded_windows_of_run_are_logged_and_count_as_updates(log_lines: list[str]) -> None:
    """In epoch 1 a plugin discards another one."""
    context = GeneralTrainer(config(1, 2, 4, plugin=Skipping)).run()
    assert discarded(log_lines) == [
        "phase.line: 2 windows were discarded in epoch 0",
        "phase.line: 2 windows were discarded in epoch 1",
    ]
    assert context["train_state"]["update"] == context["train_state"]["iteration"] == 6


def test_two_bad_batches_of_one_window_are_one_discarded_window(log_lines: list[str]) -> None:
    context = GeneralTrainer(config(0, 1, epochs=1, accum_grad=2)).run()
    assert discarded(log_lines) == ["phase.line: 1 window was discarded in epoch 0"]
    assert context["train_state"]["update"] == 2


def test_run_without_discarded_windows_logs_none(log_lines: list[str]) -> None:
    GeneralTrainer(config()).run()
    assert discarded(log_lines) == []


def test_discarded_windows_of_each_phase_are_logged_by_optimizer(log_lines: list[str]) -> None:
    """In iterations 0 and 4 the loss of the second phase's first optimizer is not finite."""

    class TwoLosses(Brain):
        def __init__(self) -> None:
            super().__init__({"left": nn.Linear(3, 1), "right": nn.Linear(3, 1)})

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return [module(batch[0]) for module in self.modules.values()]

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> dict[str, Tensor]:
            left, right = (mse(each, batch[1]) for each in predictions)
            return {"left": left * (math.nan if self.step == 2 else 1), "right": right}

    def scheduler(name: str) -> dict[str, Any]:
        optimizer = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}
        return {"class": "constant", "args": {**optimizer, "optim_loss": name, "updated_modules": name}}

    chosen = config(0, epochs=1)
    schedulers = {name: scheduler(name) for name in ("left", "right")}
    chosen["phase"] += [
        {"name": "two", "model": TwoLosses, "dataset_name": "data", "optim_schedulers": schedulers},
    ]
    GeneralTrainer(chosen).run()
    assert discarded(log_lines) == [
        "phase.line: 1 window was discarded in epoch 0",
        "phase.two: 1 window was discarded in epoch 0 (left 1)",
    ]


@pytest.mark.parametrize("at", [2, 5])
def test_discarded_windows_before_a_kill_are_logged_after_resume(
    at: int, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    chosen = {**config(1, 3, 5, save_interval=1), "name": "discarded"}
    chosen["plugins"] += [Kill]
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", -1)
    GeneralTrainer(chosen, resume="auto").run()
    assert discarded(log_lines) == [
        "phase.line: 1 window was discarded in epoch 0",
        "phase.line: 2 windows were discarded in epoch 1",
    ]


class OwnBatches(RunnerBase):
    """Trains on one repeated pass over all epochs, three batches in each."""

    def run(self, context: Context) -> None:
        batches = context.batches("line", repeat=True)
        for _ in context.epochs():
            for _ in range(3):
                context["model"]["line"].brain.fit_batch(next(batches))


def test_discarded_windows_of_pass_over_epochs_are_logged_by_epoch(log_lines: list[str]) -> None:
    GeneralTrainer(config(0, 4, 5, runner_class_path=OwnBatches)).run()
    assert discarded(log_lines) == [
        "phase.line: 1 window was discarded in epoch 0",
        "phase.line: 2 windows were discarded in epoch 1",
    ]


def test_discarded_windows_of_fit_are_logged_and_count_as_updates(log_lines: list[str]) -> None:
    class Line(Brain):
        def compute_forward(self, batch: Tensor, stage: Stage) -> Tensor:
            return self.modules.net(batch)

        def compute_objectives(self, predictions: Tensor, batch: Tensor, stage: Stage) -> Tensor:
            return predictions.mean()

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    brain = Line({"net": nn.Linear(3, 1)}, sgd)
    data = [torch.ones(2, 3), torch.full((2, 3), math.inf), torch.ones(2, 3)]
    brain.fit(range(2), data)
    assert discarded(log_lines) == [
        "fit: 1 window was discarded in epoch 0",
        "fit: 1 window was discarded in epoch 1",
    ]
    assert brain.optimizer_step == 6


class Experiment(ExperimentBase):
    def setup_dataloader(self) -> None:
        self.train_loader = [torch.ones(2, 3), torch.full((2, 3), math.inf), torch.ones(2, 3)]
        self.valid_loader = None

    def setup_model(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = Constant("SGD", {"lr": 0.1}, self.model)

    def train_batch(self) -> None:
        optimize(self.model(self.read_batch()).mean(), [self.optimizer])

    def valid(self) -> None:
        pass


def test_discarded_windows_of_experiment_are_logged(tmp_path: Path, log_lines: list[str]) -> None:
    """The second epoch ends at its limit."""
    training = {"max_iteration": 5, "valid_interval": None, "save_interval": None}
    args = {"device": "cpu", "nprocs": 1, "output": str(tmp_path), "checkpoint_path": None}
    experiment = Experiment({"training": training}, args)
    experiment.setup()
    experiment.run()
    assert discarded(log_lines) == [
        "experiment: 1 window was discarded in epoch 0",
        "experiment: 1 window was discarded in epoch 1",
    ]


def test_windows_that_a_gradient_scaler_skips_are_counted() -> None:
    """It says on the device that it has skipped a step. The count is read once, and is saved."""
    model = nn.Linear(1, 1)
    scheduler = Constant("SGD", {"lr": 0.1}, model)
    scheduler.scaler = GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, math.inf, 1.0, math.inf):
        before = copy.deepcopy(model.state_dict())
        optimize(model(torch.ones(1, 1)).mean() * factor, [scheduler])
        has_stepped = not torch.equal(model.weight, before["weight"])
        assert has_stepped == math.isfinite(factor)
    restored = Constant("SGD", {"lr": 0.1}, model)
    restored.load_state_dict(scheduler.state_dict())
    assert [scheduler.take_discarded_windows(), scheduler.take_discarded_windows()] == [2, 0]
    assert restored.take_discarded_windows() == 2
