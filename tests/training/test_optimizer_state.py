"""Optimizers that keep tensors outside of their ``state_dict``: the first save names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline import GeneralTrainer, StandardUpdater
from tests.training.conftest import linear_config, mse, table


class Lookahead(torch.optim.SGD):
    """Moves slow weights towards the fast ones, and keeps them in a plain attribute."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.slow_weights = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group, slow in zip(self.param_groups, self.slow_weights, strict=True):
            for parameter, average in zip(group["params"], slow, strict=True):
                average.lerp_(parameter.detach(), 0.5)
        return loss


class Counting(torch.optim.SGD):
    """Counts its steps in a plain attribute, and halves its rate by them."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class CountingInState(Counting):
    """The same, which saves the number."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}


class Saving(Lookahead):
    """The same, which saves them."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": [[each.clone() for each in slow] for slow in self.slow_weights]}


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer whose moments its own state lacks."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.Adam(self.param_groups, lr)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Delegating(Wrapper):
    """The same, whose state is that of the optimizer that it wraps."""

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


def warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("WARNING") and "state_dict() does not contain" in line]


def run(optimizer: Any) -> None:
    config = linear_config(save_interval=1)
    config["hyper_parameters"]["optimizer"]["class"] = optimizer
    GeneralTrainer(config).run()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(Lookahead, "Lookahead.slow_weights"), (Wrapper, "Wrapper.base"), (Counting, "Counting.steps")],
)
def test_state_outside_state_dict_is_named_once(optimizer: Any, name: str, log_lines: list[str]) -> None:
    run(optimizer)

    (line,) = warnings(log_lines)
    assert name in line


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("optimizer", [Saving, Delegating, CountingInState, "SGD", "AdamW", "RMSprop", "Adagrad"])
def test_optimizers_that_save_their_state_are_not_named(optimizer: Any, log_lines: list[str]) -> None:
    run(optimizer)

    assert not warnings(log_lines)


def test_an_updater_by_hand_names_state_outside(log_lines: list[str]) -> None:
    class Model(nn.Linear):
        def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            return mse(super().forward(x), y)

    model = Model(3, 1)
    updater = StandardUpdater(model, Lookahead(model.parameters(), 0.1), torch.utils.data.DataLoader(table(10)))

    updater.update()
    updater.state_dict()

    assert "Lookahead.slow_weights" in warnings(log_lines)[0]
