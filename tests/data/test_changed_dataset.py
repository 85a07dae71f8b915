"""A plugin changes a dataset: what reaches the workers, and what the log says."""

from __future__ import annotations

import io
import logging
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.data.worker_copies import WorkerCopies

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def shared_value() -> Any:
    """Return a tensor in shared memory; torch does not declare the type of ``share_memory_``."""
    value: Any = [torch.ones(1)]
    return value[0].share_memory_()


class Transform:
    level = 1


class Levels(Dataset[tuple[Tensor, Tensor]]):
    """Returns its level, that of its transform, and one in shared memory."""

    def __init__(self) -> None:
        self.level = 1
        self.transforms = [Transform()]
        self.shared = shared_value()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        levels = [self.level, self.transforms[0].level, int(self.shared)]
        return torch.tensor(levels, dtype=torch.float32), torch.zeros(1)


class ChangeLevels:
    """Counts the levels up in each epoch but the first, and notes those of the batches."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.seen: list[list[float]] = []

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        dataset = context["dataset"]["data"].dataset
        level = context["current_epoch"] + 1
        if "level" in self.names:
            dataset.level = level
        if "transform" in self.names:
            dataset.transforms[0].level = level
        if "shared" in self.names:
            dataset.shared.fill_(level)

    @hookimpl
    def before_batch(self, context: Context, batch: Any) -> None:
        self.seen.append(batch[0][0].tolist())
        context["seen"] = self.seen


def run(*names: str, persistent: bool) -> list[list[float]]:
    """Train for three epochs of one batch, and return the levels in the batches."""
    plugin = {"name": "change", "class_path": ChangeLevels, "args": {"names": list(names)}}
    data = {
        "name": "data",
        "class_path": Levels,
        "batch_size": 4,
        "num_workers": 1,
        "persistent_workers": persistent,
    }
    phase = {
        "name": "line",
        "model": nn.Linear,
        "model_args": {"in_features": 3, "out_features": 1},
    }
    config = {
        "plugins": [{"progress_bar": False}, plugin],
        "hyper_parameters": {"optimizer": {"class": "SGD", "learning_rate": 0.1}},
        "dataset": [data],
        "runner": [{"name": "train", "class": "train", "epochs": 3, "device": "cpu"}],
        "phase": [{**phase, "loss": nn.functional.mse_loss, "dataset_name": "data"}],
    }
    seen: list[list[float]] = GeneralTrainer(config).run()["seen"]
    return seen


def warnings_in(log_lines: list[str]) -> list[str]:
    return [line for line in log_lines if "persistent workers" in line]


def test_change_of_a_dataset_reaches_new_workers(log_lines: list[str]) -> None:
    assert run("level", "transform", "shared", persistent=False) == [
        [1, 1, 1],
        [2, 2, 2],
        [3, 3, 3],
    ]
    assert warnings_in(log_lines) == []


def test_change_that_persistent_workers_miss_is_logged_once(log_lines: list[str]) -> None:
    assert run("level", "transform", persistent=True) == [[1, 1, 1]] * 3
    [line] = warnings_in(log_lines)
    assert line.startswith("WARNING dataset.data: changed after its persistent workers had started")
    assert "dataset.level (1 -> 2), dataset.transforms.0.level" in line


@pytest.mark.slow
def test_shared_value_reaches_persistent_workers(log_lines: list[str]) -> None:
    assert run("shared", persistent=True) == [[1, 1, 1], [1, 1, 2], [1, 1, 3]]
    assert warnings_in(log_lines) == []


class Cached(Levels):
    """Has what a dataset opens, caches or logs, and a setting below a transform of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}
        self.file: Any = None
        self.flip: Any = None
        self.size: tuple[int, ...] = (1, 2)
        self.logger = logging.getLogger("dataset")
        self.chain: Any = nn.Sequential(nn.Sequential(nn.Dropout(0.1)))

    @cached_property
    def classes(self) -> list[int]:
        return [1, 2]


def open_and_cache(dataset: Cached) -> None:
    dataset.file = io.BytesIO()
    dataset.cache[0] = dataset.classes
    dataset.size = tuple(range(1, 3))
    dataset.logger.setLevel("DEBUG")


def change_values(dataset: Cached) -> None:
    dataset.flip = reversed
    dataset.size = (1, 3)
    dataset.transforms.append(Transform())
    dataset.chain[0][0].p = 0.2


@pytest.mark.parametrize(
    ("use", "changes"),
    [
        (open_and_cache, []),
        (change_values, ["transforms", "flip", "size.1 (2 -> 3)", "chain.0.0.p (0.1 -> 0.2)"]),
    ],
)
def test_cached_value_of_a_dataset_is_no_change(use: Any, changes: list[str]) -> None:
    """The process of the training may read the dataset too, for example to show a sample."""
    dataset = Cached()
    copies = WorkerCopies(dataset=Subset(dataset, [0]))
    use(dataset)
    assert copies.changes() == [f"dataset.dataset.{change}" for change in changes]
    assert copies.changes() == []
