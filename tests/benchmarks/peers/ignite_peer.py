"""The small job in ignite: its bare engine around a step written by hand."""

from __future__ import annotations

from typing import Any

import torch
from ignite import __version__
from ignite.engine import Engine
from side_by_side import Clock
from small_job import cross_entropy, in_memory, model

NAME = f"ignite {__version__}, bare engine"


def train(steps: int, clock: Clock) -> None:
    """Train."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def update(engine: Engine, batch: Any) -> torch.Tensor:
        inputs, target = batch
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(network(inputs), target)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    trainer = Engine(update)
    clock.start()
    trainer.run(in_memory(steps), max_epochs=1)
    clock.stop()
