"""One optimizer and its learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline import OptimScheduler
from pipeline.errors import ClassPathError, ConfigError
from pipeline.training.schedules import Constant


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def backward(model: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 3, generator=random)).square().sum().backward()


class Halving(OptimScheduler):
    """Half the rate with every step, and a tenth with every epoch."""

    def sche_init(self, **sche_conf: Any) -> None:
        self.seen: list[tuple[int, int]] = []
        self.factor = sche_conf.get("factor", 0.5)

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        self.seen.append((real_step, epoch_num))
        return 0.8 * self.factor**real_step / 10 ** (epoch_num - 1)


class TwoRates(torch.optim.SGD):
    """The first parameter at the rate, the others at a tenth of it."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__([{"params": parameters[:1], "lr": lr}, {"params": parameters[1:], "lr": lr / 10}])


@pytest.mark.parametrize(
    ("kind", "settings", "clip", "norm"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}, None, 2.0),
        ("Adam", {"lr": 0.01}, None, 2.0),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, 0.5, 2.0),
        ("SGD", {"lr": 0.1}, 0.5, float("inf")),
    ],
)
def test_its_steps_are_those_of_the_optimizer_by_hand(
    kind: str, settings: dict[str, float], clip: float | None, norm: float
) -> None:
    ours, theirs = seeded(), seeded()
    scheduler = Constant(kind, settings, ours, grad_clip=clip, grad_norm_type=norm)
    optimizer = getattr(torch.optim, kind)(theirs.parameters(), **settings)
    for step in range(4):
        backward(ours, step)
        scheduler.apply(epoch=0)
        optimizer.zero_grad()
        backward(theirs, step)
        if clip:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip, norm)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_made_by_hand_it_clips_at_a_norm_of_one() -> None:
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    scheduler = Constant("SGD", {"lr": 1.0}, model)
    model.weight.grad = torch.tensor([[30.0, 40.0, 0.0]])
    scheduler.apply(epoch=0)
    assert torch.allclose(before - model.weight, torch.tensor([[0.6, 0.8, 0.0]]), atol=1e-6)


@pytest.mark.parametrize("kind", ["Adam", "ADAM", "adam", "torch.optim.Adam", "torch.optim:Adam", torch.optim.Adam])
def test_the_optimizer_is_named_in_any_case_by_path_or_by_class(kind: Any) -> None:
    assert type(Constant(kind, {"lr": 0.1}, seeded()).optimizer) is torch.optim.Adam


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Adm", r"'Adm'.*did you mean 'Adam'"),
        ("torch.nn.Linear", r"'torch.nn.Linear'.*torch\.optim\.optimizer:Optimizer"),
        (nn.Linear, r"Linear.*torch\.optim\.optimizer:Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused_with_what_is_wanted(kind: Any, message: str) -> None:
    with pytest.raises(ClassPathError, match=message):
        Constant(kind, {"lr": 0.1}, seeded())


def test_frozen_parameters_are_neither_optimized_nor_needed() -> None:
    model = seeded()
    model[0].requires_grad_(False)
    scheduler = Constant("SGD", {"lr": 0.1}, model)
    assert [id(each) for each in scheduler.parameters] == [id(each) for each in model[1].parameters()]


@pytest.mark.parametrize("model", [seeded().requires_grad_(False), nn.ReLU()])
def test_a_model_without_a_trained_parameter_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        ConfigError, match=f"{type(model).__name__} has no parameter that is trained; set requires_grad"
    ):
        Constant("SGD", {"lr": 0.1}, model)


def test_a_constant_rate_refuses_the_arguments_of_a_schedule() -> None:
    with pytest.raises(ConfigError, match="takes no arguments, and was given warmup; remove"):
        Constant("SGD", {"lr": 0.1}, seeded(), warmup=3)


def test_a_schedule_is_asked_with_steps_and_epochs_counted_from_one() -> None:
    scheduler = Halving("SGD", {"lr": 0.8}, seeded(), factor=0.25)
    for epoch in (0, 0, 1):
        scheduler.apply(epoch)
    assert scheduler.seen == [(1, 1), (2, 1), (3, 2)]
    assert scheduler.real_step == 3
    assert scheduler.get_lr() == pytest.approx(0.8 * 0.25**3 / 10)


def test_the_rate_of_a_step_is_set_before_the_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    scheduler = Halving("SGD", {"lr": 0.8}, model, grad_clip=None)
    model.weight.grad = torch.ones(1, 1)
    scheduler.apply(epoch=0)
    assert model.weight.item() == pytest.approx(before - 0.4)


def test_the_groups_of_an_optimizer_keep_the_ratio_of_their_rates() -> None:
    scheduler = Halving(TwoRates, {"lr": 0.8}, seeded())
    rates = []
    for _ in range(3):
        scheduler.apply(epoch=0)
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
    assert rates == [pytest.approx([rate, rate / 10]) for rate in (0.4, 0.2, 0.1)]


def test_gradients_are_forgotten_after_a_step() -> None:
    model = seeded()
    scheduler = Constant("SGD", {"lr": 0.1}, model)
    backward(model, 0)
    scheduler.apply(epoch=0)
    assert all(parameter.grad is None for parameter in model.parameters())
