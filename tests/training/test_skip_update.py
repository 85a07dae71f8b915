"""``skip_update`` leaves out one update: the weights are those of a loop by hand that drops the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer, OptimScheduler, hookimpl, optimize
from pipeline.optim.schedules import Constant

Config = Callable[..., dict[str, Any]]


class Skips:
    """A plugin that skips the update in which iterations ``at`` close the window; it counts what follows."""

    at: set[int] = set()  # noqa: RUF012
    names: set[str] = set()  # noqa: RUF012
    after: list[tuple[str, bool]] = []  # noqa: RUF012

    @hookimpl
    def before_update(self, context: Context, name: str, optim_scheduler: OptimScheduler) -> None:
        if context["train_state"]["iteration"] in self.at and name in self.names:
            optim_scheduler.skip_update()

    @hookimpl
    def after_update(self, name: str, optim_scheduler: OptimScheduler) -> None:
        cleared = all(parameter.grad is None for parameter in optim_scheduler.parameters)
        self.after.append((name, cleared))


class Twice(Skips):
    """Another one that skips the same."""


@pytest.fixture
def skipping(config: Config) -> Config:
    def make(*at: int, names: str = "main", **optimizer: Any) -> dict[str, Any]:
        Skips.at, Skips.names, Skips.after = set(at), set(names.split()), []
        chosen = config()
        chosen["plugins"] += [Skips, Twice]
        chosen["hyper_parameters"]["optimizer"] |= {"momentum": 0.9, **optimizer}
        return chosen

    return make


def by_hand(make_table: Any, kept: list[list[int]]) -> dict[str, Tensor]:
    """The weights after windows of these batches, of 3 to an epoch, weighted by their samples."""
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 1), list(zip(*(part.split(4) for part in make_table(10).tensors), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in kept:
        x, y = (torch.cat([batches[number % 3][part] for number in window]) for part in (0, 1))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def test_a_skipped_update_does_not_step_and_counts_as_any_other(skipping: Config, make_table: Any) -> None:
    context = GeneralTrainer(skipping(1, 4)).run()
    expected = by_hand(make_table, [[0], [2], [3], [5]])
    torch.testing.assert_close(dict(context["model"]["line"].model.state_dict()), dict(expected))
    scheduler = context["model"]["line"].optim_schedulers["main"]
    assert (context["train_state"]["update"], scheduler.real_step, scheduler.guard.read()) == (6, 6, 0)
    assert Skips.after == [("main", True)] * 12


def test_of_an_accumulation_the_whole_window_is_skipped_and_no_other(skipping: Config, make_table: Any) -> None:
    chosen = skipping(1)
    chosen["runner"][0]["accum_grad"] = 2
    context = GeneralTrainer(chosen).run()
    expected = by_hand(make_table, [[2], [3, 4], [5]])
    torch.testing.assert_close(dict(context["model"]["line"].model.state_dict()), dict(expected))


def test_each_optimizer_is_skipped_by_itself(skipping: Config) -> None:
    chosen = skipping(*range(6), names="head")
    torch.manual_seed(0)
    schedulers = {
        name: {"class": "constant", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "updated_modules": part}}
        for name, part in {"body": "model.0", "head": "model.1"}.items()
    }
    chosen["phase"][0] |= {
        "model": lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
        "optim_schedulers": schedulers,
    }
    del chosen["hyper_parameters"]["optimizer"]
    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).state_dict()
    after = GeneralTrainer(chosen).run()["model"]["line"].model.state_dict()
    assert {name for name in after if torch.equal(after[name], before[name])} == {"1.weight", "1.bias"}


def test_a_scaler_adapts_to_the_updates_that_are_not_skipped() -> None:
    model = nn.Linear(3, 1)
    scheduler = Constant("SGD", {"lr": 0.001}, model)
    scheduler.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    skipped = {2, 3}
    for number in range(1, 5):
        skip = number in skipped
        scheduler.before_update = (lambda optim_scheduler: optim_scheduler.skip_update()) if skip else None
        weight = model.weight.detach().clone()
        optimize({"loss": model(torch.ones(2, 3)).square().mean()}, [scheduler])
        assert torch.equal(model.weight, weight) is skip
    # Two steps in a row without an overflow double it.
    assert scheduler.scaler.get_scale() == 2.0**11
