"""A loss of a config that has parameters of its own, or returns no loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import GeneralTrainer
from pipeline.errors import ConfigError, DataError


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, predictions: Tensor, target: Tensor) -> Tensor:
        """Return the scaled mean squared error."""
        return self.scale * (predictions - target).square().mean()


class Listed(Scaled):
    """A loss with a layer in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)
        self.layers = [nn.Linear(1, 1)]


class PlainObject:
    """A loss that is no module and keeps one."""

    def __init__(self) -> None:
        self.net = nn.Linear(1, 1)

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error of what the module makes of the predictions."""
        return (self.net(predictions) - target).square().mean()


class Frozen(Scaled):
    """A loss whose parameter is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


def per_sample(predictions: Tensor, target: Tensor) -> Tensor:
    """Return a loss per sample, which is no scalar."""
    return (predictions - target).square()


@pytest.mark.parametrize(
    ("loss", "attribute"),
    [(Scaled, "scale"), (Listed, "layers"), (PlainObject, "net")],
)
def test_loss_with_parameters_is_refused_at_its_key(config: dict[str, Any], loss: type, attribute: str) -> None:
    config["phase"][0]["loss"] = loss
    with pytest.raises(ConfigError) as raised:
        GeneralTrainer(config).run()
    message = str(raised.value)
    assert message.startswith(f"phase.line.loss: {loss.__name__} ")
    assert attribute in message
    assert "loss: model" in message
    assert "Brain" not in message


def test_loss_with_frozen_parameters_is_allowed(config: dict[str, Any]) -> None:
    config["phase"][0]["loss"] = Frozen
    context = GeneralTrainer(config).run()
    assert "loss" in context["metrics"]["line"]


def test_loss_that_is_no_scalar_is_named(config: dict[str, Any]) -> None:
    """The user wrote no compute_objectives."""
    config["phase"][0]["loss"] = per_sample
    with pytest.raises(DataError, match="per_sample") as raised:
        GeneralTrainer(config).run()
    assert "compute_objectives" not in str(raised.value)
