"""A validation that draws random numbers leaves the training bit for bit as it was."""

from __future__ import annotations

import contextlib
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipeline import Context, ExperimentBase, GeneralTrainer, RunnerBase, hookimpl, stages
from pipeline.signals import StoppedError
from tests.training.conftest import linear_config, mse, table

Weights = dict[str, Tensor]


class Net(nn.Module):
    """A line with dropout, and with noise in every forward pass, from the global generators and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.line = nn.Linear(3, 1)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Any:
        noise = torch.randn(1) + random.random() + np.random.rand()
        return self.line(self.dropout(x)) + noise + torch.randn(1, generator=self.generator)


class DrawingMetric:
    """A metric whose value is drawn."""

    def reset(self) -> None:
        pass

    def update(self, predictions: Tensor, target: Tensor) -> None:
        random.random()
        np.random.rand()
        torch.rand(3)

    def compute(self) -> float:
        return random.random()


class PlainNetwork(stages.Network):
    """A network stage whose loaders are torch's, with one generator of their own for both."""

    def build_dataset(self, settings: Any, runner: Any, context: Context) -> Any:
        return DataLoader(table(10), batch_size=4, generator=GENERATORS[settings.name])


GENERATORS = dict.fromkeys(("data", "valid_data"), torch.Generator())


def config(**runner: Any) -> dict[str, Any]:
    """Two epochs of three batches with validation data."""
    made = linear_config(**runner)
    made["dataset"].append({"name": "valid_data", "class_path": lambda: table(6, seed=2), "batch_size": 4})
    made["phase"][0] |= {
        "model": Net,
        "valid_dataset_name": "valid_data",
        "metrics": {"drawn": {"class": DrawingMetric}},
    }
    return made


def weights(config: dict[str, Any]) -> Weights:
    GENERATORS["data"].manual_seed(5)
    state: Weights = GeneralTrainer(config).run()["model"]["line"]["model"].state_dict()
    return state


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loop_body(validations: int) -> type[RunnerBase]:
    """A runner stage whose own loop validates in the body of each batch, and after each epoch."""

    def run(self: Any, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("line"):
                context["model"]["line"].brain.fit_batch(batch)
                for _ in range(validations):
                    context.validate("line")
            for _ in range(validations):
                context.validate()

    return type("Body", (RunnerBase,), {"run": run})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("keys", [{}, {"network_class_path": PlainNetwork}], ids=["ours", "torch"])
def test_training_with_any_valid_interval_is_the_same(keys: dict[str, Any]) -> None:
    never = weights(config(valid_interval=None, **keys))

    assert equal(weights(config(valid_interval="1 epoch", **keys)), never)
    assert equal(weights(config(valid_interval=1, **keys)), never)
    assert equal(weights(config(valid_interval=["start", 2], **keys)), never)


def test_training_with_validations_equals_a_plain_loop() -> None:
    """The loop does not validate; its numbers are those of the same model and the same order of draws."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(table(10), batch_size=4)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
    validated = config(valid_interval=1)
    validated["phase"][0]["model"] = lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))

    assert equal(weights(validated), model.state_dict())


def test_validations_in_a_custom_loop_change_nothing() -> None:
    without = weights(config(runner_class_path=loop_body(0), valid_interval=None))

    assert equal(weights(config(runner_class_path=loop_body(2), valid_interval=None)), without)


def test_sanity_validation_changes_nothing() -> None:
    observed = config(valid_interval=None)
    observed["plugins"] = [*observed["plugins"], "sanity_validation"]

    assert equal(weights(observed), weights(config(valid_interval=None)))


class ValidatedOnRequest:
    """A plugin that asks for a validation, and evaluates by itself."""

    @hookimpl
    def after_batch(self, context: Context) -> None:
        context.request("validation")

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        context["model"]["line"].brain.evaluate(table(6), test_loader_kwargs={"batch_size": 2})


def test_validations_and_evaluations_of_plugins_change_nothing() -> None:
    observed = config(valid_interval=None)
    observed["plugins"] = [*observed["plugins"], ValidatedOnRequest]

    assert equal(weights(observed), weights(config(valid_interval=None)))


class RaisingValidation:
    """A plugin whose first validation draws a number and raises an error."""

    raised = False

    @hookimpl
    def before_validation(self) -> None:
        if not self.raised:
            self.raised = True
            torch.rand(3)
            raise ZeroDivisionError


class Catching(RunnerBase):
    """A loop that continues after an error of a validation."""

    def run(self, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("line"):
                with contextlib.suppress(ZeroDivisionError):
                    context.validate("line")
                context["model"]["line"].brain.fit_batch(batch)


def test_validation_whose_error_is_caught_changes_nothing() -> None:
    observed = config(runner_class_path=Catching, valid_interval=None)
    observed["plugins"] = [*observed["plugins"], RaisingValidation]

    assert equal(weights(observed), weights(config(valid_interval=None)))


class SignalInValidation:
    """A plugin that sends SIGTERM in the second validation, after numbers were drawn."""

    armed = False
    validations = 0

    @hookimpl
    def before_validation(self) -> None:
        SignalInValidation.validations += 1
        if self.armed and self.validations == 2:
            torch.rand(3)
            signal.raise_signal(signal.SIGTERM)


def test_an_interrupted_validation_changes_nothing(tmp_path: Any) -> None:
    run = config(valid_interval=2)
    run |= {"plugins": [*run["plugins"], SignalInValidation], "output_dir": str(tmp_path), "name": "test"}
    without = weights(config(valid_interval=None))
    SignalInValidation.armed, SignalInValidation.validations = True, 0
    with pytest.raises(StoppedError):
        GeneralTrainer(run).run()
    SignalInValidation.armed = False

    context = GeneralTrainer(run, resume="auto").run()

    assert equal(context["model"]["line"]["model"].state_dict(), without)


class Experiment(ExperimentBase):
    """An experiment with dropout, whose validation draws from its loader, its model and a generator of its own."""

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(table(10), batch_size=4)
        self.valid_loader = DataLoader(table(6), batch_size=4)
        self.chance = random.Random(1)

    def setup_model(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train_batch(self) -> None:
        x, y = self.read_batch()
        loss = mse(self.model(x), y) * (1 + self.chance.random())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def valid(self) -> None:
        for x, _ in self.valid_loader:
            self.model(x)
            self.chance.random()


def test_validations_of_an_experiment_change_nothing() -> None:
    def trained(valid_interval: Any) -> Weights:
        keys = {"class": "train", "device": "cpu", "epochs": 2, "valid_interval": valid_interval}
        runner = {"name": "train", "runner_class_path": Experiment, **keys}
        plugins = [{"progress_bar": False}, {"metric_log": False}]
        state: Weights = (
            GeneralTrainer({"plugins": plugins, "runner": [runner]}).run()["model"]["experiment"]["model"].state_dict()
        )
        return state

    never = trained(None)

    assert equal(trained("1 epoch"), never)
    assert equal(trained(1), never)
