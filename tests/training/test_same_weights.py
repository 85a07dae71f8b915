"""Five ways to write the same training end with the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from pipeline import Brain, Stage, UpdaterBase
from pipeline.context import Context
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.schedules import Constant

EPOCHS, RATE = 3, 0.01
mse = nn.functional.mse_loss


class Line(Brain):
    """A linear model, made after seeding with 0."""

    def __init__(self, **keywords: Any) -> None:
        torch.manual_seed(0)
        super().__init__({"net": nn.Linear(3, 1)}, **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


class Stepping(UpdaterBase):
    """Does by hand what a Brain does."""

    def __init__(self, model: Any, optim_schedulers: dict[str, OptimScheduler]) -> None:
        super().__init__()
        self.model, self.optim_schedulers = model, optim_schedulers

    def update(self, batch: Any) -> Tensor:
        loss = mse(self.model(batch[0]), batch[1])
        for scheduler in self.optim_schedulers.values():
            scheduler.step({"loss": loss})
        return loss.detach()


@pytest.fixture
def adam(config: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The config of a run with Adam."""
    chosen = config(epochs=EPOCHS)
    chosen["hyper_parameters"]["optimizer"] = {"class": "Adam", "lr": RATE}
    return chosen


@pytest.fixture
def expected(by_hand: Any) -> list[Tensor]:
    """The weights of the loop of a torch tutorial."""
    return list(by_hand(lambda parameters: Adam(parameters, RATE), epochs=EPOCHS).values())


def weights(model: Any) -> list[Tensor]:
    return list(model.state_dict().values())


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_a_plain_module_of_a_config(adam: Any, run: Callable[[Any], Context], expected: list[Tensor]) -> None:
    assert equal(weights(run(adam)["model"]["line"]["model"]), expected)


def test_a_brain_that_fits_by_itself(make_table: Any, expected: list[Tensor]) -> None:
    brain = Line(opt_class=lambda parameters: Adam(parameters, RATE), run_opts={"max_grad_norm": None})
    brain.fit(range(EPOCHS), DataLoader(make_table(10), batch_size=4))
    assert equal(weights(brain.modules), expected)


def test_a_brain_of_a_config(adam: Any, run: Callable[[Any], Context], expected: list[Tensor]) -> None:
    adam["phase"][0] = {"name": "line", "model": Line, "dataset_name": "data"}
    assert equal(weights(run(adam)["model"]["line"]["brain"].modules), expected)


def test_an_updater_of_a_config(adam: Any, run: Callable[[Any], Context], expected: list[Tensor]) -> None:
    adam["phase"][0]["updater"] = {"class_path": Stepping}
    context = run(adam)
    assert isinstance(context["model"]["line"]["updater"], Stepping)
    assert equal(weights(context["model"]["line"]["model"]), expected)


def test_an_updater_in_a_loop_by_hand(make_table: Any, expected: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    updater = Stepping(model, {"main": Constant("Adam", {"lr": RATE}, model, grad_clip=None)})
    for batch in list(DataLoader(make_table(10), batch_size=4)) * EPOCHS:
        updater.update(batch)
    assert equal(weights(model), expected)
