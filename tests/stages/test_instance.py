"""The default instance stage."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pipeline import Context, GeneralTrainer
from pipeline.stages.instance import Instance


def run(linear: Path, seed: str) -> tuple[float, float]:
    config = GeneralTrainer(linear, [f"runner.train_runner.seed={seed}"]).config
    Instance(Context()).instance(Context(config=config, runner_name="train_runner"))
    return random.random(), torch.rand(()).item()


@pytest.mark.parametrize("seed", ["0", "7"])
def test_a_seed_decides_what_python_and_torch_draw(linear: Path, seed: str) -> None:
    assert run(linear, seed) == (random.Random(int(seed)).random(), by_torch(int(seed)))


def by_torch(seed: int) -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(seed)).item()


def test_without_a_seed_the_generators_go_on_from_where_they_were(linear: Path) -> None:
    random.seed(3)
    torch.manual_seed(3)
    assert run(linear, "null") == (random.Random(3).random(), by_torch(3))
