"""A Brain that trains and evaluates by itself, against loops written by hand."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Brain, Stage
from pipeline.brain.checkpointer import Checkpointer
from pipeline.brain.fit import EVERY, pass_progress
from pipeline.compute.trainable import trainable_of
from pipeline.errors import ConfigError, DataError, DivergedError, StageError

Table = Callable[..., TensorDataset]
mse = nn.functional.mse_loss


class Line(Brain):
    """A linear model of batches (inputs, target); ``events`` has each hook with its arguments."""

    def __init__(self, features: int = 3, rate: float = 0.1, **keywords: Any) -> None:
        torch.manual_seed(0)
        keywords.setdefault("opt_class", lambda parameters: SGD(parameters, rate))
        super().__init__({"net": nn.Linear(features, 1)}, **keywords)
        self.events: list[tuple[Any, ...]] = []

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


class Telling(Line):
    """A Line that notes each of its hooks."""

    def on_fit_start(self) -> None:
        self.events.append(("fit_start",))
        super().on_fit_start()

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        self.events.append(("stage_start", stage.name, epoch))

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        self.events.append(("batch_start", len(batch[0]), should_step))

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        assert outputs.shape == batch[1].shape
        assert not loss.requires_grad
        self.events.append(("batch_end", loss.item(), should_step))

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.events.append(("stage_end", stage.name, stage_loss, epoch))

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        self.events.append(("evaluate_start", max_key, min_key))


class Stream:
    """Batches of a loader that does not know how many there are."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def batches_of(data: TensorDataset, size: int = 4) -> list[Any]:
    return list(zip(*(each.split(size) for each in data.tensors), strict=True))


def by_hand(
    batches: list[Any], *, epochs: int = 1, clip: float | None = None, rate: float = 0.1
) -> tuple[Any, list[float]]:
    """The model after a loop over the batches, and the loss of each step."""
    torch.manual_seed(0)
    model, losses = nn.Linear(batches[0][0].shape[1], 1), []
    optimizer = SGD(model.parameters(), rate)
    for inputs, target in batches * epochs:
        optimizer.zero_grad()
        loss = mse(model(inputs), target)
        losses.append(loss.item())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, losses


def same(brain: Brain, model: nn.Module) -> bool:
    """Bit for bit."""
    return all(map(torch.equal, brain.modules.net.parameters(), model.parameters()))


def saved(folder: Path) -> list[str]:
    """What a checkpointer left there."""
    return sorted(path.name for path in folder.iterdir() if path.name != "cwd")


# The weights.


@pytest.mark.parametrize(
    ("options", "clip"), [({}, 5.0), ({"max_grad_norm": None}, None), ({"max_grad_norm": 0.5}, 0.5)]
)
def test_the_weights_are_those_of_a_loop_by_hand_which_clips_at_5_unless_told_otherwise(
    make_table: Table, options: dict[str, Any], clip: float | None
) -> None:
    data = make_table(10)
    steep = [(inputs * 10, target) for inputs, target in batches_of(data)]
    brain = Line(rate=0.001, run_opts=options)
    brain.fit(range(3), DataLoader(TensorDataset(data.tensors[0] * 10, data.tensors[1]), batch_size=4))
    assert same(brain, by_hand(steep, epochs=3, clip=clip, rate=0.001)[0])
    assert not same(brain, by_hand(steep, epochs=3, clip=None if clip else 5.0, rate=0.001)[0])


def test_a_dataset_is_loaded_with_the_keywords_and_a_loader_is_taken_as_it_is(make_table: Table) -> None:
    of_dataset, of_loader, of_stream = Line(), Line(), Line()
    of_dataset.fit(range(2), make_table(10), train_loader_kwargs={"batch_size": 4})
    of_loader.fit(range(2), DataLoader(make_table(10), batch_size=4))
    of_stream.fit(range(2), Stream(batches_of(make_table(10))))
    model, _ = by_hand(batches_of(make_table(10)), epochs=2, clip=5.0)
    assert [same(each, model) for each in (of_dataset, of_loader, of_stream)] == [True] * 3


# Hooks.


def test_the_hooks_come_in_the_order_of_the_seed(make_table: Table) -> None:
    brain, batches = Telling(), batches_of(make_table(6))
    brain.fit([7], DataLoader(make_table(6), batch_size=4), DataLoader(make_table(6), batch_size=6))
    model, losses = by_hand(batches, clip=5.0)
    x, y = make_table(6).tensors
    assert brain.events == [
        ("fit_start",),
        ("stage_start", "TRAIN", 7),
        ("batch_start", 4, True),
        ("batch_end", losses[0], True),
        ("batch_start", 2, True),
        ("batch_end", losses[1], True),
        ("stage_end", "TRAIN", pytest.approx((4 * losses[0] + 2 * losses[1]) / 6, rel=1e-6), 7),
        ("stage_start", "VALID", 7),
        ("stage_end", "VALID", pytest.approx(mse(model(x), y).item(), rel=1e-6), 7),
    ]


def test_evaluate_gives_the_mean_loss_over_samples_between_its_hooks(make_table: Table) -> None:
    brain, (x, y) = Telling(), make_table(6).tensors
    mean = brain.evaluate(DataLoader(make_table(6), batch_size=4), min_key="loss")
    assert mean == pytest.approx(mse(brain.modules.net(x), y).item(), rel=1e-6)
    assert brain.events == [
        ("evaluate_start", None, "loss"),
        ("stage_start", "TEST", None),
        ("stage_end", "TEST", mean, None),
    ]


def test_should_step_is_true_where_a_window_is_full_or_the_loader_ends_and_the_update_is_in_that_very_batch(
    make_table: Table,
) -> None:
    class Weighing(Telling):
        def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
            self.before = self.modules.net.weight.detach().clone()

        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
            self.events.append((should_step, not torch.equal(self.before, self.modules.net.weight)))

    brain = Weighing(run_opts={"grad_accumulation_factor": 2})
    brain.fit(range(1), DataLoader(make_table(10), batch_size=2))
    told = [each for each in brain.events if each[0] in (True, False)]
    assert told == [(False, False), (True, True), (False, False), (True, True), (True, True)]


def test_without_a_length_the_last_window_is_closed_after_the_last_batch(make_table: Table) -> None:
    known, unknown = (Telling(run_opts={"grad_accumulation_factor": 2}) for _ in range(2))
    known.fit(range(1), DataLoader(make_table(10), batch_size=2))
    unknown.fit(range(1), Stream(batches_of(make_table(10), 2)))
    assert [each[2] for each in unknown.events if each[0] == "batch_start"] == [False, True, False, True, False]
    assert same(known, unknown.modules.net)
    assert (
        trainable_of(known).counters
        == trainable_of(unknown).counters
        == {"iteration": 5, "update": 3, "epoch": 1, "samples": 10, "phase_index": 0}
    )


def test_modules_train_in_training_and_are_evaluated_without_gradients(make_table: Table) -> None:
    class Watching(Line):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            self.events.append((stage.name, self.modules.net.training, torch.is_grad_enabled()))
            return super().compute_forward(batch, stage)

    brain = Watching()
    brain.fit(range(2), DataLoader(make_table(4), batch_size=4), DataLoader(make_table(4), batch_size=4))
    assert brain.events == [("TRAIN", True, True), ("VALID", False, False)] * 2


# What is logged.


class Logging(Line):
    """Logs the first input of each batch, and in each hook of a pass its own name."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        self.log("first", (batch[0][0, 0] * self.modules.net.weight.sum() / self.modules.net.weight.sum().detach()))
        return super().compute_forward(batch, stage)

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        self.log(f"{stage.name}_start", 1.0)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.log(f"{stage.name}_end", 2.0)


def test_what_is_logged_in_any_part_of_a_pass_is_kept_with_its_numbers(make_table: Table, tmp_path: Path) -> None:
    brain = Logging(checkpointer=Checkpointer(tmp_path))
    brain.fit(range(1), DataLoader(make_table(6), batch_size=4), DataLoader(make_table(5, seed=2), batch_size=4))
    numbers = json.loads((tmp_path / "step-000000000002" / "state.json").read_text())["metrics"]["brain"]
    x, v = make_table(6).tensors[0], make_table(5, seed=2).tensors[0]
    assert set(numbers) == {
        "loss", "first", "TRAIN_start", "TRAIN_end", "valid_loss", "valid_first", "valid_VALID_start", "valid_VALID_end",
    }  # fmt: skip
    assert numbers["first"] == pytest.approx((4 * x[0, 0] + 2 * x[4, 0]).item() / 6, rel=1e-6)
    assert numbers["valid_first"] == pytest.approx((4 * v[0, 0] + 1 * v[4, 0]).item() / 5, rel=1e-6)


def test_what_is_logged_holds_no_graph(make_table: Table) -> None:
    brain = Logging()
    brain.fit(range(1), DataLoader(make_table(6), batch_size=4))
    assert trainable_of(brain).numbers.logged["first"].mean() == trainable_of(brain).numbers.logged["first"].mean()
    brain.log("late", brain.modules.net.weight.sum())
    assert not trainable_of(brain).numbers.logged["late"].waiting[0][0].requires_grad


@pytest.mark.parametrize("named", [{"loss": 1.0, "a": 2.0, "b": 4.0}, {"a": 2.0, "b": 4.0}])
def test_the_loss_of_several_is_the_one_of_that_name_else_the_sum_and_each_other_is_reported(
    make_table: Table, named: dict[str, float]
) -> None:
    class Several(Line):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            return {name: value * predictions.sum() / predictions.sum().detach() for name, value in named.items()}

        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            self.events.append((stage.name, stage_loss, trainable_of(self).numbers.logged.means()))

    brain = Several()
    with_loss = "loss" in named
    brain.evaluate(DataLoader(make_table(6), batch_size=4))
    if with_loss:
        brain.fit(range(1), DataLoader(make_table(6), batch_size=4))
    others = pytest.approx({"a": 2.0, "b": 4.0})
    expected = [("TEST", pytest.approx(1.0 if with_loss else 6.0), others), ("TRAIN", pytest.approx(1.0), others)]
    assert brain.events == expected[: 1 + with_loss]


# How long it trains.


@pytest.mark.parametrize(
    ("limit", "iterations", "epochs"), [(1, 4, 0), (2, 8, 0), (3, 10, 1), (4, 14, 1), (None, 30, 3)]
)
def test_optimizer_step_limit_counts_updates_and_not_iterations(
    make_table: Table, limit: int | None, iterations: int, epochs: int
) -> None:
    brain = Line(run_opts={"grad_accumulation_factor": 4, "optimizer_step_limit": limit})
    brain.fit(range(3), DataLoader(make_table(20), batch_size=2))
    assert trainable_of(brain).counters["update"] == (limit or 9)
    assert (trainable_of(brain).counters["iteration"], trainable_of(brain).counters["epoch"]) == (iterations, epochs)


def test_a_limit_that_is_reached_when_the_last_window_of_a_stream_closes_ends_training_there(make_table: Table) -> None:
    brain = Line(run_opts={"grad_accumulation_factor": 4, "optimizer_step_limit": 2})
    brain.fit(range(5), Stream(batches_of(make_table(6), 2)))
    assert trainable_of(brain).counters == {"iteration": 6, "update": 2, "epoch": 2, "samples": 12, "phase_index": 0}


def test_training_that_reached_its_limit_is_validated_and_saved(make_table: Table, tmp_path: Path) -> None:
    brain = Telling(run_opts={"optimizer_step_limit": 2}, checkpointer=Checkpointer(tmp_path))
    brain.fit(range(5), DataLoader(make_table(10), batch_size=2), DataLoader(make_table(10), batch_size=2))
    assert [each[1] for each in brain.events if each[0] == "stage_end"] == ["TRAIN", "VALID"]
    assert saved(tmp_path) == ["step-000000000002"]


def test_test_only_trains_nothing(make_table: Table) -> None:
    brain = Telling(run_opts={"test_only": True})
    brain.fit(range(1), make_table(4))
    assert brain.events == []
    assert trainable_of(brain).counters["iteration"] == 0


def test_counters_go_on_when_fit_is_called_again(make_table: Table) -> None:
    brain = Line()
    for _ in range(2):
        brain.fit(range(2), DataLoader(make_table(6), batch_size=4))
    assert trainable_of(brain).counters == {"iteration": 8, "update": 8, "epoch": 4, "samples": 24, "phase_index": 0}


# Debug.


@pytest.mark.parametrize(
    ("options", "epochs", "batches"),
    [
        ({}, [5, 6], 2),
        ({"debug_epochs": 1, "debug_batches": 3}, [5], 3),
        ({"debug_epochs": 0}, [5, 6, 7, 8], 2),
        ({"debug_epochs": -1, "debug_batches": 1}, [5, 6, 7, 8], 1),
        ({"debug_batches": 9}, [5, 6], 5),
    ],
)
def test_a_debug_run_stops_after_so_many_batches_of_each_pass_and_so_many_epochs_whatever_their_numbers(
    make_table: Table, options: dict[str, Any], epochs: list[int], batches: int
) -> None:
    class Counting(Telling):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            self.events.append(("forward", stage.name))
            return super().compute_forward(batch, stage)

    brain, loader = Counting(run_opts={"debug": True, **options}), DataLoader(make_table(10), batch_size=2)
    brain.fit(range(5, 9), loader, loader)
    brain.evaluate(loader)
    assert [each[2] for each in brain.events if each[:2] == ("stage_start", "TRAIN")] == epochs
    passes = {name: brain.events.count(("forward", name)) for name in ("TRAIN", "VALID", "TEST")}
    assert passes == {"TRAIN": batches * len(epochs), "VALID": batches * len(epochs), "TEST": batches}


def test_a_window_of_accumulation_closes_with_the_last_batch_of_a_debug_run(make_table: Table) -> None:
    brain = Telling(run_opts={"debug": True, "debug_epochs": 1, "grad_accumulation_factor": 4})
    brain.fit(range(5), DataLoader(make_table(20), batch_size=2))
    assert [each[2] for each in brain.events if each[0] == "batch_start"] == [False, True]
    assert trainable_of(brain).counters["update"] == 1


@pytest.mark.parametrize(("persistently", "kept"), [(False, []), (True, ["step-000000000002", "step-000000000004"])])
def test_a_debug_run_keeps_its_checkpoints_only_if_asked(
    make_table: Table, tmp_path: Path, persistently: bool, kept: list[str]
) -> None:
    checkpointer = Checkpointer(tmp_path)
    brain = Line(run_opts={"debug": True, "debug_persistently": persistently}, checkpointer=checkpointer)
    brain.fit(range(5), DataLoader(make_table(10), batch_size=2))
    assert saved(tmp_path) == kept
    assert brain.checkpointer is checkpointer


# Checkpoints.


@pytest.mark.parametrize(("options", "steps"), [({}, [3, 6]), ({"ckpt_interval_steps": 2}, [2, 3, 4, 6])])
def test_a_checkpoint_is_saved_after_each_epoch_and_every_so_many_steps(
    make_table: Table, tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    brain = Line(run_opts=options, checkpointer=Checkpointer(tmp_path))
    brain.fit(range(2), DataLoader(make_table(6), batch_size=2))
    assert saved(tmp_path) == [f"step-{step:012d}" for step in steps]


def test_fit_begins_with_the_weights_of_the_newest_checkpoint(make_table: Table, tmp_path: Path) -> None:
    first, second = Line(checkpointer=Checkpointer(tmp_path)), Line(checkpointer=Checkpointer(tmp_path))
    first.fit(range(2), DataLoader(make_table(6), batch_size=2))
    nn.init.zeros_(second.modules.net.weight)
    second.fit(range(0), DataLoader(make_table(6), batch_size=2))
    assert same(second, first.modules.net)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("options", [{}, {"ckpt_interval_steps": 1}])
@pytest.mark.parametrize(("key", "step"), [({"min_key": "valid_size"}, 1), ({"max_key": "valid_size"}, 2), ({}, 3)])
def test_evaluate_takes_the_best_checkpoint_by_its_key_else_the_newest(
    make_table: Table, tmp_path: Path, key: dict[str, str], step: int, options: dict[str, Any]
) -> None:
    class Sized(Line):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            if stage is not Stage.TEST:
                self.log("size", [10.0, 30.0, 20.0][epoch or 0])

    brain = Sized(checkpointer=Checkpointer(tmp_path), run_opts=options)
    brain.fit(range(3), DataLoader(make_table(4), batch_size=2), DataLoader(make_table(4), batch_size=4))
    brain.evaluate(DataLoader(make_table(4), batch_size=4), **key)
    expected, _ = by_hand(batches_of(make_table(4), 2), epochs=step, clip=5.0)
    assert same(brain, expected)


# Wrong use.


def test_a_brain_without_opt_class_says_so() -> None:
    with pytest.raises(
        StageError, match=r"Line.fit_batch: no OptimScheduler trains it; give it opt_class and call fit"
    ):
        Line(opt_class=None).fit(range(1), [(torch.ones(3), torch.ones(1))])


def test_a_loader_that_gives_nothing_is_refused(make_table: Table) -> None:
    with pytest.raises(DataError, match="'train_set' gave no batch in epoch 3; check the dataset, or drop_last"):
        Line().fit([3], Stream([]))
    with pytest.raises(DataError, match="the test set gave no batch; check the dataset, or drop_last"):
        Line().evaluate(Stream([]))
    with pytest.raises(DataError, match="'valid_set' gave no batch; check the dataset, or drop_last"):
        Line().fit([0], [(torch.ones(3), torch.ones(1))], Stream([]))
    with pytest.raises(DataError, match=r"Brain.make_dataloader: list has no samples; check its arguments"):
        Line().fit(range(1), [])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("train_loader_kwargs", lambda brain, loader, keywords: brain.fit([1], loader, train_loader_kwargs=keywords)),
        ("valid_loader_kwargs", lambda brain, loader, keywords: brain.fit([1], loader, loader, None, None, keywords)),
        ("test_loader_kwargs", lambda brain, loader, keywords: brain.evaluate(loader, test_loader_kwargs=keywords)),
    ],
)
def test_loader_keywords_beside_a_loader_would_be_ignored_and_are_refused(
    make_table: Table, name: str, call: Any
) -> None:
    brain = Line()
    with pytest.raises(
        ConfigError, match=f"{name} would be ignored: DataLoader is a loader already; give .* the dataset"
    ):
        call(brain, DataLoader(make_table(4)), {"batch_size": 2})
    assert trainable_of(brain).counters["iteration"] == 0


def test_an_unknown_loader_keyword_is_told_with_the_nearest(make_table: Table) -> None:
    with pytest.raises(ConfigError, match=r"DataLoader has no argument 'batchsize'; did you mean 'batch_size'\?"):
        Line().fit([1], make_table(4), train_loader_kwargs={"batchsize": 2})


def test_two_keys_of_the_best_checkpoint_are_one_too_many(make_table: Table, tmp_path: Path) -> None:
    brain = Line(checkpointer=Checkpointer(tmp_path))
    with pytest.raises(ConfigError, match="evaluate: max_key is 'acc' and min_key 'loss'; name one"):
        brain.evaluate(DataLoader(make_table(4)), max_key="acc", min_key="loss")


@pytest.mark.parametrize("key", ["max_key", "min_key"])
def test_a_key_without_a_checkpointer_is_refused(make_table: Table, key: str) -> None:
    with pytest.raises(
        ConfigError, match="evaluate: 'acc' chooses a checkpoint, and there is no checkpointer; give the"
    ):
        Line().evaluate(DataLoader(make_table(4)), **{key: "acc"})


def test_a_model_of_which_nothing_is_trained_is_refused(make_table: Table) -> None:
    brain = Line()
    brain.modules.requires_grad_(False)
    with pytest.raises(ConfigError, match="ModuleDict has no parameter that is trained; set requires_grad on some, or"):
        brain.fit(range(1), DataLoader(make_table(4)))


def test_a_loss_without_gradient_is_refused(make_table: Table) -> None:
    class Cut(Line):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return super().compute_objectives(predictions, batch, stage).detach()

    with pytest.raises(DataError, match="the loss 'loss' has no gradient; compute it from the model's output"):
        Cut().fit(range(1), DataLoader(make_table(4)))


def test_named_losses_without_the_one_that_is_descended_are_refused(make_table: Table) -> None:
    class Misnamed(Line):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            return {"los": super().compute_objectives(predictions, batch, stage)}

    with pytest.raises(
        DataError, match=r"there is no loss 'loss', which an OptimScheduler descends; did you mean 'los'\?"
    ):
        Misnamed().fit(range(1), DataLoader(make_table(4)))


def test_training_that_diverges_ends_with_the_first_iteration_and_the_loss(make_table: Table) -> None:
    class Nan(Line):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            return super().compute_objectives(predictions, batch, stage) * (float("nan") if self.step > 1 else 1.0)

    with pytest.raises(DivergedError, match=r"^'loss' is nan: 4 of its losses .* the first in iteration 2; lower the"):
        Nan().fit(range(1), DataLoader(make_table(8)))


def test_divergence_in_recipe_is_caught_as_value_error(make_table: Table) -> None:
    """SpeechBrain raises a ValueError, which its recipes catch."""

    class Nan(Line):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            return super().compute_objectives(predictions, batch, stage) * math.nan

    caught: list[ValueError] = []
    try:
        Nan(run_opts={"nonfinite_patience": 0}).fit(range(1), DataLoader(make_table(2)))
    except ValueError as error:
        caught.append(error)
    assert [type(error) for error in caught] == [DivergedError]


def test_no_loss_is_read_in_an_iteration_in_which_nothing_is_due(make_table: Table, tmp_path: Path) -> None:
    class Reading(Line):
        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
            self.events.append((trainable_of(self).numbers.loss.batches,))

    brain = Reading(run_opts={"ckpt_interval_minutes": 10}, checkpointer=Checkpointer(tmp_path))
    brain.fit(range(1), DataLoader(make_table(10)))
    assert brain.events == [(0,)] * 10


class PlainLine(Brain):
    """A linear model of one input, whose targets are its inputs."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__({"net": nn.Linear(1, 1)}, opt_class=lambda x: SGD(x, 0.1), **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch)


DATA = [torch.ones(1)] * 3


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pass_progress(Brain(), "epoch 1", 100, None) as progress:
        progress.update(progress.task_ids[0], completed=50)
    assert capsys.readouterr().err == ""


def test_where_stderr_is_a_terminal_it_is_shown_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pass_progress(Brain(), "epoch 1", 100, None) as shown, pass_progress(Brain(), "epoch 1", 100, False) as hidden:
        assert (shown.disable, hidden.disable) == (False, True)


def test_the_bar_has_the_batches_and_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[tuple[Any, ...]] = []
    stop = Progress.stop

    def record(bar: Progress) -> None:
        shown = [(task.fields.get("title", "test"), task.completed, task.total, task.description) for task in bar.tasks]
        tasks.extend((title, completed, total, text[:10]) for title, completed, total, text in shown)
        stop(bar)

    monkeypatch.setattr(Progress, "stop", record)
    brain = PlainLine()
    brain.fit([1], [torch.ones(1)] * EVERY, progressbar=True)
    brain.evaluate(DATA, progressbar=True)
    assert tasks == [("epoch 1", EVERY, EVERY, "brain loss"), ("test", 3, 3, "test")]


@pytest.mark.parametrize(
    ("progressbar", "options", "shown"),
    [
        (True, {}, True),
        (False, {}, False),
        (None, {"noprogressbar": True}, False),
        (True, {"noprogressbar": True}, True),
    ],
)
def test_fit_and_evaluate_show_a_bar_where_they_are_asked_to(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    progressbar: bool | None,
    options: dict[str, Any],
    shown: bool,
) -> None:
    # rich draws nothing that moves into what is no terminal, but for this.
    monkeypatch.setenv("FORCE_COLOR", "1")
    brain = PlainLine(run_opts=options)
    brain.fit([3], DATA, progressbar=progressbar)
    assert ("epoch 3" in capsys.readouterr().err) is shown
    brain.evaluate(DATA, progressbar=progressbar)
    assert ("test" in capsys.readouterr().err) is shown


def test_a_bar_does_not_change_what_is_trained() -> None:
    weights = []
    for shown in (True, False):
        torch.manual_seed(0)
        brain = PlainLine()
        brain.fit(range(2), [torch.randn(1) for _ in range(2 * EVERY)], progressbar=shown)
        weights.append(brain.modules.net.weight)
    assert torch.equal(*weights)


def test_a_test_without_a_loss_gives_nan() -> None:
    class WithoutLoss(Brain):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return self.modules["net"](batch[0])

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
            return None

    brain = WithoutLoss({"net": nn.Linear(1, 1)})
    assert math.isnan(brain.evaluate([(torch.ones(2, 1), torch.ones(2, 1))], progressbar=False))


SPEECHBRAIN = {
    "dataset": """
class DynamicItemDataset:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {"x": float(index)}
class Sorted(DynamicItemDataset):
    pass
""",
    "batch": """
import torch
class PaddedBatch:
    def __init__(self, samples):
        self.x = torch.tensor([[sample["x"]] for sample in samples])
    def to(self, device):
        return self
""",
}  # fmt: skip


@pytest.mark.parametrize("name", ["DynamicItemDataset", "Sorted"])
def test_a_dataset_of_speechbrain_gives_its_padded_batches_unless_told_otherwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What stands for that library, which is not installed here.
    folder = tmp_path / "speechbrain" / "dataio"
    folder.mkdir(parents=True)
    for module, text in SPEECHBRAIN.items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for module in [module for module in sys.modules if module.partition(".")[0] == "speechbrain"]:
        monkeypatch.delitem(sys.modules, module)
    data: Any = getattr(importlib.import_module("speechbrain.dataio.dataset"), name)()

    class Padded(Line):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return self.modules.net(batch.x)

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            self.events.append(batch.x.flatten().tolist())
            return predictions.mean()

    brain = Padded(features=1)
    brain.fit(range(1), data, train_loader_kwargs={"batch_size": 2, "ckpt_prefix": None})
    assert brain.events == [[0.0, 1.0], [2.0, 3.0]]
    assert trainable_of(brain).counters["samples"] == 4
    own = brain.make_dataloader(data, Stage.TEST, "loader-", collate_fn=len, batch_size=3)
    assert list(own) == [3, 1]
    for module in [module for module in sys.modules if module.partition(".")[0] == "speechbrain"]:
        monkeypatch.delitem(sys.modules, module)


def test_a_loader_that_was_made_for_the_fit_goes_on_in_the_middle_as_one_of_the_fit(
    tmp_path: Path, make_table: Table
) -> None:
    data, keywords = make_table(12), {"batch_size": 4, "shuffle": True}
    ended = []
    for made, folder in ((False, "a"), (True, "b")):
        for limit in (4, 6):
            options = {"optimizer_step_limit": limit, "ckpt_interval_steps": 1}
            brain = Line(checkpointer=Checkpointer(tmp_path / folder), run_opts=options)
            if made:
                brain.fit(range(2), brain.make_dataloader(data, Stage.TRAIN, ckpt_prefix="loader-", **keywords))
            else:
                brain.fit(range(2), data, train_loader_kwargs=keywords)
        ended.append(brain.modules.net.weight.tolist())
    assert ended[0] == ended[1]


def test_the_profiler_looks_at_the_first_batches_of_a_fit(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    options = {"profile_training": True, "profile_warmup": 2, "profile_steps": 3}
    brain = PlainLine(hparams={"output_folder": folder}, run_opts=options)
    brain.fit(range(2), [torch.ones(1)] * 4)
    assert sorted(path.name for path in (folder / "profiler").iterdir()) == ["operators_3-5.txt", "trace_3-5.json"]
    assert trainable_of(brain).counters["iteration"] == 8
    with pytest.raises(
        ConfigError, match="profile_training writes into the hyperparameter output_folder; there is none"
    ):
        PlainLine(run_opts=options).fit(range(1), [torch.ones(1)])
