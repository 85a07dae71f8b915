"""Function calls per training step, beside a hand-written loop: ``python tests/benchmarks/step_calls.py``.

A 64-64-10 MLP at batch 32 with SGD, batches from a list, 500 steps, calls as cProfile counts them (Python and C). The
raw loop looks at its loss every 50 steps; ours prints as often and has its default plugins on.
"""

from __future__ import annotations

import cProfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from loguru import logger
from torch import Tensor, nn

from pipeline import GeneralTrainer, stages

STEPS = 500
BATCHES = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(STEPS)]


def model() -> nn.Module:
    """The MLP."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def raw(batches: list[tuple[Tensor, Tensor]]) -> None:
    """The reference: what a person would write."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step, (inputs, target) in enumerate(batches, 1):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(network(inputs), target)
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 50 == 0:
            loss.item()


class Network(stages.Network):
    """The default, but for batches from a list."""

    batches: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def build_dataset(self, *_: Any) -> Any:
        """The batches."""
        return self.batches


def ours(batches: list[tuple[Tensor, Tensor]]) -> None:
    """A whole run of the pipeline on the batches."""
    Network.batches = batches
    with tempfile.TemporaryDirectory() as folder:
        GeneralTrainer(
            {
                "output_dir": str(Path(folder)),
                "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}},
                "dataset": [{"name": "data", "class_path": "builtins.list"}],
                "runner": [
                    {"name": "train", "class": "train", "device": "cpu", "epochs": 1, "network_class_path": Network}
                ],
                "phase": [{"name": "mlp", "model": model, "loss": nn.functional.cross_entropy, "dataset_name": "data"}],
            }
        ).run()


def calls(function: Callable[[list[tuple[Tensor, Tensor]]], None], batches: list[tuple[Tensor, Tensor]]) -> int:
    """How many calls the function makes."""
    profile = cProfile.Profile()
    profile.runcall(function, batches)
    return sum(row.callcount for row in profile.getstats())


def per_step(function: Callable[[list[tuple[Tensor, Tensor]]], None]) -> float:
    """Calls per step; what a run costs once drops out in the difference between 500 steps and 250."""
    half = STEPS // 2
    calls(function, BATCHES[:half])
    return (calls(function, BATCHES) - calls(function, BATCHES[:half])) / half


if __name__ == "__main__":
    logger.remove()
    reference, measured = per_step(raw), per_step(ours)
    print(f"raw loop {reference:.1f} calls a step, pipeline {measured:.1f}: {measured - reference:+.1f}")
