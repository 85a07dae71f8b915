"""One epoch of training: the hooks of a Brain around the hot loop, in a run; by itself they are in test_fitting.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipeline import Brain, RunnerBase, Stage, hookimpl
from pipeline.brain.module_brain import ModuleBrain
from pipeline.context import Context
from pipeline.errors import ConfigError
from pipeline.updater.updater import UpdaterBase

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
mse = nn.functional.mse_loss
DATA = [(torch.full((2, 1), float(number)), torch.ones(2, 1)) for number in range(3)]


class Telling(Brain):
    """A linear model that notes each of its hooks in a run."""

    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 1)})
        self.events: list[tuple[Any, ...]] = []

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.events.append(("fit_start",))

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        self.events.append(("start", stage.name, epoch))

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        self.events.append(("batch", self.step, should_step))

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        self.events.append(("batch_end", outputs.shape == batch[1].shape, should_step))

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.events.append(("end", stage.name, stage_loss, epoch))


def test_the_hooks_of_a_brain_come_in_a_run_as_in_fit(config: Config, run: Run) -> None:
    chosen = config(epochs=2, accum_grad=2)
    chosen["phase"] = [{"name": "line", "model": Telling, "dataset_name": "data", "valid_dataset_name": "data"}]
    context = run(chosen)
    events = context["model"]["line"]["brain"].events
    steps = [(1, False), (2, True), (3, True)]
    batches = [
        (name, {"batch": step, "batch_end": True}[name], should)
        for step, should in steps
        for name in ("batch", "batch_end")
    ]
    assert [each if each[0] != "end" else (*each[:2], each[3]) for each in events] == [
        ("fit_start",),
        *(
            event
            for epoch in range(2)
            for event in (
                ("start", "TRAIN", epoch), *batches, ("end", "TRAIN", epoch), ("start", "VALID", epoch), ("end", "VALID", epoch),
            )
        ),
    ]  # fmt: skip
    numbers = context["metrics"]["line"]
    assert [each[2] for each in events[-10:] if each[0] == "end"] == [numbers["loss"], numbers["valid_loss"]]


def test_a_test_has_no_epoch(config: Config, run: Run) -> None:
    chosen = config()
    chosen["runner"].append({"name": "infer", "class": "infer", "device": "cpu"})
    chosen["phase"] = [{"name": "line", "model": Telling, "dataset_name": "data"}]
    context = run(chosen)
    loss = context["metrics"]["line"]["loss"]
    assert context["model"]["line"]["brain"].events == [("start", "TEST", None), ("end", "TEST", loss, None)]


def test_plugins_see_each_batch_before_it_and_after_it_with_predictions_and_losses(
    config: Config, run: Run, recorder: Any
) -> None:
    chosen = config(epochs=1)
    chosen["hyper_parameters"] = {"optimizer": {"class": "SGD", "lr": 0.0}}
    chosen["plugins"].append(recorder)
    brain = run(chosen)["model"]["line"]["brain"]
    calls = [values for hook, _, values in recorder.calls if hook in {"before_batch", "after_batch"}]
    for before, after in zip(calls[::2], calls[1::2], strict=True):
        batch, predictions, losses = after["batch"], after["predictions"], after["losses"]
        assert batch is before["batch"]
        assert torch.equal(predictions, brain.module(batch[0]))
        assert torch.equal(losses["loss"], brain.loss(predictions, batch[1]))


class Watched(Telling):
    """A loader and a Brain: when the next batch is made, it notes what is left of the batches and predictions before."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ref[Tensor]] = []
        self.left: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(4):
            self.left.append(sum(made() is not None for made in self.made))
            batch = torch.ones(2, 3), torch.ones(2, 1)
            self.made.append(ref(batch[0]))
            yield batch
            del batch

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        predictions = super().compute_forward(batch, stage)
        self.made.append(ref(predictions))
        return predictions


def test_a_batch_and_its_predictions_are_freed_before_the_next_batch_is_made() -> None:
    class Looking:
        every_rank = True

        def __init__(self) -> None:
            self.losses: list[list[str]] = []

        @hookimpl
        def after_batch(self, losses: dict[str, Any]) -> None:
            self.losses.append([*losses])

    brain, looking = Watched(), Looking()
    brain.opt_class = partial(SGD, lr=0.1)
    brain.fit(range(1), brain, plugins=[looking])
    assert looking.losses == [["loss"]] * 4
    assert brain.left == [0, 0, 0, 0]


class OneByOne(RunnerBase):
    """Trains a Brain on the batches that it gives itself."""

    def run(self, context: Context) -> None:
        brain = context["model"]["line"]["brain"]
        context["dataset"]["data"] = brain
        for batch in context.batches("line"):
            brain.fit_batch(batch)


def test_a_loop_of_ones_own_keeps_only_the_batch_that_its_variable_has(config: Config, run: Run) -> None:
    chosen = config(runner_class_path=OneByOne)
    chosen["phase"] = [{"name": "line", "model": Watched, "dataset_name": "data"}]
    assert run(chosen)["model"]["line"]["brain"].left == [0, 1, 1, 1]


def test_its_numbers_are_the_mean_loss_and_what_was_logged() -> None:
    class Logging(ModuleBrain):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            self.log("first", batch[0][0, 0])
            return super().compute_forward(batch, stage)

    class Keeping:
        numbers: dict[str, float]

        @hookimpl
        def after_pass(self, metrics: dict[str, float]) -> None:
            self.numbers = metrics

    brain, keeping = Logging(nn.Linear(1, 1), mse), Keeping()
    brain.opt_class = partial(SGD, lr=0.0)
    brain.fit(range(1), DataLoader(DATA, batch_size=None), plugins=[keeping])
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    assert keeping.numbers == {"loss": pytest.approx(mse(brain.module(x), y).item(), rel=1e-6), "first": 1.0}


@pytest.mark.parametrize("returned", [True, False])
def test_what_is_logged_replaces_no_loss_but_that_of_an_updater_without_one(
    returned: bool, config: Config, run: Run
) -> None:
    class Logging(UpdaterBase):
        def update(self, batch: Any) -> Any:
            self.log("loss", 7.0)
            return torch.tensor(1.0) if returned else None

    chosen = config(epochs=1)
    chosen["phase"][0]["updater"] = {"class_path": Logging}
    with pytest.raises(ConfigError, match="would replace the loss") if returned else nullcontext():
        assert run(chosen)["metrics"]["line"]["loss"] == 7.0
