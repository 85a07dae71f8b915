"""What SpeeChain's users know of its OptimScheduler: the numbers, the names, the clock, the state.

The figures in ``speechain.json`` are of SpeeChain's own classes of 2024-03, the newest in its repository, heli-qi/SpeeChain:
what ``figures(noam(Noamlr, combination))`` and ``figures(decay(ExponentDecayLr, combination))`` gave for each combination below,
with torch 2.13 on a CPU. The classes of 2024-09, in the copy bagustris/SpeeChain, gave the same. All 38,400 rates of Noam were
compared with both, and were equal to ours in every bit; so were those of the decay, and no weight differed by more than 3e-8.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.check.checker import check
from pipeline.errors import ConfigError
from pipeline.optim.schedules import Constant, ExponentialDecay, Noam

FIGURES = json.loads(Path(__file__).with_name("speechain.json").read_text(encoding="utf-8"))

# Width, rise, base rate, factor, batches of a window, windows for a step.
NOAM = [*product((None, 64), (1, 10, 50, 4000), (0.1, 0.001), (1.0, 0.5), (1, 2, 3), (1, 2))]
# Factor, base rate; in the first epoch, for in later ones SpeeChain's falls at each step.
DECAY = [*product((0.9, 0.999), (0.1, 0.001))]


@contextmanager
def untimed(names: list[str]) -> Iterator[None]:
    """A ``time_func`` that measures nothing."""
    yield


def trained(kind: Any, lr: float, epoch: int | None = None, **conf: Any) -> tuple[list[float], list[float]]:
    """The rate after each of 200 steps, and the weights at the end; an epoch has 20 steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    scheduler = kind(optim_type="SGD", optim_conf={"lr": lr}, model=model, use_amp=False, **conf)
    random, rates = torch.Generator().manual_seed(1), []
    for number in range(1, 201):
        loss = model(torch.randn(4, 3, generator=random)).square().mean()
        scheduler.step({"loss": loss}, untimed, "main", number, epoch or 1 + (number - 1) // 20, None)
        rates.append(scheduler.get_lr())
    return rates, [weight for parameter in model.parameters() for weight in parameter.flatten().tolist()]


def noam(kind: Any, combination: tuple[Any, ...]) -> tuple[list[float], list[float]]:
    d_model, warmup_steps, lr, ft_factor, accum_grad, step_per_update = combination
    windows = {"accum_grad": accum_grad, "step_per_update": step_per_update}
    return trained(kind, lr, d_model=d_model, warmup_steps=warmup_steps, ft_factor=ft_factor, **windows)


def decay(kind: Any, combination: tuple[float, float]) -> tuple[list[float], list[float]]:
    return trained(kind, combination[1], 1, decay_factor=combination[0])


def figures(found: tuple[list[float], list[float]]) -> list[float]:
    """The sum of the rates and the last of them, which are compared bit for bit, and the weights."""
    return [math.fsum(found[0]), found[0][-1], *(round(weight, 6) for weight in found[1])]


def compared(name: str, train: Callable[..., Any], kind: Any, combinations: list[Any]) -> None:
    of_speechain = dict(zip(NOAM if name == "noam" else DECAY, FIGURES[name], strict=True))
    for combination in combinations:
        expected = of_speechain[combination]
        found = figures(train(kind, combination))
        assert found[:2] == expected[:2], combination
        assert found[2:] == pytest.approx(expected[2:], rel=0, abs=2e-6), combination


@pytest.mark.slow
def test_192_noam_schedules_have_the_rates_of_speechains_after_each_of_200_steps() -> None:
    assert len(NOAM) == len(FIGURES["noam"]) == 192
    compared("noam", noam, Noam, NOAM)


@pytest.mark.slow
def test_some_of_these_noam_schedules_have_its_rates() -> None:
    # Every 13th: each value of each argument is among them.
    chosen = NOAM[::13]
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(values) for values in zip(*NOAM, strict=True)]
    compared("noam", noam, Noam, chosen)


def test_an_exponential_decay_has_its_rates_in_the_first_epoch() -> None:
    compared("decay", decay, ExponentialDecay, DECAY)


def test_the_rate_of_an_open_window_is_the_one_with_which_it_will_step() -> None:
    model, found = nn.Linear(1, 1), []
    scheduler = Noam("SGD", {"lr": 1.0}, model, accum_grad=3, step_per_update=2, warmup_steps=100)
    for _ in range(12):
        scheduler.step({"loss": model.weight.sum()})
        found.append(round(scheduler.get_lr(), 6))
    # In the windows 1 and 3 it does not act, and its rate stays.
    assert found == [1.0] * 3 + [0.02] * 6 + [0.04] * 3


def test_a_rate_of_an_open_window_that_is_none_is_told_with_the_number_of_the_window() -> None:
    class Wrong(Noam):
        def update_lr(self, real_step: int, epoch_num: int) -> float:
            return math.nan

    model = nn.Linear(1, 1)
    scheduler = Wrong("SGD", {"lr": 1.0}, model, accum_grad=2)
    with pytest.raises(ConfigError, match=r"Wrong.update_lr returned nan for window 6; return a finite rate"):
        scheduler.step({"loss": model.weight.sum()}, step_num=11)


@pytest.mark.parametrize(("modules", "listed"), [(None, None), ("0", ["0"]), (["1", "0"], ["1", "0"]), (("0",), ["0"])])
def test_it_has_the_attributes_that_it_was_given(modules: Any, listed: Any) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    scheduler = Constant("SGD", {"lr": 1.0}, model, True, None, modules)
    assert scheduler.model is model
    assert (scheduler.distributed, scheduler.optim_loss, scheduler.updated_modules) == (True, None, listed)
    other = Constant("SGD", {"lr": 1.0}, model, optim_loss="gan", updated_modules=(name for name in ("0", "1")))
    assert (other.distributed, other.optim_loss, other.updated_modules) == (False, "gan", ["0", "1"])
    assert len(other.parameters) == 4


@pytest.mark.parametrize(("d_model", "init_lr"), [(None, 0.1 * 10**0.5), (100, 0.1)])
def test_a_noam_schedule_has_its_width_and_the_factor_of_its_curve(d_model: int | None, init_lr: float) -> None:
    scheduler = Noam("SGD", {"lr": 0.1}, nn.Linear(1, 1), d_model=d_model, warmup_steps=10)
    assert (scheduler.d_model, scheduler.warmup_steps) == (d_model, 10)
    assert scheduler.init_lr == pytest.approx(init_lr)


class Clock:
    """A ``time_func`` that keeps what it was asked for, and what happened within."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @contextmanager
    def __call__(self, names: list[str]) -> Iterator[None]:
        self.seen.append(("begins", *names))
        try:
            yield
        except ZeroDivisionError:
            self.seen.append(("failed", *names))
            raise
        self.seen.append(("ends", *names))


def test_backward_and_the_step_are_measured_one_after_the_other() -> None:
    clock, model = Clock(), nn.Linear(1, 1)
    scheduler = Constant("SGD", {"lr": 0.1}, model, accum_grad=2)
    told = scheduler.after_backward = lambda losses: clock.seen.append("after_backward")
    scheduler.before_update = lambda optim_scheduler: clock.seen.append("before_update")
    for _ in range(2):
        scheduler.step({"loss": model.weight.sum()}, clock, "gan")
    backward = [("begins", "loss_backward_time", "gan"), "after_backward", ("ends", "loss_backward_time", "gan")]
    step = [("begins", "optim_time", "gan"), ("ends", "optim_time", "gan")]
    assert clock.seen == [*backward, *step, *backward, step[0], "before_update", step[1]]
    assert scheduler.after_backward is told


def test_the_block_that_is_measured_sees_the_failure_within_it() -> None:
    clock, model = Clock(), nn.Linear(1, 1)
    scheduler = Constant("SGD", {"lr": 0.1}, model)
    scheduler.before_update = lambda optim_scheduler: 1 / 0
    with pytest.raises(ZeroDivisionError):
        scheduler.step({"loss": model.weight.sum()}, clock, "main")
    assert clock.seen[2:] == [("begins", "optim_time", "main"), ("failed", "optim_time", "main")]
    assert scheduler.after_backward is None


def batch(number: int) -> Tensor:
    return torch.randn(number % 3 + 1, 3, generator=torch.Generator().manual_seed(number))


def trained_by_hand(scheduler: Any, numbers: range, step_num: bool) -> None:
    for number in numbers:
        place = {"step_num": number, "epoch_num": 1 + number // 8} if step_num else {}
        loss = scheduler.model(batch(number)).square().mean()
        scheduler.step({"loss": loss}, samples=len(batch(number)), **place)


def made() -> Noam:
    torch.manual_seed(0)
    return Noam("Adam", {"lr": 0.05}, nn.Linear(3, 2), accum_grad=4, warmup_steps=3, use_amp=False)


@pytest.mark.parametrize("step_num", [True, False])
@pytest.mark.parametrize("cut", [4, 5, 7, 8])
def test_a_loop_by_hand_goes_on_bit_for_bit_from_its_state_dict_alone(tmp_path: Path, cut: int, step_num: bool) -> None:
    whole, first, second = made(), made(), made()
    trained_by_hand(whole, range(1, 17), step_num)
    trained_by_hand(first, range(1, cut + 1), step_num)
    file = tmp_path / "checkpoint.pth"
    torch.save({"model": first.model.state_dict(), "optim_sches": {"main": first.state_dict()}}, file)
    trained_by_hand(first, range(cut + 1, 17), step_num)
    saved = torch.load(file, weights_only=True)
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["optim_sches"]["main"])
    trained_by_hand(second, range(cut + 1, 17), step_num)
    for other in (first, second):
        assert all(map(torch.equal, whole.model.parameters(), other.model.parameters()))
        assert (whole.real_step, whole.get_lr()) == (other.real_step, other.get_lr())


def test_a_state_that_is_loaded_stays_as_it_was_while_the_window_goes_on() -> None:
    first, second = made(), made()
    trained_by_hand(first, range(1, 3), True)
    state = copy.deepcopy(first.state_dict())
    kept = copy.deepcopy(state["gradients"])
    second.load_state_dict(state)
    trained_by_hand(second, range(3, 4), True)
    assert kept.keys() == {"weight", "bias"}
    assert all(torch.equal(kept[name], state["gradients"][name]) for name in kept)


def test_the_state_dict_of_speechain_itself_goes_on_bit_for_bit() -> None:
    """Its state has the optimizer's and the scaler's; the calls say where they are."""
    whole, first, second = made(), made(), made()
    trained_by_hand(whole, range(1, 17), True)
    trained_by_hand(first, range(1, 9), True)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy({"optimizer": first.optimizer.state_dict(), "scaler": None}))
    trained_by_hand(second, range(9, 17), True)
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))
    assert whole.get_lr() == second.get_lr()


def test_a_state_of_ours_that_has_lost_its_window_is_no_state_of_speechain() -> None:
    scheduler = made()
    state = scheduler.state_dict()
    del state["window"]
    with pytest.raises(KeyError, match="window"):
        scheduler.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("noam.Noamlr", "noam"), ("noam.NoamLr", "noam"), ("exp.ExponentDecayLr", "exponential_decay")],
)
def test_a_schedule_by_its_name_in_speechain_is_a_fault_that_says_ours(
    config: Callable[..., dict[str, Any]], name: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where SpeeChain writes its results, which is no module of this name.
    (tmp_path / "exp").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    chosen = config()
    arguments = {"optim_type": "Adam", "optim_conf": {"lr": 0.1}}
    for spelling, faults in ((name, 1), (ours, 0)):
        chosen["phase"][0]["optim_schedulers"] = {"main": {"class": spelling, "args": arguments}}
        chosen.pop("hyper_parameters", None)
        found = check(chosen)
        assert len(found) == faults, found
        if faults:
            assert found[0].address.endswith("optim_schedulers.main.class")
            assert f"'{name}' is SpeeChain's name; write {ours}, its arguments are the same" in found[0].message
