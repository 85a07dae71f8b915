"""Two runs alike, whatever the number of workers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline import GeneralTrainer

Weights = dict[str, Tensor]


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Ten samples, each with noise of the global generators of torch and Python added whenever it is asked for."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(3) * 0.1 + random.random()
        return torch.arange(3.0) + index + noise, torch.tensor([float(index)]) / 10


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def trained(model: type[nn.Module], data: dict[str, Any], **runner: Any) -> Weights:
    """What a run on augmented data ends with."""
    config = {
        "plugins": [{"progress_bar": False}, {"metric_log": False}],
        "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.01}},
        "dataset": [{"name": "data", "class_path": Augmented, "batch_size": 4, **data}],
        "runner": [{"name": "train", "class": "train", "device": "cpu", "epochs": 2, **runner}],
        "phase": [{"name": "p", "model": model, "loss": nn.functional.mse_loss, "dataset_name": "data"}],
    }
    state: Weights = GeneralTrainer(config).run()["model"]["p"]["model"].state_dict()
    return state


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_deterministic_run_ends_alike_with_any_number_of_workers(workers: int) -> None:
    shuffled = {"shuffle": True, "num_workers": workers}
    expected = trained(WithDropout, {"shuffle": True}, deterministic=True)
    assert equal(trained(WithDropout, shuffled, deterministic=True), expected)
    assert not equal(trained(WithDropout, shuffled, deterministic=True, seed=1), expected)


def test_the_augmentation_is_another_in_each_epoch() -> None:
    seen: list[Tensor] = []

    class Seeing(WithDropout):
        def forward(self, x: Tensor) -> Any:
            seen.append(x.detach().clone())
            return super().forward(x)

    trained(Seeing, {"batch_size": 10})
    first, second = seen
    assert not torch.equal(first, second)
    assert torch.allclose(first, second, atol=3.0)
