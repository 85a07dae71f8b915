"""The small job in accelerate: the raw loop with what it prepares."""

from __future__ import annotations

import torch
from accelerate import Accelerator, __version__
from side_by_side import Clock
from small_job import cross_entropy, in_memory, model

NAME = f"accelerate {__version__}"


def train(steps: int, clock: Clock) -> None:
    """Train."""
    accelerator = Accelerator(cpu=True)
    network = model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    clock.start()
    for step, (inputs, target) in enumerate(in_memory(steps), 1):
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(network(inputs), target)
        accelerator.backward(loss)
        optimizer.step()
        if step % 50 == 0:
            loss.item()
    clock.stop()
