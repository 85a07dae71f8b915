"""What keeps numbers that are not finite from the weights.

What a loss on a GPU does to the guard, ``record_loss`` does here to one on the CPU: fused optimizers skip there as well."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.optim.nonfinite import NonFiniteGuard
from pipeline.optim.optim_scheduler import optimize
from pipeline.optim.schedules import Constant
from tests.training.conftest import in_turn

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused Adam": lambda parameters: Adam(parameters, 0.1, fused=True),
    "fused AdamW": lambda parameters: AdamW(parameters, 0.1, weight_decay=0.1, fused=True),
    "fused amsgrad": lambda parameters: Adam(parameters, 0.1, amsgrad=True, fused=True),
    "fused SGD": lambda parameters: SGD(parameters, 0.1, weight_decay=0.1, fused=True),
    "fused SGD with momentum": lambda parameters: SGD(parameters, 0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda parameters: Adagrad(parameters, 0.1, fused=True),
    "Adam": lambda parameters: Adam(parameters, 0.1),
    "SGD with momentum": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def watched(model: nn.Module, make: Callable[[Any], Optimizer]) -> NonFiniteGuard:
    return NonFiniteGuard(make(model.parameters()), dict(model.named_parameters()))


def window(guard: NonFiniteGuard, loss: float, *, slope: float = 1.0, norm: bool = False) -> bool:
    """One window as a scheduler does it on a GPU; whether the optimizer was called."""
    parameters = list(guard.names.values())
    for index, each in enumerate(parameters):
        each.grad = torch.full_like(each, slope * (index + 1))
    guard.record_loss(torch.tensor(loss))
    gradients = [each.grad for each in parameters if each.grad is not None]
    called = guard.allows_step(nn.utils.get_total_norm(gradients) if norm else None, parameters, gradients)
    if called:
        guard.optimizer.step()
    guard.close()
    return called


def everything(guard: NonFiniteGuard) -> list[Tensor]:
    """Weights and the optimizer's state, copied."""
    states = [each for state in guard.optimizer.state.values() for each in state.values()]
    return [each.detach().clone() for each in (*guard.names.values(), *states)]


@in_turn("bad", [math.nan, math.inf, -math.inf])
@in_turn(("kind", "make"), MAKERS.items())
def test_a_bad_loss_leaves_weights_and_optimizer_as_they_were(make: Callable[[Any], Optimizer], bad: float) -> None:
    guard = watched(net(), make)
    window(guard, 1.0)
    before = everything(guard)
    window(guard, bad)
    assert all(torch.equal(one, other) for one, other in zip(everything(guard), before, strict=True))


@in_turn(("kind", "make"), MAKERS.items())
def test_a_bad_first_loss_changes_nothing_of_what_follows(make: Callable[[Any], Optimizer]) -> None:
    guard, other = watched(net(), make), watched(net(), make)
    window(guard, math.nan)
    for each in (guard, other):
        window(each, 1.0)
        window(each, 2.0, slope=-0.5)
    assert all(torch.equal(one, two) for one, two in zip(everything(guard), everything(other), strict=True))


@in_turn(("kind", "make"), MAKERS.items())
def test_bad_gradients_leave_weights_and_optimizer_as_they_were(make: Callable[[Any], Optimizer]) -> None:
    guard = watched(net(), make)
    window(guard, 1.0, norm=True)
    before = everything(guard)
    window(guard, 1.0, slope=math.inf, norm=True)
    assert all(torch.equal(one, other) for one, other in zip(everything(guard), before, strict=True))


@in_turn(("kind", "make"), MAKERS.items())
def test_finite_windows_are_steps_of_the_optimizer_alone(make: Callable[[Any], Optimizer]) -> None:
    model, guard = net(), watched(net(), make)
    optimizer = make(model.parameters())
    for slope in (1.0, -0.3):
        window(guard, 1.0, slope=slope, norm=True)
        for index, each in enumerate(model.parameters()):
            each.grad = torch.full_like(each, slope * (index + 1))
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(guard.names.values(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "called"), [("fused Adam", True), ("fused SGD", True), ("Adam", False), ("SGD with momentum", False)]
)
def test_only_an_optimizer_that_skips_by_itself_is_called_with_a_bad_loss(kind: str, called: bool) -> None:
    assert window(watched(net(), MAKERS[kind]), math.nan) is called


def test_a_fused_sgd_is_not_called_until_each_group_has_its_momentum() -> None:
    model = net()
    groups = [{"params": each.parameters()} for each in model]
    guard = watched(model, lambda _: SGD(groups, 0.1, momentum=0.9, fused=True))
    for each in model[0].parameters():
        each.grad = torch.ones_like(each)
    guard.optimizer.step()
    assert window(guard, math.nan) is False
    assert window(guard, 1.0) is True
    assert window(guard, math.nan) is True


def test_an_optimizer_whose_loaded_state_switched_its_kernel_is_not_told_what_it_cannot_take() -> None:
    plain, guard = watched(net(), MAKERS["Adam"]), watched(net(), MAKERS["fused Adam"])
    window(plain, 1.0)
    guard.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    assert window(guard, math.nan) is False
    assert window(guard, 1.0) is True


def test_the_optimizer_is_not_told_of_one_window_in_the_next() -> None:
    guard = watched(net(), MAKERS["fused Adam"])
    window(guard, math.nan)
    assert guard.loss is None
    assert guard.optimizer.found_inf is None  # type: ignore[attr-defined]
    before = everything(guard)
    guard.optimizer.step()
    assert not torch.equal(everything(guard)[0], before[0])


@pytest.mark.parametrize("kind", ["fused Adam", "Adam"])
def test_windows_are_counted_for_their_gradients_where_the_loss_was_finite(kind: str) -> None:
    guard = watched(net(), MAKERS[kind])
    for loss, slope in ((1.0, 1.0), (1.0, math.nan), (math.nan, math.nan), (math.inf, 1.0), (1.0, math.inf)):
        window(guard, loss, slope=slope, norm=True)
    assert guard.read() == 2
    assert guard.parameter == "0.weight"
    assert guard.read() == 2
    guard.reset()
    assert (guard.read(), guard.parameter) == (0, "")


def spoiled(model: nn.Sequential, name: str, without: str) -> list[Tensor]:
    """The parameters, one of which has a gradient that is not finite, and one none."""
    for other, each in model.named_parameters():
        each.grad = None if other == without else torch.full_like(each, math.nan if other == name else 1.0)
    return list(model.parameters())


@pytest.mark.parametrize("noted", [True, False])
def test_the_first_bad_parameter_of_the_first_such_window_is_named(noted: bool) -> None:
    model = net()
    guard = watched(model, MAKERS["Adam"])
    for name, without in (("1.weight", "0.weight"), ("0.bias", "1.weight")):
        parameters = spoiled(model, name, without)
        if noted:
            guard.record_loss(torch.tensor(1.0))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        assert guard.allows_step(torch.tensor(math.nan), parameters, gradients) is False
        guard.close()
    assert guard.read() == 2
    assert guard.parameter == "1.weight"


class Norms(TorchDispatchMode):
    """Counts how often the norms of gradients are computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in {torch.ops.aten._foreach_norm.Scalar, torch.ops.aten.linalg_vector_norm.default}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtypes", [[torch.float32] * 4, [torch.float32, torch.float64] * 2])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_on_a_device_the_norm_is_that_of_torch_and_tells_whose_gradient_is_bad(norm_type: float, dtypes: Any) -> None:
    guard = watched(net(), MAKERS["fused Adam"])
    parameters = [nn.Parameter(torch.randn(5, 3, dtype=dtype)) for dtype in dtypes]
    guard.names = {str(index): parameter for index, parameter in enumerate(parameters)}
    for bad in (None, 2, 1):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter) * (math.nan if index == bad else 1)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        guard.record_loss(torch.tensor(1.0))
        norm = guard.norm_of(gradients, norm_type)
        assert torch.equal(norm.isnan(), torch.tensor(bad is not None))
        assert bad is not None or torch.equal(norm, nn.utils.get_total_norm(gradients, norm_type))
        guard.allows_step(norm, parameters, gradients)
        guard.close()
    assert (guard.read(), guard.parameter) == (2, "2")


def test_on_a_device_the_norm_of_each_gradient_is_computed_once() -> None:
    guard, parameters = watched(net(), MAKERS["fused Adam"]), [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    guard.record_loss(torch.tensor(1.0))
    gradients = [torch.ones(2)] * 3
    with Norms() as norms:
        guard.allows_step(guard.norm_of(gradients, 2.0), parameters, gradients)
    assert norms.count == 2  # of each, and of these


def root(model: nn.Module) -> Tensor:
    """0, whose slope is not finite: that of a root at nought."""
    return (model[1].bias * 0).sum().sqrt() + (model[0].weight * 0).sum()  # type: ignore[index]


def test_what_nobody_looks_at_is_not_claimed() -> None:
    model = net()
    scheduler = Constant("SGD", {"lr": 0.1}, model, grad_clip=None)
    assert optimize({"loss": root(model)}, [scheduler], 0) == (True, True)
    assert (scheduler.guard.read(), scheduler.guard.parameter) == (0, "")
    assert model[1].bias.isnan().all()


@pytest.mark.parametrize(("clip", "check"), [(1.0, False), (None, True), (1.0, True)])
def test_where_a_norm_is_at_hand_the_window_is_discarded_counted_and_named(clip: float | None, check: bool) -> None:
    model, accum = net(), 2
    before = copy.deepcopy(model.state_dict())
    scheduler = Constant("Adam", {"lr": 0.1}, model, grad_clip=clip, accum_grad=accum)
    scheduler.check_gradients = check
    for loss in (root(model), model(torch.ones(1, 3)).sum()):
        optimize({"loss": loss}, [scheduler], 0)
    assert (scheduler.guard.read(), scheduler.guard.parameter) == (1, "1.bias")
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert not scheduler.optimizer.state
