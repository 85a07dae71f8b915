"""``observe`` brings a value of user code to the plugins, and costs nothing where none of them asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Context, GeneralTrainer, Stage, UpdaterBase, hookimpl, hookspecs, observe, stages

Config = Callable[..., dict[str, Any]]


class Observes:
    """A plugin; ``values`` are what it was called with."""

    values: list[tuple[str, Any]] = []  # noqa: RUF012

    @hookimpl
    def on_observe(self, name: str, value: Any) -> None:
        self.values.append((name, value))


@pytest.fixture
def observing(config: Config) -> Config:
    def make(**runner: Any) -> dict[str, Any]:
        Observes.values = []
        chosen = config(epochs=1, **runner)
        chosen["plugins"].append(Observes)
        return chosen

    return make


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return observe("output", super().forward(x))


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class Predicts(Brain):
    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return observe(f"in {stage.name}", self.modules.net(batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return (predictions - batch[1]).square().mean()


class Updates(UpdaterBase):
    def __init__(self, brain: Brain) -> None:
        super().__init__()
        self.brain = brain

    def update(self, batch: Any) -> Tensor:
        return observe("loss", self.brain.fit_batch(batch))


class Startup(stages.Startup):
    def startup(self, context: Context) -> None:
        assert observe("seed", context["runner"].seed) == 0


def test_what_a_model_computes_comes_to_a_plugin_with_its_graph(observing: Config) -> None:
    chosen = observing()
    chosen["phase"][0]["model"] = Net
    GeneralTrainer(chosen).run()
    assert [(name, value.shape[0], value.requires_grad) for name, value in Observes.values] == [
        ("output", 4, True), ("output", 4, True), ("output", 2, True)
    ]  # fmt: skip


def test_a_brain_an_updater_and_a_stage_may_observe_too(observing: Config) -> None:
    chosen = observing(startup_class_path=Startup)
    chosen["phase"][0] |= {"model": Predicts, "updater": {"class_path": Updates}, "valid_dataset_name": "data"}
    del chosen["phase"][0]["loss"]
    GeneralTrainer(chosen).run()
    assert [name for name, _ in Observes.values] == ["seed", *["in TRAIN", "loss"] * 3, *["in VALID"] * 3]


def test_after_a_runner_nobody_listens_not_even_after_a_failure(observing: Config) -> None:
    class Fails(stages.Terminal):
        def terminal(self, context: Context) -> None:
            assert hookspecs.observer
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(observing(terminal_class_path=Fails)).run()
    assert hookspecs.observer is None


def test_without_a_plugin_that_listens_there_is_no_observer(config: Config) -> None:
    class Looks(stages.Startup):
        def startup(self, context: Context) -> None:
            assert hookspecs.observer is None

    GeneralTrainer(config(epochs=1, startup_class_path=Looks)).run()
    value = object()
    assert observe("anything", value) is value


class Reads(TensorDataset):
    """A dataset whose samples are observed where they are read."""

    def __init__(self) -> None:
        super().__init__(torch.randn(8, 3), torch.randn(8, 1))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [observe("samples of", os.getpid()) and self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_in_the_workers_of_a_loader_nobody_listens(observing: Config, workers: int) -> None:
    chosen = observing()
    chosen["dataset"][0] |= {"class_path": Reads, "num_workers": workers}
    GeneralTrainer(chosen).run()
    assert {pid for _, pid in Observes.values} == (set() if workers else {os.getpid()})


def test_a_compiled_model_with_observe_in_it_is_one_graph_where_nobody_listens() -> None:
    net, x = Net(), torch.ones(2, 3)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_gives_its_values_to_a_plugin_that_listens(observing: Config) -> None:
    chosen = observing()
    chosen["phase"][0]["model"] = Compiled
    GeneralTrainer(chosen).run()
    assert [type(value) for _, value in Observes.values] == [Tensor] * 3


def test_an_export_of_the_model_is_not_observed(observing: Config) -> None:
    chosen = observing(save_inference_interval=1, save_inference_export=True)
    chosen["phase"][0]["model"] = Net
    GeneralTrainer(chosen).run()
    assert [value.shape[0] for _, value in Observes.values] == [4, 4, 2]
