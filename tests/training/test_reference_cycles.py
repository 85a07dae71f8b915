"""Updaters and experiments are freed when the last reference to them goes, without a garbage collection."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipeline import ExperimentBase
from pipeline.updater.updater import StandardUpdater

SAMPLES = torch.arange(10.0).reshape(5, 2)


class MeanOutput(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).mean()


class OwnEpochs(StandardUpdater):
    def new_epoch(self) -> None:
        self.train_iterator = iter(self.dataloader)


class Experiment(ExperimentBase):
    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(SAMPLES)
        self.valid_loader = DataLoader(SAMPLES)

    def setup_model(self) -> None:
        self.model = MeanOutput()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train_batch(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.read_batch()).backward()
        self.optimizer.step()

    def valid(self) -> None:
        self.model(SAMPLES)


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def updater_of(kind: type[StandardUpdater]) -> StandardUpdater:
    model = MeanOutput()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return kind(model, optimizer, DataLoader(SAMPLES))


@pytest.mark.parametrize("kind", [StandardUpdater, OwnEpochs])
def test_updater_inside_an_epoch_is_freed(kind: type[StandardUpdater]) -> None:
    updater = updater_of(kind)
    updater.update()
    alive = ref(updater)
    del updater
    assert alive() is None


def test_updater_copied_inside_an_epoch_counts_its_own_epochs() -> None:
    updater = updater_of(OwnEpochs)
    copied = copy.deepcopy(updater)
    del updater
    for _ in range(6):
        copied.update()
    assert copied.state.epoch == 1
    assert copied.state_dict()["data"]["taken"] == 1


class MadeOnAccess:
    """A decorator. The function of the method that it makes has no name, and nothing else refers to it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, owner: Any, _: Any) -> MethodType:
        return MethodType(partial(self.function), owner)


def test_updater_with_a_method_made_on_access_trains() -> None:
    class Decorated(StandardUpdater):
        @MadeOnAccess
        def new_epoch(self) -> None:
            self.train_iterator = iter(self.dataloader)

    updater = updater_of(Decorated)
    for _ in range(6):
        updater.update()
    assert updater.state.epoch == 1


def test_experiment_after_its_training_is_freed(tmp_path: Any) -> None:
    training = {"max_iteration": 7, "valid_interval": 5, "save_interval": 5}
    args: dict[str, Any] = {"device": "cpu", "nprocs": 1, "output": str(tmp_path)}
    experiment = Experiment({"training": training}, {**args, "checkpoint_path": None})
    experiment.setup()
    experiment.run()
    alive = ref(experiment)
    del experiment
    assert alive() is None
