"""When plugins are told of backward passes and updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from pipeline import Brain, Stage, UpdaterBase, hookimpl
from pipeline.context import Context
from pipeline.training.loop import attach_optimizer_hooks
from pipeline.training.schedules import Constant

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]


class Pair(Brain):
    """Two modules, each with a loss of its own; the loss of the first is nan in the batches that ``broken`` names."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        super().__init__({"one": nn.Linear(3, 1), "two": nn.Linear(3, 1)})
        self.broken = broken

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.one(batch[0]), self.modules.two(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        first, second = (nn.functional.mse_loss(each, batch[1]) for each in predictions)
        return {"one": first * math.nan if self.step in self.broken else first, "two": second}


@pytest.fixture
def watcher() -> Any:
    """A plugin class whose ``events`` are the hooks of a batch, with the names of schedulers."""

    class Watcher:
        events: list[str] = []  # noqa: RUF012

        @hookimpl
        def before_batch(self, context: Context) -> None:
            self.events.append("batch")

        @hookimpl
        def after_backward(self, context: Context, losses: dict[str, Tensor]) -> None:
            assert context["model"]
            self.events.append(f"backward {' '.join(losses)}")

        @hookimpl
        def before_update(self, context: Context, name: str, optim_scheduler: Any) -> None:
            gradients = [parameter.grad is not None for parameter in optim_scheduler.parameters]
            self.events.append(f"before {name} {'with' if all(gradients) else 'without'}")

        @hookimpl
        def after_update(self, name: str, optim_scheduler: Any) -> None:
            assert all(parameter.grad is None for parameter in optim_scheduler.parameters)
            self.events.append(f"after {name}")

        @hookimpl
        def after_batch(self) -> None:
            self.events.append("end")

    return Watcher


def pair(config: Config, watcher: Any, **schedulers: dict[str, Any]) -> dict[str, Any]:
    """A run of one epoch (3 batches) of a Pair, with a scheduler for each module."""
    chosen = config(epochs=1)
    del chosen["hyper_parameters"]["optimizer"]
    args = {
        name: {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "optim_loss": name, "updated_modules": name}
        for name in ("one", "two")
    }
    built = {name: {"class": "constant", "args": args[name] | schedulers.get(name, {})} for name in args}
    chosen["phase"] = [{"name": "line", "model": Pair, "dataset_name": "data", "optim_schedulers": built}]
    chosen["plugins"].append(watcher)
    return chosen


ONE, TWO = ["before one with", "after one"], ["before two with", "after two"]


def test_of_each_batch_comes_backward_then_each_update_by_its_name(config: Config, run: Run, watcher: Any) -> None:
    run(pair(config, watcher))
    assert watcher.events == ["batch", "backward one two", *ONE, *TWO, "end"] * 3


def test_with_accumulation_an_update_is_told_where_its_window_closes(config: Config, run: Run, watcher: Any) -> None:
    run(pair(config, watcher, two={"accum_grad": 2}))
    batch = ["batch", "backward one two", *ONE]
    assert watcher.events == [*batch, "end", *batch, *TWO, "end", *batch, *TWO, "end"]


def test_a_scheduler_that_does_not_act_tells_nothing(config: Config, run: Run, watcher: Any) -> None:
    run(pair(config, watcher, one={"step_per_update": 2}))
    batch = ["batch", "backward one two"]
    assert watcher.events == [*batch, *TWO, "end", *batch, *ONE, *TWO, "end", *batch, *TWO, "end"]


def test_a_discarded_window_is_told_as_well(config: Config, run: Run, watcher: Any) -> None:
    chosen = pair(config, watcher)
    chosen["phase"][0]["model_args"] = {"broken": (2,)}
    run(chosen)
    without = ["before one without", "after one"]
    assert watcher.events[7:14] == ["batch", "backward one two", *without, *TWO, "end"]


def test_an_updater_that_steps_its_schedulers_is_watched_too(config: Config, run: Run, watcher: Any) -> None:
    class Turns(UpdaterBase):
        def __init__(self, brain: Brain, optim_schedulers: dict[str, Any]) -> None:
            super().__init__()
            self.brain, self.optim_schedulers = brain, optim_schedulers

        def update(self, batch: Any) -> None:
            for scheduler in self.optim_schedulers.values():
                predictions = self.brain.compute_forward(batch, Stage.TRAIN)
                scheduler.step(self.brain.compute_objectives(predictions, batch, Stage.TRAIN))

    chosen = pair(config, watcher)
    chosen["phase"][0]["updater"] = {"class_path": Turns}
    run(chosen)
    assert watcher.events == ["batch", "backward one two", *ONE, "backward one two", *TWO, "end"] * 3


def test_a_hook_that_nobody_implements_costs_nothing(config: Config, run: Run, recorder: Any) -> None:
    chosen = config()
    chosen["plugins"].append(recorder)
    scheduler = run(chosen)["model"]["line"]["optim_schedulers"]["main"]
    assert (scheduler.after_backward, scheduler.before_update, scheduler.after_update) == (None, None, None)


def test_watching_again_takes_the_place_of_what_watched_before(config: Config, run: Run, watcher: Any) -> None:
    chosen = config()
    chosen["plugins"].append(watcher)
    context, plain = run(chosen), run(config())
    scheduler = Constant("SGD", {"lr": 0.1}, nn.Linear(1, 1))
    for each in (context, plain):
        attach_optimizer_hooks({"mine": scheduler}, each)
        assert (scheduler.before_update is None) is (each is plain)
