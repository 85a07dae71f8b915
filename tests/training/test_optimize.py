"""Losses -> gradients -> parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import DataError
from pipeline.training.optimize import close, optimize
from pipeline.training.schedules import Constant


def parts() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(2, 1)


def loss_of(first: nn.Module, second: nn.Module) -> Tensor:
    loss: Tensor = second(first(torch.linspace(-1, 1, 12).view(4, 3)).relu()).square().mean()
    return loss


def test_several_optimizers_each_step_their_own_parameters_from_one_backward() -> None:
    ours, theirs = parts(), parts()
    schedulers = [
        Constant("SGD", {"lr": 0.1}, ours[0], grad_clip=None),
        Constant("Adam", {"lr": 0.01}, ours[1], grad_clip=None),
    ]
    optimizers = [torch.optim.SGD(theirs[0].parameters(), 0.1), torch.optim.Adam(theirs[1].parameters(), 0.01)]
    for _ in range(3):
        assert optimize({"loss": loss_of(*ours)}, schedulers, epoch=0) == (True, True)
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
    optimize(
        {"regularizer": loss * 100, "loss": loss}, [Constant("SGD", {"lr": 0.1}, ours[1], grad_clip=None)], epoch=0
    )
    loss_of(*theirs).backward()
    torch.optim.SGD(theirs[1].parameters(), 0.1).step()
    assert torch.equal(ours[1].weight, theirs[1].weight)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(factor: float) -> None:
    model = parts()[0]
    before = model.weight.detach().clone()
    scheduler = Constant("Adam", {"lr": 0.1}, model)
    done = optimize({"loss": model(torch.ones(1, 3)).square().sum() * factor}, [scheduler], epoch=0)
    assert done == (False, True)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert not scheduler.optimizer.state
    assert scheduler.real_step == 1


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of these sizes, in double precision."""
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 3, generator=random, dtype=torch.double), torch.randn(size, 1, dtype=torch.double, generator=random))
            for size in sizes]  # fmt: skip


def line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.double)


def mse(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), target)


WINDOWS = [
    (1, [4, 4, 4], [[0], [1], [2]]),
    (2, [4, 4, 4, 4], [[0, 1], [2, 3]]),
    (2, [4, 4, 3], [[0, 1], [2]]),
    (4, [4, 4, 4, 4, 4, 2], [[0, 1, 2, 3], [4, 5]]),
    (4, [5, 1, 2], [[0, 1, 2]]),
]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("accum", "sizes", "windows"), WINDOWS)
def test_an_accumulated_window_is_one_large_batch(
    accum: int, sizes: list[int], windows: list[list[int]], clip: float | None
) -> None:
    data, ours, theirs = batches(sizes), line(), line()
    scheduler = Constant("SGD", {"lr": 0.1, "momentum": 0.9}, ours, accum_grad=accum, grad_clip=clip)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    for number, (inputs, target) in enumerate(data, 1):
        optimize({"loss": mse(ours, inputs, target)}, [scheduler], 0, len(inputs), last=number == len(data))
    for window in windows:
        optimizer.zero_grad()
        mse(theirs, *(torch.cat([data[index][part] for index in window]) for part in (0, 1))).backward()
        if clip:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        optimizer.step()
    assert scheduler.real_step == len(windows)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=0)


def test_a_pass_without_a_known_end_is_closed_afterwards() -> None:
    ours, theirs = line(), line()
    scheduler = Constant("SGD", {"lr": 0.1}, ours, accum_grad=4, grad_clip=None)
    ((inputs, target),) = batches([3])
    assert optimize({"loss": mse(ours, inputs, target)}, [scheduler], 0, 3) == (True, False)
    assert close([scheduler], 0) is True
    assert close([scheduler], 0) is False
    mse(theirs, inputs, target).backward()
    torch.optim.SGD(theirs.parameters(), 0.1).step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=0)


def test_a_loss_that_is_not_finite_discards_its_whole_window() -> None:
    model, data = line(), batches([4, 4, 4, 4])
    before = model.weight.detach().clone()
    scheduler = Constant("SGD", {"lr": 0.1}, model, accum_grad=2, grad_clip=None)
    for index, (inputs, target) in enumerate(data[:2]):
        optimize({"loss": mse(model, inputs, target) * (math.nan if index else 1)}, [scheduler], 0, 4)
    assert torch.equal(model.weight, before)
    for inputs, target in data[2:]:
        optimize({"loss": mse(model, inputs, target)}, [scheduler], 0, 4)
    other = line()
    mse(other, *(torch.cat([each[part] for each in data[2:]]) for part in (0, 1))).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("accum", [1, 2])
def test_two_losses_of_one_graph_reach_each_scheduler_alone(accum: int) -> None:
    (first, second), (one, two) = parts(), parts()
    schedulers = [Constant("SGD", {"lr": 0.1}, first, optim_loss="a", accum_grad=accum, grad_clip=None),
                  Constant("SGD", {"lr": 0.2}, second, optim_loss="b", accum_grad=accum, grad_clip=None)]  # fmt: skip
    for _ in range(accum):
        loss = loss_of(first, second)
        losses = {"a": loss * 2, "b": loss.square()}
        kept = {name: each.item() for name, each in losses.items()}
        optimize(losses, schedulers, 0, 4)
        assert kept == {name: each.item() for name, each in losses.items()}
    loss = loss_of(one, two)
    for parameters, objective, rate in ((one.parameters(), loss * 2, 0.1), (two.parameters(), loss.square(), 0.2)):
        own = list(parameters)
        gradients = torch.autograd.grad(objective, own, retain_graph=True)
        with torch.no_grad():
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.sub_(rate * gradient)
    torch.testing.assert_close([*first.parameters(), *second.parameters()], [*one.parameters(), *two.parameters()])


def test_a_gradient_that_is_not_finite_is_discarded_where_the_norm_is_at_hand() -> None:
    for settings in ({"grad_clip": 1.0}, {"grad_clip": None}):
        model = line()
        before = model.weight.detach().clone()
        scheduler = Constant("SGD", {"lr": 0.1}, model, **settings)
        scheduler.check_gradients = True
        # The root's slope at nought is infinite.
        optimize({"loss": (model.weight * 0).sum().sqrt()}, [scheduler], 0)
        assert torch.equal(model.weight, before)


WRONG = [
    ({"lss": torch.ones(())}, "there is no loss 'loss', which an OptimScheduler descends; did you mean 'lss'?"),
    (
        {"loss": torch.ones(())},
        "the loss 'loss' has no gradient; compute it from the model's output, outside of torch.no_grad()",
    ),
]


@pytest.mark.parametrize(("losses", "message"), WRONG)
def test_a_loss_that_cannot_be_descended_is_refused(losses: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DataError) as caught:
        optimize(losses, [Constant("SGD", {"lr": 0.1}, line())], 0)
    assert str(caught.value) == message
