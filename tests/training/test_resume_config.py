"""A run that is resumed with other options of its optimizer, against a loop by hand that changes them at that step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from pipeline import Context, ExperimentBase, GeneralTrainer, hookimpl
from pipeline.optim.schedules import Constant
from tests.training.conftest import Kill, KilledError, mse, table

STEPS, EPOCH, AT = 12, 6, 5
Options = dict[str, Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def config(optimizer: Options, schedule: Options | None = None, **runner: Any) -> Options:
    """Two epochs of 6 batches, saved after each; the short form of the optimizer, or one with a schedule."""
    phase: Options = {"name": "p", "model": net, "loss": mse, "dataset_name": "d", "valid_dataset_name": "d"}
    short = {} if schedule else {"optimizer": optimizer}
    if schedule:
        conf = {key: value for key, value in optimizer.items() if key != "class"}
        args = {"optim_type": optimizer["class"], "optim_conf": conf, **schedule.get("args", {})}
        phase["optim_schedulers"] = {"main": {"class": schedule["class"], "args": args}}
    return {
        "name": "config",
        "plugins": [{"progress_bar": False}, {"metric_log": False}, Kill],
        "hyper_parameters": short,
        "dataset": [{"name": "d", "class_path": lambda: table(4 * EPOCH), "batch_size": 4}],
        "runner": [
            {
                "name": "t",
                "class": "train",
                "device": "cpu",
                "epochs": 2,
                "valid_interval": 2,
                "save_interval": 1,
                **runner,
            }
        ],
        "phase": [phase],
    }


def killed(monkeypatch: pytest.MonkeyPatch, chosen: Options) -> None:
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", -1)


def resumed(monkeypatch: pytest.MonkeyPatch, first: Options, then: Options) -> Context:
    killed(monkeypatch, first)
    return GeneralTrainer(then, resume="auto").run()


def weights(context: Context) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = context["model"]["p"]["model"].state_dict()
    return found


def by_hand(
    kind: type[Optimizer], options: Options, changed: Options, rate: Callable[[float, int, int, list[float]], float]
) -> Mapping[str, Tensor]:
    """The weights of a torch loop; ``rate(base, step, epoch, validated)``, the last being the losses of validations."""
    model, (x, y), validated = net(), table(4 * EPOCH).tensors, list[float]()
    optimizer, base = kind(model.parameters(), **options), options["lr"]
    for step in range(STEPS):
        if step == AT:
            optimizer.param_groups[0].update(changed)
            base = changed.get("lr", base)
        optimizer.param_groups[0]["lr"] = rate(base, step + 1, step // EPOCH + 1, validated)
        chosen = slice(4 * (step % EPOCH), 4 * (step % EPOCH) + 4)
        optimizer.zero_grad()
        torch.autograd.backward(mse(model(x[chosen]), y[chosen]))
        optimizer.step()
        if step % 2:
            validated.append(float(mse(model(x), y).detach()))
    return model.state_dict()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-6, atol=0) for name in other)


def fallen(base: float, step: int, epoch: int, validated: list[float]) -> float:
    """A tenth less for each loss that is not above all before it."""
    falls = sum(loss <= max(validated[:index], default=-math.inf) for index, loss in enumerate(validated))
    return float(base * 0.9**falls)


SCHEDULES: dict[str, tuple[Options | None, Callable[[float, int, int, list[float]], float]]] = {
    "short form": (None, lambda base, *_: base),
    "constant": ({"class": "constant", "args": {"ft_factor": 0.5}}, lambda base, *_: 0.5 * base),
    "noam": (
        {"class": "noam", "args": {"warmup_steps": 4}},
        lambda base, step, *_: base * min(math.sqrt(4 / step), step / 4),
    ),
    "exponential_decay": (
        {"class": "exponential_decay", "args": {"decay_factor": 0.7}},
        lambda base, _, epoch, __: base * 0.7 ** (epoch - 1),
    ),
    "warmup_linear": (
        {"class": "warmup_linear", "args": {"warmup_steps": 3, "total_steps": 12}},
        lambda base, step, *_: base * min(step / 3, 1 - (step - 3) / 9),
    ),
    "warmup_cosine": (
        {"class": "warmup_cosine", "args": {"warmup_steps": 3, "total_steps": 12}},
        lambda base, step, *_: base * (step / 3 if step < 3 else (1 + math.cos(math.pi * (step - 3) / 9)) / 2),
    ),
    "plateau": ({"class": "plateau", "args": {"mode": "max", "factor": 0.9, "patience": 0}}, fallen),
    "torch": (
        {"class": "torch_schedule", "args": {"schedule": "StepLR", "args": {"step_size": 4, "gamma": 0.5}}},
        lambda base, step, *_: base * 0.5 ** ((step - 1) // 4),
    ),
    "torch cosine": (
        {"class": "torch_schedule", "args": {"schedule": "CosineAnnealingLR", "args": {"T_max": 12, "eta_min": 0.001}}},
        lambda base, step, *_: 0.001 + (base - 0.001) * (1 + math.cos(math.pi * (step - 1) / 12)) / 2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_that_is_halved_for_the_resumed_run_is_that_of_a_loop_that_halves_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, rate = SCHEDULES[name]
    chosen = [config({"class": "SGD", "lr": lr, "momentum": 0.9}, schedule) for lr in (0.1, 0.05)]
    expected = by_hand(SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.05}, rate)
    assert same(weights(resumed(monkeypatch, *chosen)), expected)


def test_what_an_option_needs_of_the_state_is_made_where_the_config_has_turned_it_on() -> None:
    model = net()
    for kind, option in (("AdamW", {"amsgrad": True}), ("RMSprop", {"centered": True, "momentum": 0.9})):
        first, then = (Constant(kind, {"lr": 0.1, **each}, model) for each in ({}, option))
        for each in (first, then):
            model.weight.grad = torch.ones(1, 3)
            each.apply(epoch=0)
            then.load_state_dict(first.state_dict())
        assert set(then.optimizer.state[model.weight]) > set(first.optimizer.state[model.weight])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "before", "now", "changed"),
    [
        (AdamW, {"weight_decay": 0.5}, {"weight_decay": 0.0}, {"weight_decay": 0.0}),
        (
            AdamW,
            {"betas": [0.9, 0.99], "eps": 1e-8},
            {"betas": [0.5, 0.9], "eps": 1e-3},
            {"betas": (0.5, 0.9), "eps": 1e-3},
        ),
        (AdamW, {"weight_decay": 0.5}, {}, {"weight_decay": 0.01}),
        (SGD, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}, {"momentum": 0.5, "nesterov": True}),
    ],
)
def test_other_options_too_are_those_of_the_config_with_moments_and_steps_as_they_were(
    kind: type[Optimizer], before: Options, now: Options, changed: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [config({"class": kind.__name__, "learning_rate": 0.1, **options}) for options in (before, now)]
    expected = by_hand(kind, {"lr": 0.1, **before}, changed, lambda base, *_: base)
    assert same(weights(resumed(monkeypatch, *chosen)), expected)


def test_another_argument_of_a_torch_schedule_is_that_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [{"schedule": "StepLR", "args": {"step_size": 4, "gamma": gamma}} for gamma in (0.5, 0.25)]
    chosen = [config({"class": "SGD", "lr": 0.1}, {"class": "torch_schedule", "args": each}) for each in args]
    rate: Any = lambda base, step, *_: base * (0.25 if step > AT else 0.5) ** ((step - 1) // 4)  # noqa: E731
    assert same(weights(resumed(monkeypatch, *chosen)), by_hand(SGD, {"lr": 0.1}, {}, rate))


class Decay:
    """A plugin that sets what no config says."""

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] < 2:
            context["model"]["p"]["optim_schedulers"]["main"].optimizer.param_groups[0].update(
                lr=0.02, weight_decay=0.3
            )


def test_what_a_plugin_has_changed_stays_where_the_config_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [config({"class": "SGD", "lr": 0.1, "momentum": each}) for each in (0.9, 0.5)]
    for each in chosen:
        each["plugins"].append(Decay)
    group = resumed(monkeypatch, *chosen)["model"]["p"]["optim_schedulers"]["main"].optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.02, 0.3, 0.5)


class ByHand(ExperimentBase):
    """The same training, and a rate from the config."""

    def setup_dataloader(self) -> None:
        x, y = table(4 * EPOCH).tensors
        self.train_loader = list(zip(x.split(4), y.split(4), strict=True))

    def setup_model(self) -> None:
        self.model = net()
        self.optimizer = SGD(self.model.parameters(), self.config.rate, momentum=0.9)

    def train_batch(self) -> None:
        if self.iteration - 1 == Kill.at:
            raise KilledError
        x, y = self.read_batch()
        self.optimizer.zero_grad()
        torch.autograd.backward(mse(self.model(x), y))
        self.optimizer.step()

    def valid(self) -> None:
        """Nothing to validate on."""


def test_an_experiment_goes_on_at_the_rate_of_the_config_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = {
        "name": "t",
        "class": "train",
        "device": "cpu",
        "epochs": 2,
        "save_interval": 1,
        "runner_class_path": ByHand,
    }
    first, then = ({"name": "config", "hyper_parameters": {"rate": rate}, "runner": [runner]} for rate in (0.1, 0.05))
    model = resumed(monkeypatch, first, then)["model"]["experiment"]["model"]
    expected = by_hand(SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.05}, lambda base, *_: base)
    assert same(model.state_dict(), expected)
