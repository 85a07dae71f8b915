"""Schedules that know how long the training is: beside torch's own, their formulas and plain loops."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import IterableDataset

from pipeline import Context, GeneralTrainer, RunnerBase, hookimpl, stages
from pipeline.errors import ConfigError
from pipeline.optim.schedules import Noam, TorchSchedule, WarmupLinear
from tests.training.conftest import Kill, KilledError, linear_config, mse, table, with_release


class Rates:
    """A plugin that notes the rate of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    @hookimpl
    def after_update(self, context: Context, optim_scheduler: Any) -> None:
        self.rates.append(float(optim_scheduler.get_lr()))
        context["rates"] = self.rates

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = [*state["rates"]]


def config(schedule: dict[str, Any], *, samples: int = 20, **runner: Any) -> dict[str, Any]:
    """Batches of 4, and a schedule of SGD with a rate of 0.1."""
    name, arguments = (
        schedule.pop("class"),
        {"optim_type": "SGD", "optim_conf": {"lr": 0.1, "momentum": 0.9}, **schedule},
    )
    chosen = linear_config(**runner)
    chosen["dataset"][0]["class_path"] = lambda: table(samples)
    chosen["phase"][0]["optim_schedulers"] = {"main": {"class": name, "args": arguments}}
    chosen["plugins"] += [Rates, Kill]
    return chosen | {"name": "planned", "hyper_parameters": {}}


@pytest.fixture(autouse=True)
def unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", -1)


def linear(total: int, warmup: int = 0) -> list[float]:
    """The published formula."""
    steps = range(1, total + 1)
    return [0.1 * (n / warmup if n < warmup else 1 - (n - warmup) / (total - warmup)) for n in steps]


LENGTHS = [
    ({"epochs": 3}, 15),
    ({"epochs": 3, "limit_batches": 2}, 6),
    ({"epochs": 3, "overfit_batches": 1}, 3),
    ({"epochs": 3, "accum_grad": 2}, 9),
    ({"epochs": 3, "accum_grad": 2, "max_steps": 8}, 5),
    ({"epochs": None, "max_steps": 7}, 7),
    ({"epochs": None, "max_steps": "7 update", "accum_grad": 2}, 7),
    ({"epochs": 2, "max_steps": "7 update", "accum_grad": 2}, 6),
    ({"epochs": 2, "max_steps": 9, "optimizer_step_limit": 3, "accum_grad": 4}, 3),
    ({"epochs": 2, "max_time": "1 hour"}, 10),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("runner", "updates"), LENGTHS)
def test_without_total_steps_a_schedule_ends_with_the_training(runner: dict[str, Any], updates: int) -> None:
    context = GeneralTrainer(config({"class": "warmup_linear"}, **runner)).run()
    assert context["train_state"]["update"] == updates
    assert context["rates"] == pytest.approx(linear(updates))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("warmup_steps", "rise"), [(0.2, 3), (0.1, 2), (0.01, 0), (0.0, 0), (1, 1), (4, 4), (0.999, 14)]
)
def test_a_rise_below_one_is_a_share_of_the_training_and_one_is_one_step(warmup_steps: float, rise: int) -> None:
    rates = GeneralTrainer(config({"class": "warmup_linear", "warmup_steps": warmup_steps}, epochs=3)).run()["rates"]
    assert rates == pytest.approx(linear(15, rise))


def test_a_share_of_noam_is_one_of_the_training_and_its_default_stays() -> None:
    rates = GeneralTrainer(config({"class": "noam", "warmup_steps": 0.2}, epochs=3)).run()["rates"]
    assert rates == pytest.approx([0.1 * 3**0.5 * min(n**-0.5, n * 3**-1.5) for n in range(1, 16)])
    rates = GeneralTrainer(config({"class": "noam"}, epochs=1)).run()["rates"]
    assert rates == pytest.approx([0.1 * n / 4000 for n in range(1, 6)])


def test_several_phases_each_have_the_length_of_their_own_updates() -> None:
    chosen = config({"class": "warmup_linear"}, epochs=None, max_steps=20)
    chosen["dataset"].append({"name": "more", "class_path": lambda: table(28), "batch_size": 4})
    chosen["phase"].append({**chosen["phase"][0], "name": "other", "dataset_name": "more"})
    rates = GeneralTrainer(chosen).run()["rates"]
    # 5 and 7 in the first epoch, 5 and 3 in the second, which is cut short.
    expected = linear(10)[:5] + linear(10)[:7] + linear(10)[5:] + linear(10)[7:]
    assert rates == pytest.approx(expected)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(table(100))


def test_where_the_length_of_the_data_is_unknown_the_steps_of_the_runner_are_the_length() -> None:
    chosen = config({"class": "warmup_linear"}, epochs=None, max_steps=9)
    chosen["dataset"][0]["class_path"] = Stream
    assert GeneralTrainer(chosen).run()["rates"] == pytest.approx(linear(9))


def own_loop(stage: Any, context: Context) -> None:
    for batch in context.batches("line", count=3):
        context["model"]["line"].brain.fit_batch(batch)


class OwnEpoch(stages.Runner):
    def train_epoch(self, context: Context, epoch: int) -> None:
        super().train_epoch(context, epoch)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("dataset", "runner", "schedule", "message"),
    [
        (Stream, {"epochs": 2}, {}, "nobody knows how many steps it has: dataset.data has no length; give the runner max_steps, or write the schedule's total_steps"),
        (None, {"epochs": None, "max_time": "1 hour"}, {}, "nothing that counts steps ends the training; give the runner max_steps, or write"),
        (None, {"runner_class_path": OwnEpoch}, {}, "OwnEpoch.train_epoch is of its own; give the runner max_steps, or write"),
        (None, {"epochs": 1}, {"warmup_steps": 5}, "WarmupLinear: warmup_steps is 5 and total_steps 5; the rise must end before the total"),
        (None, {"runner_class_path": type("Own", (RunnerBase,), {"run": own_loop})}, {}, "WarmupLinear: total_steps depends on how long the training is, and only the default Runner says that"),
    ],
)  # fmt: skip
def test_what_nobody_knows_or_what_contradicts_the_length_is_an_error_before_the_first_step(
    dataset: Any, runner: dict[str, Any], schedule: dict[str, Any], message: str
) -> None:
    chosen = config({"class": "warmup_linear", **schedule}, **runner)
    chosen["dataset"][0]["class_path"] = dataset or chosen["dataset"][0]["class_path"]
    trainer = GeneralTrainer(chosen)
    with pytest.raises(ConfigError, match=re.escape(message)):
        trainer.run()
    assert [context["train_state"]["update"] for context in trainer.contexts.values()] in ([], [0])


def test_a_debug_run_is_shorter_than_the_rise_and_runs_nevertheless() -> None:
    chosen = config({"class": "warmup_linear", "warmup_steps": 12}, epochs=3, debug=True)
    assert GeneralTrainer(chosen).run()["rates"] == pytest.approx([0.1 * n / 12 for n in range(1, 5)])


def test_debug_run_has_the_schedule_of_the_whole_training() -> None:
    rates = GeneralTrainer(config({"class": "warmup_linear"}, epochs=3, debug=True)).run()["rates"]
    assert rates == pytest.approx(linear(15)[:4])


def test_debug_run_refuses_a_rise_longer_than_the_training() -> None:
    chosen = config({"class": "warmup_linear", "warmup_steps": 1000}, epochs=3, debug=True)
    with pytest.raises(ConfigError, match="warmup_steps is 1000 and total_steps 15"):
        GeneralTrainer(chosen).run()


SCHEDULES: list[tuple[dict[str, Any], Any]] = [
    ({"class": "warmup_linear", "warmup_steps": 0.2}, lambda total: linear(total, round(0.2 * total))),
    (
        {"class": "torch_schedule", "schedule": "OneCycleLR", "args": {"max_lr": 0.4}},
        lambda total: of_torch(total, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.4, total)),
    ),
    (
        {"class": "torch_schedule", "schedule": "CosineAnnealingLR"},
        lambda total: of_torch(total, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, total)),
    ),
]


def of_torch(total: int, make: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1, momentum=0.9)
    schedule, rates = make(optimizer), []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(rates) < total:
            schedule.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "expected", "epochs"),
    with_release(
        [(*SCHEDULES[0], 4), (*SCHEDULES[1], 2), (*SCHEDULES[1], 4), (*SCHEDULES[2], 2)],
        [(*schedule, epochs) for schedule in SCHEDULES for epochs in (2, 4)],
        pytest.mark.slow,
    ),
)
def test_a_resumed_run_with_other_epochs_has_the_rates_of_the_new_length(
    schedule: dict[str, Any], expected: Any, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kill, "at", 7)
    with pytest.raises(KilledError):
        GeneralTrainer(config({**schedule}, epochs=3, save_interval=1), resume="auto").run()
    monkeypatch.setattr(Kill, "at", -1)
    context = GeneralTrainer(config({**schedule}, epochs=epochs, save_interval=1), resume="auto").run()
    assert context["rates"] == pytest.approx(expected(15)[:7] + expected(5 * epochs)[7:])
    momenta = context["model"]["line"].optim_schedulers["main"].optimizer.state.values()
    assert all("momentum_buffer" in state for state in momenta)


@pytest.mark.parametrize(
    ("schedule", "expected", "saved"),
    with_release(
        [(*SCHEDULES[0], "1 epoch"), (*SCHEDULES[1], 1), (*SCHEDULES[1], "1 epoch"), (*SCHEDULES[2], 1)],
        [(*schedule, saved) for schedule in SCHEDULES for saved in (1, "1 epoch")],
        pytest.mark.slow,
    ),
)
def test_a_killed_and_resumed_run_ends_bit_for_bit_as_an_unbroken_one(
    schedule: dict[str, Any], expected: Any, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = GeneralTrainer(config({**schedule}, epochs=3) | {"output_dir": "straight"}).run()
    monkeypatch.setattr(Kill, "at", 8)
    with pytest.raises(KilledError):
        GeneralTrainer(config({**schedule}, epochs=3, save_interval=saved), resume="auto").run()
    monkeypatch.setattr(Kill, "at", -1)
    resumed = GeneralTrainer(config({**schedule}, epochs=3, save_interval=saved), resume="auto").run()
    assert resumed["rates"] == straight["rates"]
    weights = [context["model"]["line"].model.state_dict() for context in (straight, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.5, "nesterov": True}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.99)}),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cycle", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_cycle_with_its_momentum_trains_bit_for_bit_as_torchs_own(
    kind: str, options: dict[str, Any], cycle: str
) -> None:
    args = {"max_lr": 0.3} if cycle == "OneCycleLR" else {"base_lr": 0.01, "max_lr": 0.3, "step_size_up": 3}
    schedule = {"class": "torch_schedule", "optim_type": kind, "optim_conf": options, "schedule": cycle, "args": args}
    chosen = config(schedule, epochs=3)
    model = GeneralTrainer(chosen).run()["model"]["line"].model
    torch.manual_seed(0)
    network, (x, y) = nn.Linear(3, 1), table(20).tensors
    optimizer: Optimizer = getattr(torch.optim, kind)(network.parameters(), **options)
    own = getattr(lr_scheduler, cycle)(optimizer, **args, **({"total_steps": 15} if cycle == "OneCycleLR" else {}))
    for step in range(15):
        rows = slice(step % 5 * 4, step % 5 * 4 + 4)
        optimizer.zero_grad()
        mse(network(x[rows]), y[rows]).backward()
        optimizer.step()
        if step < 14:
            own.step()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in network.state_dict().items())


def test_a_cycle_of_an_optimizer_without_momentum_is_refused() -> None:
    schedule = {"class": "torch_schedule", "optim_type": "Adagrad", "optim_conf": {"lr": 0.1}, "schedule": "OneCycleLR"}
    with pytest.raises(ConfigError, match="OneCycleLR: optimizer must support momentum or beta1"):
        GeneralTrainer(config({**schedule, "args": {"max_lr": 0.1}}, epochs=1)).run()


def test_a_schedule_that_a_loop_of_ones_own_outlasts_keeps_its_last_rate_and_says_so(log_lines: list[str]) -> None:
    args = {"schedule": "OneCycleLR", "args": {"max_lr": 0.4, "total_steps": 4}}
    runner = type("Own", (RunnerBase,), {"run": longer})
    rates = GeneralTrainer(config({"class": "torch_schedule", **args}, runner_class_path=runner)).run()["rates"]
    assert rates[4:] == [rates[3]] * 3
    assert len([line for line in log_lines if "OneCycleLR has 4 steps, and the training goes on" in line]) == 1


def longer(stage: Any, context: Context) -> None:
    for batch in context.batches("line", repeat=True, count=7):
        context["model"]["line"].brain.fit_batch(batch)


@pytest.mark.parametrize(
    ("cls", "arguments", "key"),
    [
        (WarmupLinear, {}, "total_steps"),
        (WarmupLinear, {"warmup_steps": 0.1}, "total_steps"),
        (Noam, {"warmup_steps": 0.1}, "warmup_steps"),
        (TorchSchedule, {"schedule": "OneCycleLR", "args": {"max_lr": 0.1}}, "total_steps"),
    ],
)
def test_by_hand_the_length_has_to_be_written(cls: Any, arguments: dict[str, Any], key: str) -> None:
    model = nn.Linear(1, 1)
    scheduler = cls("SGD", {"lr": 0.1, "momentum": 0.9}, model, **arguments)
    with pytest.raises(ConfigError, match=f"{key} depends on how long the training is, and only the default Runner"):
        scheduler.step(model(torch.ones(1)).sum())


def test_by_hand_a_share_is_one_of_total_steps() -> None:
    scheduler = WarmupLinear("SGD", {"lr": 0.1}, nn.Linear(1, 1), total_steps=20, warmup_steps=0.25)
    assert math.isclose(scheduler.update_lr(5, 1), 0.1)
    assert math.isclose(scheduler.update_lr(1, 1), 0.02)
