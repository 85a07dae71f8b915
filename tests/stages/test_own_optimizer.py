"""An updater with its own optimizer needs none in the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, GeneralTrainer, StandardUpdater, UpdaterBase
from pipeline.check.checker import check


def make_model() -> nn.Linear:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    return model


class OwnAdam(UpdaterBase):
    """Takes the model alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def update(self, batch: Any) -> Tensor:
        """Make a step of Adam."""
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        torch.autograd.backward(loss)
        self.optimizer.step()
        return loss.detach()


class LossModel(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = make_model()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error."""
        return nn.functional.mse_loss(self.line(x), target)


class OwnStandard(StandardUpdater):
    """Gives StandardUpdater an optimizer of its own."""

    def __init__(self, model: nn.Module, loader: Any) -> None:
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)


class CallsBrain(UpdaterBase):
    """Has the Brain step the optimizers of the config."""

    def __init__(self, brain: Brain) -> None:
        super().__init__()
        self.brain = brain

    def update(self, batch: Any) -> Tensor:
        """Train as the Brain does."""
        return self.brain.fit_batch(batch)


@pytest.fixture
def without_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """The config of one train runner without an optimizer, with a model of known weights."""
    config["hyper_parameters"] = {}
    config["mode"] = "train"
    config["dataset"][0]["shuffle"] = False
    config["phase"][0] |= {"model": make_model, "updater": {"class_path": OwnAdam}}
    return config


def weights_of_loop(dataset: TensorDataset, epochs: int) -> Tensor:
    """Return the weights of a plain loop with Adam."""
    x, y = dataset.tensors
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, target in zip(x.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(inputs), target))
            optimizer.step()
    return model.weight.detach()


@pytest.fixture
def expected(data: Callable[[int, int], TensorDataset]) -> Tensor:
    """The weights of a plain loop over the data of the config."""
    return weights_of_loop(data(10, 1), epochs=2)


def test_updater_with_own_optimizer_trains_as_a_plain_loop(without_optimizer: dict[str, Any], expected: Tensor) -> None:
    context = GeneralTrainer(without_optimizer).run()
    assert torch.equal(context["model"]["line"]["model"].weight, expected)
    assert context["model"]["line"]["optim_schedulers"] == {}


def test_standard_updater_steps_and_saves_its_own_optimizer(
    without_optimizer: dict[str, Any], expected: Tensor
) -> None:
    """The moments of Adam are in the checkpoint: a resumed run ends with the same weights."""
    updater = {"class_path": OwnStandard}
    without_optimizer["phase"][0] |= {"model": LossModel, "updater": updater, "loss": None}
    without_optimizer["phase"][0]["valid_dataset_name"] = None
    without_optimizer["runner"][0]["epochs"] = 1
    first = GeneralTrainer(without_optimizer).run()
    without_optimizer["runner"][0]["epochs"] = 2
    context = GeneralTrainer(without_optimizer, resume=first["run_dir"]).run()
    assert context["run_dir"] == first["run_dir"]
    assert torch.equal(context["model"]["line"]["model"].line.weight, expected)


def test_updater_that_uses_the_brain_needs_an_optimizer(without_optimizer: dict[str, Any]) -> None:
    without_optimizer["phase"][0]["updater"] = {"class_path": CallsBrain}
    (fault,) = check(without_optimizer)
    assert fault.address == "hyper_parameters.optimizer"


def test_key_of_the_optimizer_beside_such_an_updater_is_a_fault(
    without_optimizer: dict[str, Any],
) -> None:
    """Nothing would clip the gradients."""
    without_optimizer["runner"][0]["grad_clip"] = 1.0
    (fault,) = check(without_optimizer)
    assert fault.address == "runner.train.grad_clip"
