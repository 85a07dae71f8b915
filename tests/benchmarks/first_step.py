"""Seconds from the start of a process to its first training step: a script by hand, and ``pipeline run`` of the same."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def table():
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(3200, 64, generator=random), torch.randint(10, (3200,), generator=random))


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""
BY_HAND = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader
from job import model, table

network = model()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for inputs, target in DataLoader(table(), batch_size=32):
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(network(inputs), target).backward()
    optimizer.step()
    break
print(time.monotonic(), time.process_time(), flush=True)
os._exit(0)
"""
PLUGIN = """
import os, time
from pipeline import hookimpl


class Plugin:
    @hookimpl
    def after_batch(self, context):
        print(time.monotonic(), time.process_time(), flush=True)
        os._exit(0)
"""
CONFIG = """
plugins: ["{workspace}/first.py"]
hyper_parameters: {optimizer: {class: SGD, lr: 0.1}}
dataset:
  - {name: data, class_path: "{workspace}/job.py:table", batch_size: 32}
runner:
  - {name: train, class: train, device: cpu, epochs: 1}
phase:
  - {name: mlp, model: "{workspace}/job.py:model", loss: torch.nn.functional.cross_entropy, dataset_name: data}
"""
FILES = {"job.py": MODEL, "by_hand.py": BY_HAND, "first.py": PLUGIN, "config.yaml": CONFIG}
COMMANDS = {
    "script": [sys.executable, "by_hand.py"],
    "script again": [sys.executable, "by_hand.py"],
    "pipeline run": [sys.executable, "-m", "pipeline", "run", "config.yaml"],
}


def seconds_to_first_step(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each command in each round, in processes of their own, taken in turn."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        for _ in range(rounds + 1):
            for name, command in COMMANDS.items():
                seconds[name].append(seconds_of(command, folder))
    # In the first round Python compiles what it imports.
    return {name: each[1:] for name, each in seconds.items()}


def seconds_of(command: list[str], folder: str) -> tuple[float, float]:
    """Until a command has said that its first step is done, which it does by the clock that all processes share."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall - began, cpu


def main() -> None:
    """Print the medians, and the smallest."""
    for name, each in seconds_to_first_step(11).items():
        wall, cpu = ([pair[kind] for pair in each] for kind in (0, 1))
        print(
            f"{name:14} wall {statistics.median(wall):.3f} s, at least {min(wall):.3f};  "
            f"CPU {statistics.median(cpu):.3f} s, at least {min(cpu):.3f}"
        )


if __name__ == "__main__":
    main()
