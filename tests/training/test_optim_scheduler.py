"""One optimizer and its learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import OptimScheduler
from pipeline.errors import ClassPathError, ConfigError
from pipeline.optim.optim_scheduler import optimize
from pipeline.optim.schedules import Constant, ExponentialDecay, Noam, Plateau, TorchSchedule
from tests.training.conftest import in_turn


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


def seen_at(accum_grad: int, steps: range, **conf: Any) -> list[tuple[int, int]]:
    """(step_num, real_step) of each step by hand that asks the schedule."""
    model = nn.Linear(1, 1)
    scheduler, found = Halving("SGD", {"lr": 0.1}, model, accum_grad=accum_grad, **conf), []
    for step_num in steps:
        asked = len(scheduler.seen)
        scheduler.step({"loss": model.weight.sum()}, step_num=step_num)
        found += [(step_num, real_step) for real_step, _ in scheduler.seen[asked:]]
    return found


@pytest.mark.parametrize("accum_grad", [1, 2, 3])
def test_the_real_step_of_a_window_is_that_of_its_batches(accum_grad: int) -> None:
    assert seen_at(accum_grad, range(1, 13)) == [(step, (step - 1) // accum_grad + 1) for step in range(1, 13)]


def test_a_schedule_that_acts_in_every_second_window_is_asked_with_the_number_of_its_window() -> None:
    assert seen_at(2, range(1, 13), step_per_update=2) == [(3, 2), (4, 2), (7, 4), (8, 4), (11, 6), (12, 6)]


def test_a_step_by_hand_says_where_it_is() -> None:
    assert seen_at(2, range(101, 105)) == [(101, 51), (102, 51), (103, 52), (104, 52)]


def test_a_step_by_hand_counts_on_without_a_number_and_tells_the_epoch() -> None:
    model = nn.Linear(1, 1)
    scheduler = Halving("SGD", {"lr": 0.1}, model, accum_grad=2)
    done = [scheduler.step({"loss": model.weight.sum()}, epoch_num=epoch) for epoch in (1, 1, 1, 2)]
    assert done == [True] * 4
    assert scheduler.seen == [(1, 1), (1, 1), (2, 1), (2, 2)]


def test_a_step_by_hand_says_that_the_loss_was_not_finite_and_is_timed_by_the_names_of_its_optimizer() -> None:
    model, timed = nn.Linear(1, 1), []

    @contextmanager
    def time_func(names: list[str]) -> Iterator[None]:
        timed.append(names)
        yield

    scheduler = Constant("SGD", {"lr": 0.1}, model)
    assert scheduler.step({"loss": model.weight.sum() * math.nan}, time_func, "gan") is False
    assert timed == [["loss_backward_time", "gan"], ["optim_time", "gan"]]


def test_a_step_by_hand_gives_no_gradient_to_parameters_that_are_not_its_own() -> None:
    one, other = nn.Linear(3, 4), nn.Linear(4, 1)
    schedulers = [Constant("SGD", {"lr": 0.1}, each, accum_grad=3, grad_clip=None) for each in (one, other)]
    for scheduler, own, foreign in ((schedulers[0], one, other), (schedulers[1], other, one)):
        kept = copy.deepcopy([each.grad for each in foreign.parameters()])
        scheduler.step({"loss": other(one(torch.ones(2, 3))).square().mean()})
        assert all(each.grad is not None for each in own.parameters())
        now = [each.grad for each in foreign.parameters()]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(kept, now, strict=True))


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_clipping_covers_all_groups_of_its_own_parameters_and_no_other_bit_for_bit(norm: float) -> None:
    ours, theirs = seeded(), seeded()
    scheduler = Constant(TwoRates, {"lr": 0.8}, ours, updated_modules="1", grad_clip=0.3, grad_norm_type=norm)
    optimizer = TwoRates(list(theirs[1].parameters()), 0.8)
    for step in range(3):
        for model in (ours, theirs):
            backward(model, step)
            model[0].weight.grad = torch.full((4, 3), 1e6)
        scheduler.apply(epoch=0)
        nn.utils.clip_grad_norm_(theirs[1].parameters(), 0.3, norm)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(ours[1].weight, theirs[1].weight)
    assert torch.equal(ours[1].bias, theirs[1].bias)
    assert torch.equal(ours[0].weight.grad, torch.full((4, 3), 1e6))


def test_none_does_not_clip() -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    model.weight.grad = torch.full((1, 1), 512.0)
    Constant("SGD", {"lr": 1.0}, model, grad_clip=None).apply(epoch=0)
    assert model.weight.item() == pytest.approx(before - 512)


def test_a_window_in_which_nothing_got_a_gradient_is_a_step_without_any() -> None:
    model = seeded()
    before = copy.deepcopy(model.state_dict())
    scheduler = Constant("SGD", {"lr": 0.1}, model, accum_grad=2)
    unrelated = torch.ones((), requires_grad=True)
    for _ in range(2):
        scheduler.step({"loss": unrelated * 2})
    assert scheduler.real_step == 1
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


@pytest.mark.parametrize("ft_factor", [0.5, 2.0])
def test_the_finetuning_factor_scales_a_constant_rate_once_in_every_group(ft_factor: float) -> None:
    scheduler = Constant(TwoRates, {"lr": 0.8}, seeded(), ft_factor=ft_factor)
    for _ in range(50):
        scheduler.apply(epoch=0)
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == pytest.approx(
        [0.8 * ft_factor, 0.08 * ft_factor]
    )


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.8)
    scheduler = Halving(lambda parameters: torch.optim.SGD(parameters, lr=rate), {}, seeded(), grad_clip=None)
    scheduler.apply(epoch=0)
    assert scheduler.optimizer.param_groups[0]["lr"] is rate
    assert scheduler.get_lr() == pytest.approx(0.4)


class FirstAtRest(torch.optim.SGD):
    """The first parameter at a rate of 0."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__([{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:], "lr": lr}])


def test_a_first_group_at_rest_has_no_ratio_to_the_others_that_a_schedule_could_keep() -> None:
    with pytest.raises(
        ConfigError, match=r"the base rate is 0, and the rates of the groups are 0, 0.8; make it above 0"
    ):
        Halving(FirstAtRest, {"lr": 0.8}, seeded())
    with pytest.raises(ConfigError, match="make it above 0"):
        Constant(FirstAtRest, {"lr": 0.8}, seeded(), ft_factor=0.5)
    assert Constant(FirstAtRest, {"lr": 0.8}, seeded()).get_lr() == 0.0


def test_a_function_that_makes_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="made a list; return a torch Optimizer"):
        Constant(lambda parameters: parameters, {}, seeded())


SCHEDULES: list[tuple[type[OptimScheduler], dict[str, Any]]] = [
    (Constant, {}),
    (Noam, {"warmup_steps": 3}),
    (ExponentialDecay, {"decay_factor": 0.5}),
    (Plateau, {"patience": 0}),
    (TorchSchedule, {"schedule": "CosineAnnealingLR", "args": {"T_max": 4}}),
]


def trained_for(scheduler: OptimScheduler, model: nn.Module, batches: range, bad: int = -1) -> None:
    """Train on batches of 1 to 3 samples, two epochs; one loss may be bad. A plateau is told what it falls by."""
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(index % 3 + 1, 3, generator=random) for index in range(12)]
    for index in batches:
        loss = model(inputs[index]).square().mean() * (math.nan if index == bad else 1)
        optimize({"loss": loss}, [scheduler], index // 6, len(inputs[index]), last=index % 6 == 5)
        if index == 5:
            scheduler.take_metrics({"valid_loss": 1.0})
            scheduler.take_metrics({"valid_loss": 1.0})


@in_turn("bad", [-1, 4, 8])
@in_turn("cut", [1, 5, 6, 9])
@in_turn(("cls", "conf"), SCHEDULES)
def test_another_goes_on_bit_for_bit_where_its_state_was_taken_also_within_a_window(
    cls: type[OptimScheduler], conf: dict[str, Any], cut: int, bad: int
) -> None:
    whole, first, second = seeded(), seeded(), seeded()
    made = [cls("Adam", {"lr": 0.05}, model, accum_grad=4, ft_factor=0.5, **conf) for model in (whole, first, second)]
    trained_for(made[0], whole, range(12), bad)
    trained_for(made[1], first, range(cut), bad)
    second.load_state_dict(first.state_dict())
    for each, other in zip(second.parameters(), first.parameters(), strict=True):
        each.grad = copy.deepcopy(other.grad)
    made[2].load_state_dict(copy.deepcopy(made[1].state_dict()))
    trained_for(made[2], second, range(cut, 12), bad)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert (made[0].real_step, made[0].get_lr()) == (made[2].real_step, made[2].get_lr())


def test_the_state_knows_of_a_bad_loss_that_a_gpu_has_not_told_yet() -> None:
    scheduler = Constant("Adam", {"lr": 0.05}, seeded(), accum_grad=4)
    assert scheduler.state_dict()["window"]["discards"] is False
    scheduler.guard.record_loss(torch.tensor(math.nan))
    assert scheduler.state_dict()["window"]["discards"] is True


def test_its_description_says_what_it_does() -> None:
    scheduler = Noam("adam", {"lr": 0.5}, seeded(), optim_loss="gan", accum_grad=2, grad_clip=None, warmup_steps=7)
    assert repr(scheduler) == (
        "Noam(optimizer=Adam, loss=gan, parameters=4, accum_grad=2, step_per_update=1, grad_clip=None, lr=0.5, "
        "warmup_steps=7)"
    )


# A scaler of gradients. In training it comes with fp16 on a GPU; its arithmetic is the same on a CPU.


def inputs_of_batches() -> list[Tensor]:
    """12 batches of 1 to 3 samples."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(index % 3 + 1, 3, generator=random) * 10 for index in range(12)]


@pytest.mark.parametrize("accum", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**126])
def test_a_scaler_scales_unscales_before_clipping_skips_and_adapts_as_in_a_loop_by_hand(
    scale: float, clip: float | None, accum: int
) -> None:
    ours, theirs = seeded(), seeded()
    scheduler = Constant("SGD", {"lr": 0.001, "momentum": 0.9}, ours, grad_clip=clip, accum_grad=accum)
    scheduler.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    optimizer, samples = torch.optim.SGD(theirs.parameters(), 0.001, momentum=0.9), 0
    for number, inputs in enumerate(inputs_of_batches(), 1):
        optimize({"loss": ours(inputs).square().mean()}, [scheduler], 0, len(inputs))
        loss = theirs(inputs).square().mean()
        scaler.scale(loss * len(inputs) if accum > 1 else loss).backward()
        samples += len(inputs)
        if number % accum == 0:
            scaler.unscale_(optimizer)
            for each in theirs.parameters():
                each.grad.div_(samples if accum > 1 else 1)
            if clip:
                nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            samples = 0
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert scheduler.scaler.state_dict() == scaler.state_dict()
    assert scheduler.scaler.get_scale() != scale


def test_a_scaler_goes_on_where_its_state_was_taken() -> None:
    models, made = [seeded(), seeded()], []
    for model in models:
        made.append(Constant("SGD", {"lr": 0.001}, model))
        made[-1].scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    first, second = made
    for inputs in inputs_of_batches()[:5]:
        first.step({"loss": models[0](inputs).square().mean()})
    assert second.scaler.get_scale() != first.scaler.get_scale()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.scaler.state_dict() == first.scaler.state_dict()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_scaler_skips_a_bad_loss_whose_gradients_are_finite(bad: float) -> None:
    model = seeded()
    before = copy.deepcopy(model.state_dict())
    scheduler = Constant("SGD", {"lr": 0.1}, model, grad_clip=None)
    scheduler.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.autograd.backward(scheduler.scaler.scale(model(torch.ones(2, 3)).sum()))
    # As on a GPU, where nobody waits for the loss.
    scheduler.guard.record_loss(torch.tensor(bad))
    scheduler.apply(epoch=0)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    scheduler.scaler.update()
    assert scheduler.scaler.get_scale() == 4.0


def test_a_scaler_takes_a_finite_loss_that_was_looked_at_as_it_is() -> None:
    ours, theirs = seeded(), seeded()
    scheduler = Constant("SGD", {"lr": 0.1}, ours, grad_clip=None)
    scheduler.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.autograd.backward(scheduler.scaler.scale(ours(torch.ones(2, 3)).sum()))
    scheduler.guard.record_loss(torch.tensor(1.0))
    scheduler.apply(epoch=0)
    theirs(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(theirs.parameters(), 0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
