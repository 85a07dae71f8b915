"""What the tests of checkpoints share: a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.brain.checkpointer import Checkpointer


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture
def saved(tmp_path: Path, model: nn.Module) -> Path:
    """A checkpoint of phase 'main' at iteration 12."""
    metrics = {"main": {"loss": 0.25}}
    return Checkpointer(tmp_path / "checkpoints").save({"main": {"model": model}}, {"iteration": 12}, metrics)
