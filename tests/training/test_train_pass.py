"""One epoch of training: the hooks of a Brain around the hot loop, in a run; by itself they are in test_fitting.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, Stage
from pipeline.context import Context
from pipeline.errors import ConfigError
from pipeline.training.brain import ModuleBrain
from pipeline.training.fit import Fit, pass_progress
from pipeline.training.schedules import Constant
from pipeline.training.train_pass import TrainPass
from pipeline.training.trainable import trainable_of
from pipeline.training.updater import Updater, UpdaterBase

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
    brain = Watched()
    brain.bind("", {"main": Constant("SGD", {"lr": 0.1}, brain.modules)})
    trainable_of(brain).begin_pass(keeps_outputs=True)
    fit = Fit(brain, brain, None, None)
    fit.after_batch = lambda **values: brain.events.append(tuple(values["losses"]))
    fit.run(range(1))
    assert brain.events.count(("loss",)) == 4
    assert brain.left == [0, 0, 0, 0]


def test_a_loop_of_ones_own_keeps_only_the_batch_that_its_variable_has() -> None:
    brain = Watched()
    brain.bind("", {"main": Constant("SGD", {"lr": 0.1}, brain.modules)})
    fit = Fit(brain, brain, None, False)
    training = TrainPass(fit, "brain", brain, fit.updater)
    with pass_progress(brain, "", None, show=False) as fit.bar:
        for batch in training.batches():
            brain.fit_batch(batch)
    assert brain.left == [0, 1, 1, 1]


def trained(brain: Brain, updater: UpdaterBase, epochs: int = 1) -> Fit:
    """So many passes over the data, as ``fit`` makes them."""
    fit = Fit(brain, DATA, None, None)
    fit.updater = updater
    fit.run(range(epochs))
    return fit


def bound() -> ModuleBrain:
    brain = ModuleBrain(nn.Linear(1, 1), mse)
    brain.bind("", {"main": Constant("SGD", {"lr": 0.1}, brain.modules)})
    return brain


def test_training_ends_where_the_loop_says_and_goes_on_from_there() -> None:
    brain, looked = bound(), []

    class Ending(Fit):
        def on_due(self, training: TrainPass) -> bool:
            looked.append(trainable_of(brain).counters["iteration"])
            self.due = {2: 5, 5: 9}[looked[-1]]
            return looked[-1] != 5

        def next_check(self) -> int:
            return 5 if looked else 2

    fit = Ending(brain, DATA, None, None)
    fit.run(range(2))
    assert looked == [2, 5]
    assert (trainable_of(brain).counters["iteration"], fit.updater.state.iteration) == (5, 5)


def test_its_numbers_are_the_mean_loss_and_what_was_logged() -> None:
    class Logging(ModuleBrain):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            self.log("first", batch[0][0, 0])
            return super().compute_forward(batch, stage)

    brain = Logging(nn.Linear(1, 1), mse)
    brain.bind("", {"main": Constant("SGD", {"lr": 0.0}, brain.modules)})
    numbers = trained(brain, Updater(brain)).metrics
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    assert numbers == {"loss": pytest.approx(mse(brain.module(x), y).item(), rel=1e-6), "first": 1.0}


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
