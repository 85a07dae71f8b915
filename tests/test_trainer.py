"""The trainer: five stages in order."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline import GeneralTrainer


def test_a_config_trains_as_a_plain_loop_does(linear: Path) -> None:
    context = GeneralTrainer(linear).run()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    for _ in range(2):
        for batch in x.split(4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch), 3 * batch - 1).backward()
            optimizer.step()
    assert torch.equal(context["model"]["line"]["model"].weight, model.weight)
