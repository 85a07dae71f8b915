"""The learning rates of the schedules, against their formulas and torch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.schedules import (
    Constant,
    ExponentialDecay,
    Noam,
    Plateau,
    TorchSchedule,
    WarmupCosine,
    WarmupLinear,
)
from tests.training.conftest import in_turn


def built(cls: type[OptimScheduler], lr: float = 0.1, **conf: Any) -> OptimScheduler:
    return cls("SGD", {"lr": lr}, nn.Linear(2, 1), **conf)


def rates(scheduler: OptimScheduler, windows: int, per_epoch: int = 1 << 30) -> list[float]:
    """The rate with which each window steps."""
    found = []
    for window in range(windows):
        scheduler.parameters[0].grad = torch.zeros_like(scheduler.parameters[0])
        scheduler.apply(epoch=window // per_epoch)
        found.append(scheduler.get_lr())
    return found


def test_noam_is_the_published_curve() -> None:
    found = rates(built(Noam, warmup_steps=10), 40)
    assert [round(found[step - 1], 4) for step in (1, 5, 10, 20, 40)] == [0.01, 0.05, 0.1, 0.0707, 0.05]


def test_noam_with_a_width_takes_its_factor_from_it() -> None:
    found = rates(built(Noam, d_model=64, warmup_steps=4), 9)
    assert found == pytest.approx([64**-0.5 * min(s**-0.5, s * 4**-1.5) for s in range(1, 10)])


def test_exponential_decay_and_the_finetuning_factor_scale_the_base_rate() -> None:
    found = rates(built(ExponentialDecay, decay_factor=0.9, ft_factor=0.5), 6, per_epoch=2)
    assert found == pytest.approx([0.05, 0.05, 0.045, 0.045, 0.0405, 0.0405])


def test_the_decay_of_an_epoch_does_not_compound_over_its_windows() -> None:
    found = rates(built(ExponentialDecay, decay_factor=0.5, ft_factor=0.5), 300, per_epoch=100)
    assert found == pytest.approx([0.05] * 100 + [0.025] * 100 + [0.0125] * 100)


SHIPPED: list[tuple[type[OptimScheduler], dict[str, Any]]] = [
    (Constant, {}),
    (Noam, {"warmup_steps": 5}),
    (Noam, {"warmup_steps": 5, "d_model": 16}),
    (ExponentialDecay, {"decay_factor": 0.9}),
    (WarmupLinear, {"total_steps": 20, "warmup_steps": 3}),
    (WarmupCosine, {"total_steps": 20, "warmup_steps": 3}),
    (Plateau, {}),
    (TorchSchedule, {"schedule": "CosineAnnealingLR", "args": {"T_max": 5}}),
    (TorchSchedule, {"schedule": "StepLR", "args": {"step_size": 1}, "per": "epoch"}),
]


@in_turn(("cls", "conf"), SHIPPED)
def test_the_finetuning_factor_scales_each_rate_of_a_schedule_and_nothing_else(
    cls: type[OptimScheduler], conf: dict[str, Any]
) -> None:
    plain = rates(built(cls, **conf), 25, per_epoch=5)
    assert rates(built(cls, ft_factor=0.25, **conf), 25, per_epoch=5) == pytest.approx([0.25 * rate for rate in plain])


@in_turn(("cls", "conf"), SHIPPED)
def test_groups_keep_the_ratio_of_their_rates_under_each_schedule(
    cls: type[OptimScheduler], conf: dict[str, Any]
) -> None:
    def grouped(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 3 * lr}], lr=lr)

    single, double = built(cls, **conf), cls(grouped, {"lr": 0.1}, nn.Linear(2, 1), **conf)
    for window in range(25):
        for each in (single, double):
            each.apply(epoch=window // 5)
        first, second = double.optimizer.param_groups
        assert [first["lr"], second["lr"]] == pytest.approx([single.get_lr(), 3 * single.get_lr()])


def multiplied(optim_scheduler: OptimScheduler) -> None:
    for group in optim_scheduler.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


def replaced(optim_scheduler: OptimScheduler) -> None:
    first, second = optim_scheduler.optimizer.param_groups
    first["lr"], second["lr"] = 0.3, 0.7


def moves(scheduler: OptimScheduler, windows: int) -> list[list[float]]:
    """How far each group moves in each window; every gradient is 1, so it is the rate with which the group steps."""
    found = []
    for window in range(windows):
        before = [parameter.detach().clone() for parameter in scheduler.parameters]
        for parameter in scheduler.parameters:
            parameter.grad = torch.ones_like(parameter)
        scheduler.apply(epoch=window // 3)
        pairs = zip(before, scheduler.parameters, strict=True)
        found.append([float((old - new.detach()).flatten()[0]) for old, new in pairs])
    return found


def two_groups(cls: type[OptimScheduler], lr: Any = 0.1, **conf: Any) -> OptimScheduler:
    def grouped(parameters: list[nn.Parameter], lr: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 3 * lr}], lr=lr)

    torch.manual_seed(0)
    return cls(grouped, {"lr": lr}, nn.Linear(2, 1), grad_clip=None, **conf)


@in_turn(("cls", "conf"), SHIPPED)
def test_a_rate_that_is_multiplied_before_an_update_holds_for_that_one_under_each_schedule(
    cls: type[OptimScheduler], conf: dict[str, Any]
) -> None:
    watched, plain = two_groups(cls, **conf), two_groups(cls, **conf)
    watched.before_update = multiplied
    expected = [[0.5 * rate for rate in groups] for groups in moves(plain, 6)]
    assert moves(watched, 6) == [pytest.approx(groups, abs=1e-6) for groups in expected]
    assert (watched.rate, watched.get_lr()) == (0.5 * plain.get_lr(), plain.get_lr())


@in_turn(("cls", "conf"), SHIPPED)
def test_a_rate_that_is_replaced_before_an_update_holds_for_that_one_under_each_schedule(
    cls: type[OptimScheduler], conf: dict[str, Any]
) -> None:
    watched, plain = two_groups(cls, **conf), two_groups(cls, **conf)
    expected = moves(plain, 6)
    watched.before_update = lambda optim_scheduler: optim_scheduler.real_step == 3 and replaced(optim_scheduler)
    expected[2] = [0.3, 0.7]
    assert moves(watched, 6) == [pytest.approx(groups, abs=1e-6) for groups in expected]
    assert watched.get_lr() == plain.get_lr()


def test_a_rate_that_is_a_tensor_is_the_same_tensor_after_an_update_that_had_another() -> None:
    rate = torch.tensor(0.5)
    scheduler = Constant("Adam", {"lr": rate, "capturable": False}, nn.Linear(2, 1), grad_clip=None)
    scheduler.before_update = lambda optim_scheduler: rate.mul_(0.1)
    moves(scheduler, 3)
    assert scheduler.optimizer.param_groups[0]["lr"] is rate
    assert (float(rate), float(scheduler.rate or 0)) == (0.5, pytest.approx(0.05))


def test_the_numbers_of_an_update_are_its_rate_and_the_norm_that_clipping_has_computed() -> None:
    scheduler, clipping = two_groups(Constant), Constant("SGD", {"lr": 0.1}, nn.Linear(2, 1), grad_clip=1.0)
    assert (clipping.rate, clipping.gradient_norm) == (None, None)
    moves(scheduler, 1)
    moves(clipping, 1)
    assert (scheduler.rate, scheduler.gradient_norm) == (0.1, None)
    # Three gradients of 1.
    assert (clipping.rate, clipping.gradient_norm) == (0.1, pytest.approx(math.sqrt(3)))


def test_a_constant_rate_stays_what_somebody_sets_in_the_optimizer() -> None:
    scheduler = built(Constant)
    scheduler.optimizer.param_groups[0]["lr"] = 0.7
    assert rates(scheduler, 3) == [0.7] * 3


@pytest.mark.parametrize(
    ("cls", "shape"), [(WarmupLinear, lambda x: 1 - x), (WarmupCosine, lambda x: (1 + math.cos(math.pi * x)) / 2)]
)
def test_a_warmup_rises_to_the_base_rate_and_falls_to_the_rest(cls: type[OptimScheduler], shape: Any) -> None:
    found = rates(built(cls, total_steps=10, warmup_steps=4, final=0.2), 12)
    rise = [0.1 * step / 4 for step in range(1, 4)]
    fall = [0.1 * (0.2 + 0.8 * shape(min((step - 4) / 6, 1))) for step in range(4, 13)]
    assert found == pytest.approx(rise + fall)


def test_a_plateau_falls_after_its_patience_and_keeps_its_state() -> None:
    scheduler, falls = built(Plateau, patience=1, factor=0.5, min_lr=0.03), []
    for value in (1.0, 0.9, 0.95, 0.91, math.nan, 0.92, 0.92, 0.93):
        scheduler.take_metrics({"valid_loss": value})
        falls += rates(scheduler, 1)
    assert falls == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.05, 0.03, 0.03, 0.03])
    other = built(Plateau, patience=1, factor=0.5, min_lr=0.03)
    other.load_state_dict(scheduler.state_dict())
    assert other.schedule_state() == scheduler.schedule_state()
    assert other.real_step == 8


TORCH = [
    ("CosineAnnealingLR", {"T_max": 5}),
    ("StepLR", {"step_size": 2, "gamma": 0.3}),
    ("OneCycleLR", {"max_lr": 0.3, "total_steps": 9, "cycle_momentum": False}),
]


@pytest.mark.parametrize(("name", "args"), TORCH)
def test_a_schedule_of_torch_gives_what_it_gives_torch(name: str, args: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule, expected = getattr(torch.optim.lr_scheduler, name)(optimizer, **args), []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(built(TorchSchedule, schedule=name, args=args), 8) == pytest.approx(expected)


def test_a_schedule_of_torch_goes_on_where_it_was() -> None:
    whole = rates(built(TorchSchedule, schedule="CosineAnnealingLR", args={"T_max": 5}), 8)
    first = built(TorchSchedule, schedule="CosineAnnealingLR", args={"T_max": 5})
    rates(first, 3)
    second = built(TorchSchedule, schedule="CosineAnnealingLR", args={"T_max": 5})
    second.load_state_dict(first.state_dict())
    assert rates(second, 5) == pytest.approx(whole[3:])


def test_updates_come_every_so_many_windows() -> None:
    scheduler = Constant(
        "SGD", {"lr": 1.0}, nn.Linear(1, 1, bias=False), step_per_update=2, accum_grad=2, grad_clip=None
    )
    weight, seen = scheduler.parameters[0], []
    for step in range(1, 13):
        before = weight.item()
        scheduler.step({"loss": weight.sum()}, step_num=step)
        seen += [step] if weight.item() != before else []
    assert seen == [4, 8, 12]
    assert scheduler.real_step == 6


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Constant, {"grad_clip": 0.0}, "grad_clip is 0.0; it must be above 0; None does not clip"),
    (Constant, {"grad_clip": -1.0}, "grad_clip is -1.0; it must be above 0; None does not clip"),
    (Constant, {"accum_grad": 0}, "accum_grad is 0; it must be above 0"),
    (Constant, {"step_per_update": 0}, "step_per_update is 0; it must be above 0"),
    (Constant, {"gamma": 1}, "a constant rate takes no arguments, and was given gamma; remove them"),
    (Constant, {"updated_modules": "encodr"}, "updated_modules: Linear has no part 'encodr'; there are none"),
    (Noam, {"warmup_steps": 0}, "Noam: warmup_steps is 0; it must be 1 or more"),
    (Noam, {"d_model": 0}, "d_model is 0; write the model's width, a whole number of 1 or more"),
    (Noam, {"d_model": "64"}, "d_model is '64'; write the model's width, a whole number of 1 or more"),
    (ExponentialDecay, {"decay_factor": 1.5}, "decay_factor is 1.5; write one above 0, and at most 1"),
    (WarmupLinear, {"total_steps": 3, "warmup_steps": 3}, "warmup_steps is 3 and total_steps 3; the rise must end before the total"),
    (Plateau, {"mode": "lower"}, "Plateau: mode is 'lower', factor 0.1; write min or max, and one between 0 and 1"),
    (TorchSchedule, {"schedule": "ReduceLROnPlateau"}, "ReduceLROnPlateau needs a metric; use Plateau"),
    (WarmupLinear, {"total_steps": 3, "warmup_steps": -1}, "WarmupLinear: warmup_steps is -1; it must be 0 or more"),
    (Noam, {"warmup_steps": 1.5}, "Noam: warmup_steps is 1.5; write a whole number of steps, or a share of them"),
    (TorchSchedule, {"schedule": "StepLR", "per": "batch"}, "TorchSchedule: per is 'batch'; write step or epoch"),
]  # fmt: skip


@in_turn(("cls", "conf", "message"), WRONG)
def test_a_wrong_argument_is_refused(cls: type[OptimScheduler], conf: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(cls, **conf)
    assert message in str(caught.value)


def test_a_plateau_without_its_metric_says_what_there_is() -> None:
    with pytest.raises(
        ConfigError,
        match="watches 'valid_loss', and the validation reports valid_auc; compute_objectives returned none",
    ):
        built(Plateau).take_metrics({"valid_auc": 0.7})


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, when its compiler is imported
@pytest.mark.parametrize("modules", ["body", ["body"], ["body.0", "body.1"]])
def test_it_is_confined_to_the_modules_that_it_names_also_when_they_are_compiled(modules: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), nn.Linear(3, 1)

    net = Net()
    for model in (net, torch.compile(net)):
        scheduler = Constant("SGD", {"lr": 0.1}, model, updated_modules=modules)
        assert {id(each) for each in scheduler.parameters} == {id(each) for each in net.body.parameters()}
        assert not scheduler.owns_all
