"""What a training leaves in memory once the caller has dropped its result: nothing."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pipeline import Brain, Checkpointer, Context, ExperimentBase, GeneralTrainer, Stage, hookimpl
from pipeline.data.loader import make_loader
from tests.distributed.ranks import Ranks

mse = nn.functional.mse_loss
References = dict[str, "weakref.ref[Any]"]

references: References = {}


class Points(Dataset[tuple[Tensor, Tensor]]):
    """10 inputs [3], and a target [1] of each."""

    def __init__(self) -> None:
        self.x = torch.linspace(-1, 1, 30).view(10, 3)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Watch:
    """A plugin that keeps weak references to the parts of the run."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        phase, loader = context["model"]["line"], context["dataset"]["data"]
        [scheduler] = phase.optim_schedulers.values()
        watch(
            context=context,
            model=phase.model,
            optimizer=scheduler.optimizer,
            loader=loader,
            dataset=loader.dataset,
            plugin=self,
        )


class Fails:
    """A plugin whose hook fails after the first validation."""

    @hookimpl
    def after_validation(self) -> None:
        raise ZeroDivisionError


class Interrupts:
    """A plugin that stands for Ctrl-C after the first validation."""

    @hookimpl
    def after_validation(self) -> None:
        raise KeyboardInterrupt


class LineExperiment(ExperimentBase):
    """A linear model on batches of 4."""

    def setup_dataloader(self) -> None:
        self.train_loader = make_loader(Points(), seed=0, batch_size=4)

    def setup_model(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        watch(
            context=self.context,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.train_loader,
            experiment=self,
        )

    def train_batch(self) -> None:
        x, y = self.read_batch()
        self.optimizer.zero_grad()
        mse(self.model(x), y).backward()
        self.optimizer.step()

    def valid(self) -> None:
        pass


class LineBrain(Brain):
    """A small network."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.net(batch[0])
        return predictions

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


def watch(**objects: Any) -> None:
    """Keep a weak reference to each object under its name."""
    references.update({name: weakref.ref(value) for name, value in objects.items()})


def alive() -> list[str]:
    """The names of the watched objects that are still in memory."""
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


@pytest.fixture(autouse=True)
def _no_references() -> None:
    references.clear()


def config(*plugins: Any) -> dict[str, Any]:
    """A train runner with validations and checkpoints, watched by ``Watch``."""
    loader = {"class_path": Points, "batch_size": 4}
    return {
        "plugins": [{"name": "watch", "class_path": Watch}, *plugins],
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}},
        "dataset": [{"name": "data", **loader}, {"name": "valid", **loader}],
        "runner": [
            {
                "name": "train",
                "class": "train",
                "device": "cpu",
                "epochs": 2,
                "valid_interval": "1 epoch",
                "save_interval": "2 iteration",
            }
        ],
        "phase": [
            {
                "name": "line",
                "model": network,
                "loss": mse,
                "dataset_name": "data",
                "valid_dataset_name": "valid",
            }
        ],
    }


# metric_log and progress_bar are on by default.
@pytest.mark.parametrize("plugins", [[], ["ema", "tensorboard"]], ids=["default", "more"])
def test_run_when_done_leaves_nothing_in_memory(plugins: list[str]) -> None:
    GeneralTrainer(config(*plugins)).run()
    assert len(references) == 6
    assert alive() == []


@pytest.mark.parametrize("plugin", [Fails, Interrupts])
def test_run_that_failed_leaves_nothing_in_memory(plugin: type) -> None:
    """The traceback refers to the run; it is gone with the exception."""
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        GeneralTrainer(config({"name": "ends", "class_path": plugin})).run()
    assert len(references) == 6
    assert alive() == []


def test_run_of_experiment_leaves_nothing_in_memory() -> None:
    runner = {"name": "train", "class": "train", "device": "cpu", "epochs": 2}
    GeneralTrainer({"runner": [{**runner, "runner_class_path": LineExperiment}]}).run()
    assert len(references) == 5
    assert alive() == []


def test_fit_when_done_leaves_nothing_in_memory(tmp_path: Path) -> None:
    def fit() -> None:
        modules = {"net": network()}
        loader = DataLoader(Points(), batch_size=4)
        saver = Checkpointer(tmp_path)
        brain = LineBrain(
            modules,
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            run_opts={"device": "cpu"},
            checkpointer=saver,
        )
        brain.fit(range(2), loader, loader, progressbar=True)
        watch(brain=brain, model=modules["net"], loader=loader)

    fit()
    assert alive() == []


def alive_after_run_in_script(folder: Path) -> list[str]:
    """Run once in processes that joined each other before the run, and stay joined after it."""
    runner = {"name": "train", "class": "train", "device": "cpu", "epochs": 2}
    experiment = {**runner, "runner_class_path": LineExperiment}
    GeneralTrainer({"output_dir": str(folder), "runner": [experiment]}).run()
    assert len(references) == 5
    return alive()


def test_run_on_two_ranks_leaves_nothing_in_memory(two_ranks: Ranks, tmp_path: Path) -> None:
    """A script that has joined its processes trains several times with one world."""
    assert two_ranks(alive_after_run_in_script, tmp_path) == [[], []]
