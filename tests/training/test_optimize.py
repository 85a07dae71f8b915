"""Losses -> gradients -> parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pipeline.training.optim_scheduler import Constant
from pipeline.training.optimize import optimize


def parts() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(2, 1)


def loss_of(first: nn.Module, second: nn.Module) -> Tensor:
    loss: Tensor = second(first(torch.linspace(-1, 1, 12).view(4, 3)).relu()).square().mean()
    return loss


def test_several_optimizers_each_step_their_own_parameters_from_one_backward() -> None:
    ours, theirs = parts(), parts()
    schedulers = [Constant("SGD", {"lr": 0.1}, ours[0], None), Constant("Adam", {"lr": 0.01}, ours[1], None)]
    optimizers = [torch.optim.SGD(theirs[0].parameters(), 0.1), torch.optim.Adam(theirs[1].parameters(), 0.01)]
    for _ in range(3):
        assert optimize({"loss": loss_of(*ours)}, schedulers, epoch=0)
        loss_of(*theirs).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own.weight, other.weight)
        assert torch.equal(own.bias, other.bias)


def test_only_the_loss_named_loss_is_trained_on() -> None:
    ours, theirs = parts(), parts()
    loss = loss_of(*ours)
    optimize({"regularizer": loss * 100, "loss": loss}, [Constant("SGD", {"lr": 0.1}, ours[1], None)], epoch=0)
    loss_of(*theirs).backward()
    torch.optim.SGD(theirs[1].parameters(), 0.1).step()
    assert torch.equal(ours[1].weight, theirs[1].weight)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(factor: float) -> None:
    model = parts()[0]
    before = model.weight.detach().clone()
    scheduler = Constant("Adam", {"lr": 0.1}, model)
    assert not optimize({"loss": model(torch.ones(1, 3)).square().sum() * factor}, [scheduler], epoch=0)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert not scheduler.optimizer.state
    assert scheduler.real_step == 0
