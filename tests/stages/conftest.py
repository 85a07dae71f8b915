"""What the tests of the default stages share: a config of two runners, which train and then evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset


def table(samples: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=random)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


@pytest.fixture
def data() -> Callable[[int, int], TensorDataset]:
    """Makes random data: ``data(samples, seed)``."""
    return table


@pytest.fixture
def config() -> dict[str, Any]:
    """Runners ``train`` and ``infer``, phase ``line``; 10 samples for training, 7 for validation, batches of 4."""
    return {
        "plugins": [{"progress_bar": False}, {"metric_log": False}],
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}},
        "dataset": [
            {"name": "train_data", "class_path": lambda: table(10, 1), "batch_size": 4, "shuffle": True},
            {"name": "valid_data", "class_path": lambda: table(7, 2), "batch_size": 4},
        ],
        "runner": [
            {"name": "train", "class": "train", "device": "cpu", "epochs": 2},
            {"name": "infer", "class": "infer", "device": "cpu"},
        ],
        "phase": [
            {
                "name": "line",
                "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 1)),
                "loss": nn.functional.mse_loss,
                "dataset_name": "train_data",
                "valid_dataset_name": "valid_data",
            }
        ],
    }


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Configs that set ``threads`` leave the process as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
