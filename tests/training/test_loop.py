"""The loop over epochs, phases and batches, against loops written by hand."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from pipeline import Brain, Context, GeneralTrainer, Stage, UpdaterBase, hookimpl
from pipeline.brain.module_brain import ModuleBrain
from pipeline.checkpoint import reader
from pipeline.compute.evaluation import evaluate
from pipeline.compute.trainable import trainable_of
from pipeline.errors import DataError, DivergedError, StorageError
from pipeline.metrics.base import Accuracy
from pipeline.optim.schedules import Constant
from pipeline.optim.stepping import attach_optimizer_hooks

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
Table = Callable[..., TensorDataset]
mse = nn.functional.mse_loss


def steps(context: Context) -> list[int]:
    """The iterations of the checkpoints of a run."""
    folder = context["run_dir"] / context["runner_name"] / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# The weights.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("optimizer", "runner", "hand"),
    [
        ({"class": "SGD", "lr": 0.1}, {}, {}),
        ({"class": "SGD", "lr": 0.1, "momentum": 0.9}, {"epochs": 3}, {"epochs": 3}),
        ({"class": "Adam", "learning_rate": 0.01}, {}, {}),
        ({"class": "Adam", "lr": 0.01}, {"grad_clip": 0.05}, {"clip": 0.05}),
        ({"class": "SGD", "lr": 0.1}, {"max_steps": 4}, {"steps": 4}),
        ({"class": "SGD", "lr": 0.1}, {"epochs": None, "max_steps": 8}, {"epochs": 3, "steps": 8}),
    ],
)
def test_the_weights_are_those_of_a_loop_by_hand_bit_for_bit(
    config: Config, run: Run, by_hand: Any, optimizer: dict[str, Any], runner: dict[str, Any], hand: dict[str, Any]
) -> None:
    chosen = config(**runner)
    chosen["hyper_parameters"]["optimizer"] = optimizer
    settings = {"lr": optimizer.get("lr", optimizer.get("learning_rate")), "momentum": optimizer.get("momentum", 0.0)}
    if optimizer["class"] == "Adam":
        del settings["momentum"]
    expected = by_hand(lambda parameters: getattr(torch.optim, optimizer["class"])(parameters, **settings), **hand)
    assert equal(run(chosen)["model"]["line"]["model"].state_dict(), expected)


def test_shuffled_batches_give_the_weights_of_a_loop_by_hand_in_the_same_order(
    config: Config, run: Run, by_hand: Any
) -> None:
    chosen = config(epochs=3)
    chosen["dataset"][0]["shuffle"] = True
    expected = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1), epochs=3, shuffle=True)
    in_order = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1), epochs=3)
    ours = run(chosen)["model"]["line"]["model"].state_dict()
    assert equal(ours, expected)
    assert not equal(ours, in_order)


def test_a_model_with_dropout_draws_what_a_loop_over_a_loader_by_hand_draws(
    config: Config, run: Run, make_table: Table
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1))

    chosen = config()
    chosen["phase"][0]["model"] = model
    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(make_table(10), batch_size=4):
            optimizer.zero_grad()
            mse(network(x), y).backward()
            optimizer.step()
    assert equal(run(chosen)["model"]["line"]["model"].state_dict(), network.state_dict())


def test_an_iterable_dataset_is_trained_on_in_its_own_order(
    config: Config, run: Run, by_hand: Any, make_table: Table
) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(make_table(10))

    chosen = config()
    chosen["dataset"][0]["class_path"] = Stream
    expected = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1))
    assert equal(run(chosen)["model"]["line"]["model"].state_dict(), expected)


# Phases.


def two_phases(config: Config, make_table: Table, **runner: Any) -> dict[str, Any]:
    """Phases ``wide`` (5 features, 3 batches) and ``line`` (3 features, 3 batches), in that order in the runner."""
    chosen = config(phases=["wide", "line"], **runner)
    chosen["dataset"].append({"name": "wide", "class_path": lambda: make_table(6, features=5), "batch_size": 2})
    chosen["phase"].append({"name": "wide", "model": lambda: nn.Linear(5, 1), "loss": mse, "dataset_name": "wide"})
    return chosen


def test_two_phases_train_in_turn_each_with_its_own_model_data_and_optimizer(
    config: Config, run: Run, make_table: Table
) -> None:
    chosen = two_phases(config, make_table)
    chosen["hyper_parameters"]["optimizer"] = {"class": "Adam", "lr": 0.01}
    torch.manual_seed(0)
    models = {"wide": nn.Linear(5, 1), "line": nn.Linear(3, 1)}
    data = {"wide": make_table(6, features=5).tensors, "line": make_table(10).tensors}
    optimizers = {name: torch.optim.Adam(model.parameters(), 0.01) for name, model in models.items()}
    for _, name in [(epoch, name) for epoch in range(2) for name in models]:
        for x, y in zip(*(each.split({"wide": 2, "line": 4}[name]) for each in data[name]), strict=True):
            optimizers[name].zero_grad()
            mse(models[name](x), y).backward()
            optimizers[name].step()
    ours = run(chosen)["model"]
    assert list(ours) == ["wide", "line"]
    assert all(equal(ours[name]["model"].state_dict(), models[name].state_dict()) for name in models)


def test_phases_take_turns_within_an_epoch_in_the_order_in_which_the_runner_names_them(
    config: Config, run: Run, make_table: Table, recorder: Any
) -> None:
    chosen = two_phases(config, make_table)
    chosen["plugins"].append(recorder)
    run(chosen)
    widths = [values["batch"][0].shape[1] for hook, _, values in recorder.calls if hook == "before_batch"]
    assert widths == [5, 5, 5, 3, 3, 3] * 2


def test_phases_that_the_runner_does_not_name_are_trained_in_the_order_of_the_config(
    config: Config, run: Run, make_table: Table
) -> None:
    chosen = two_phases(config, make_table)
    del chosen["runner"][0]["phases"]
    assert list(run(chosen)["metrics"]) == ["line", "wide"]


def test_iterations_are_counted_over_all_phases_and_max_steps_ends_in_the_middle_of_one(
    config: Config, run: Run, make_table: Table
) -> None:
    context = run(two_phases(config, make_table, epochs=5, max_steps=8))
    counts = {name: entry["updater"].state.iteration for name, entry in context["model"].items()}
    assert counts == {"wide": 5, "line": 3}
    assert context["train_state"]["iteration"] == 8


# Counters and numbers.


@pytest.mark.parametrize(
    ("runner", "iterations", "epochs"),
    [
        ({"epochs": 2}, 6, 2),
        ({"epochs": 2, "max_steps": 100}, 6, 2),
        ({"epochs": 100, "max_steps": 5}, 5, 1),
        ({"epochs": None, "max_steps": 6}, 6, 2),
    ],
)
def test_training_ends_after_its_epochs_or_max_steps_whichever_comes_first(
    config: Config, run: Run, runner: dict[str, Any], iterations: int, epochs: int
) -> None:
    state = run(config(**runner))["train_state"]
    assert (state["iteration"], state["update"], state["epoch"]) == (iterations, iterations, epochs)


def test_the_counters_say_what_was_done(config: Config, run: Run) -> None:
    context = run(config(epochs=3))
    assert context["train_state"] == {"iteration": 9, "update": 9, "epoch": 3, "samples": 30, "phase_index": 0}
    assert context["current_epoch"] == 2


def losses_by_hand(make_table: Table, batches: int) -> list[tuple[float, int]]:
    """(loss, samples) of each of the first batches, trained with SGD at 0.1."""
    torch.manual_seed(0)
    model, losses = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = make_table(10).tensors
    while len(losses) < batches:
        for inputs, target in zip(x.split(4), y.split(4), strict=True):
            loss = mse(model(inputs), target)
            losses.append((loss.item(), len(inputs)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses[:batches]


def weighted(losses: list[tuple[float, int]]) -> float:
    """The mean over samples."""
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


@pytest.mark.parametrize("print_interval", [None, 1, 2, 100])
def test_the_loss_of_an_epoch_is_the_mean_over_its_samples_however_often_it_is_printed(
    config: Config, run: Run, make_table: Table, print_interval: int | None
) -> None:
    context = run(config(print_interval=print_interval))
    assert context["metrics"]["line"]["loss"] == pytest.approx(weighted(losses_by_hand(make_table, 6)[3:]), rel=1e-6)


def test_print_interval_tells_the_mean_since_the_last_print_and_begins_again_with_each_epoch(
    config: Config, run: Run, make_table: Table, recorder: Any
) -> None:
    chosen = config(print_interval=2, epochs=3)
    chosen["plugins"].append(recorder)
    run(chosen)
    printed = [(at, values["metrics"]["loss"]) for hook, at, values in recorder.calls if hook == "on_print_interval"]
    losses = losses_by_hand(make_table, 8)
    # Iterations 1 to 3 are epoch 0, 4 to 6 epoch 1, 7 to 9 epoch 2.
    since = {2: losses[0:2], 4: losses[3:4], 6: losses[4:6], 8: losses[6:8]}
    assert printed == [(at, pytest.approx(weighted(those), rel=1e-6)) for at, those in since.items()]


def test_print_interval_counts_iterations_over_all_phases(
    config: Config, run: Run, make_table: Table, recorder: Any
) -> None:
    chosen = two_phases(config, make_table, print_interval=4)
    chosen["plugins"].append(recorder)
    run(chosen)
    printed = [(at, values["phase"]) for hook, at, values in recorder.calls if hook == "on_print_interval"]
    assert printed == [(4, "line"), (8, "wide"), (12, "line")]


def test_without_print_interval_nothing_is_printed(config: Config, run: Run, recorder: Any) -> None:
    chosen = config(print_interval=None)
    chosen["plugins"].append(recorder)
    run(chosen)
    assert "on_print_interval" not in {hook for hook, _, _ in recorder.calls}


def test_the_hooks_of_an_epoch_come_in_order(config: Config, run: Run, recorder: Any) -> None:
    chosen = config(epochs=1, print_interval=3)
    chosen["phase"][0]["valid_dataset_name"] = "data"
    chosen["plugins"].append(recorder)
    run(chosen)
    batches = [("before_batch", 0), ("after_batch", 1), ("before_batch", 1), ("after_batch", 2)]
    batches += [("before_batch", 2), ("after_batch", 3), ("on_print_interval", 3)]
    after = ["before_validation", "after_validation", "after_epoch", "after_checkpoint_saved"]
    assert [event[:2] for event in recorder.calls] == [("before_epoch", 0), *batches, *((hook, 3) for hook in after)]


# Validation.


class Watching(nn.Module):
    """Batch norm and dropout around a linear layer; ``seen`` has (training, gradients on) of each call."""

    seen: list[tuple[bool, bool]] = []  # noqa: RUF012

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(dropout), nn.Linear(3, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append((self.training, torch.is_grad_enabled()))
        result: Tensor = self.layers(inputs)
        return result


def validated(config: Config, model: Any, **runner: Any) -> dict[str, Any]:
    chosen = config(**runner)
    chosen["phase"][0] |= {"model": model, "valid_dataset_name": "data"}
    return chosen


def test_validation_runs_in_evaluation_mode_without_gradients_and_training_goes_on_in_its_own(
    config: Config, run: Run
) -> None:
    Watching.seen.clear()
    context = run(validated(config, Watching))
    assert Watching.seen == ([(True, True)] * 3 + [(False, False)] * 3) * 2
    assert all(module.training for module in context["model"]["line"]["model"].modules())


def test_validation_numbers_are_means_over_samples_of_the_trained_model_in_evaluation_mode(
    config: Config, run: Run, make_table: Table
) -> None:
    context = run(validated(config, Watching))
    model, (x, y) = context["model"]["line"]["model"].eval(), make_table(10).tensors
    assert context["metrics"]["line"]["valid_loss"] == pytest.approx(mse(model(x), y).item(), rel=1e-5)


def test_validation_changes_neither_weights_nor_buffers(config: Config, run: Run) -> None:
    with_it = validated(config, lambda: Watching(dropout=0.0))
    without = validated(config, lambda: Watching(dropout=0.0))
    del without["phase"][0]["valid_dataset_name"]
    states = [run(each)["model"]["line"]["model"].state_dict() for each in (with_it, without)]
    assert "layers.0.running_mean" in states[0]
    assert equal(*states)


def test_the_metrics_of_a_phase_judge_its_validation_and_start_again_each_epoch(
    config: Config, run: Run, recorder: Any
) -> None:
    class Samples:
        def __init__(self) -> None:
            self.reset()

        def update(self, predictions: Tensor, target: Tensor) -> None:
            assert predictions.shape == target.shape
            self.count += len(target)

        def compute(self) -> Tensor:
            return torch.tensor(self.count)

        def reset(self) -> None:
            self.count = 0

    chosen = config()
    chosen["phase"][0] |= {"valid_dataset_name": "data", "metrics": {"samples": {"class": Samples}}}
    chosen["plugins"].append(recorder)
    context = run(chosen)
    counted = [values["metrics"]["samples"] for hook, _, values in recorder.calls if hook == "after_validation"]
    assert counted == [10.0, 10.0]
    assert list(context["metrics"]["line"]) == ["loss", "valid_loss", "valid_samples"]


def test_evaluation_weighs_a_short_last_batch_by_its_samples() -> None:
    brain = ModuleBrain(nn.Identity(), nn.functional.cross_entropy)
    scores, classes = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
    batches = zip(scores.split(3), classes.split(3), strict=True)
    numbers = evaluate(brain, batches, Stage.TEST, {"accuracy": Accuracy()})
    assert numbers["loss"] == pytest.approx(nn.functional.cross_entropy(scores, classes).item(), rel=1e-6)
    assert numbers["accuracy"] == pytest.approx((scores.argmax(1) == classes).double().mean().item(), rel=1e-6)


def test_evaluation_leaves_each_module_in_the_mode_that_it_was_in() -> None:
    frozen = nn.Dropout().eval()
    brain = ModuleBrain(nn.Sequential(nn.Dropout(), frozen), mse)
    evaluate(brain, [(torch.ones(2, 1), torch.ones(2, 1))], Stage.VALID, {})
    assert brain.module[0].training
    assert not frozen.training


def test_evaluation_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="the evaluated dataset gave no batch; check the dataset"):
        evaluate(ModuleBrain(nn.Identity(), mse), [], Stage.TEST, {})


# Checkpoints.


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("runner", "saved"),
    [
        ({}, [3, 6, 9, 12]),
        ({"save_interval": "2 epoch"}, [6, 12]),
        ({"save_interval": "3 epochs"}, [9, 12]),
        ({"save_interval": 5}, [5, 10, 12]),
        ({"save_interval": "5 iteration"}, [5, 10, 12]),
        ({"save_interval": [5, "2 epoch"]}, [5, 6, 10, 12]),
        ({"save_interval": "10 minute"}, [12]),
        ({"save_interval": None}, [12]),
        ({"save_checkpoint_interval": 3}, [9, 12]),
        ({"max_steps": 7}, [3, 6, 7]),
        ({"max_steps": 6, "save_interval": 3}, [3, 6]),
    ],
)
def test_checkpoints_are_saved_at_their_intervals_and_at_the_end(
    config: Config, run: Run, runner: dict[str, Any], saved: list[int]
) -> None:
    assert steps(run(config(**{"epochs": 4, "keep_last": None, **runner}))) == saved


def test_checkpoints_are_saved_every_so_many_seconds(config: Config, run: Run) -> None:
    class Slow(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            time.sleep(0.4)
            return torch.ones(3), torch.ones(1)

    chosen = config(epochs=1, save_interval="1 second")
    chosen["dataset"] = [{"name": "data", "class_path": Slow}]
    saved = steps(run(chosen))
    assert min(saved) in {1, 2, 3}
    assert max(saved) == 4


def test_each_checkpoint_is_told_once_it_is_there_and_before_the_next_is_saved(
    config: Config, run: Run, recorder: Any
) -> None:
    chosen = config(save_interval=["1 epoch", 3, 2])
    chosen["plugins"].append(recorder)
    run(chosen)
    calls = [(at, values) for hook, at, values in recorder.calls if hook == "after_checkpoint_saved"]
    told = [(at, int(values["path"].name[5:])) for at, values in calls]
    # In the iterations 3 and 6 the epoch's end takes the place of what was saved after the batch.
    assert [step for _, step in told] == [2, 3, 3, 4, 6, 6]
    assert all(step <= at <= following for (at, step), following in zip(told, [3, 3, 4, 6, 6, 6], strict=True))


# Losses that are not finite.


class Breaking(nn.Module):
    """Linear, but its output is nan at the calls that ``at`` names, counted from 1."""

    def __init__(self, at: tuple[int, ...], features: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 1)
        self.at, self.calls = at, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.layer(inputs)
        return scores * math.nan if self.calls in self.at else scores


def test_a_discarded_batch_leaves_the_weights_as_if_it_had_not_been_there(
    config: Config, run: Run, by_hand: Any
) -> None:
    chosen = config()
    chosen["phase"][0]["model"] = lambda: Breaking(at=(5, 6))
    expected = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1), steps=4)
    assert equal(run(chosen)["model"]["line"]["model"].layer.state_dict(), expected)


def test_diverged_training_ends_with_exit_code_5_and_says_where(config: Config, run: Run) -> None:
    chosen = config(nonfinite_patience=1)
    chosen["phase"][0]["model"] = lambda: Breaking(at=(2, 4, 5))
    with pytest.raises(DivergedError, match=r"phase.line: 'loss' is nan: 2 of .* the first in iteration 4; lower the"):
        run(chosen)
    (status,) = Path("runs/config").glob("2*/status.json")
    assert json.loads(status.read_text())["exit_code"] == 5


def test_where_training_diverged_is_counted_over_all_phases(config: Config, run: Run, make_table: Table) -> None:
    chosen = two_phases(config, make_table, nonfinite_patience=1)
    # Two of the three batches of epoch 1; they come after three of epoch 0 and six of the other phase.
    chosen["phase"][1]["model"] = lambda: Breaking(at=(4, 5), features=5)
    with pytest.raises(DivergedError, match=r"phase.wide: 'loss' is nan: 2 of .* the first in iteration 7; lower"):
        run(chosen)


# Chance.


def dropping(config: Config, **runner: Any) -> dict[str, Any]:
    chosen = config(print_interval=1, **runner)
    chosen["plugins"] = [{"progress_bar": False}]
    chosen["dataset"][0]["shuffle"] = True
    chosen["phase"][0]["model"] = lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1))
    return chosen


def outcome(context: Context) -> tuple[list[list[float]], str]:
    """Weights and the deterministic numbers of a run."""
    weights = [parameter.flatten().tolist() for parameter in context["model"]["line"]["model"].parameters()]
    return weights, (context["run_dir"] / "train" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("seed", [{}, {"seed": 7}])
def test_two_runs_with_the_same_seed_are_equal_bit_for_bit(config: Config, run: Run, seed: dict[str, int]) -> None:
    assert outcome(run(dropping(config, **seed))) == outcome(run(dropping(config, **seed)))


@pytest.mark.parametrize("seed", [None, 7])
def test_another_seed_or_none_gives_another_run(config: Config, run: Run, seed: int | None) -> None:
    assert outcome(run(dropping(config, seed=seed)))[0] != outcome(run(dropping(config)))[0]


# Data that gives nothing.


def test_an_epoch_without_a_batch_is_refused(config: Config, run: Run) -> None:
    chosen = config()
    chosen["dataset"][0] |= {"batch_size": 11, "drop_last": True}
    with pytest.raises(DataError, match=r"phase.line: 'data' gave no batch in epoch 0; .*drop_last"):
        run(chosen)


def test_a_stream_that_ends_for_good_is_refused_in_the_epoch_that_has_nothing(
    config: Config, run: Run, make_table: Table
) -> None:
    class Once(IterableDataset[Any]):
        left = iter(make_table(8))

        def __iter__(self) -> Iterator[Any]:
            return self.left

    chosen = config()
    chosen["dataset"][0]["class_path"] = Once
    with pytest.raises(DataError, match=r"phase.line: 'data' gave no batch in epoch 1; check the dataset"):
        run(chosen)


def seen(config: Config, run: Run, recorder: Any, **runner: Any) -> tuple[Context, list[list[float]]]:
    """The run, and the first input of each sample of each training batch."""
    chosen = config(**runner)
    chosen["dataset"][0]["shuffle"] = True
    chosen["phase"][0]["valid_dataset_name"] = "data"
    chosen["plugins"].append(recorder)
    context = run(chosen)
    return context, [values["batch"][0][:, 0].tolist() for hook, _, values in recorder.calls if hook == "before_batch"]


def test_limit_batches_ends_each_pass_and_each_epoch_has_its_own_batches(
    config: Config, run: Run, recorder: Any, make_table: Table
) -> None:
    context, batches = seen(config, run, recorder, limit_batches=2, epochs=2)
    assert context["train_state"]["samples"] == 16
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    assert sorted(batches[0] + batches[1]) != sorted(batches[2] + batches[3])
    # A validation reads the first batches in the order of the dataset.
    model, (x, y) = context["model"]["line"]["model"], make_table(10).tensors
    assert context["metrics"]["line"]["valid_loss"] == pytest.approx(mse(model(x[:8]), y[:8]).item(), rel=1e-5)


def test_a_window_of_accumulation_closes_with_the_last_batch_of_a_limited_pass(config: Config, run: Run) -> None:
    state = run(config(limit_batches=2, accum_grad=4, epochs=3))["train_state"]
    assert (state["iteration"], state["update"]) == (6, 3)


def test_overfit_batches_trains_and_evaluates_on_the_same_first_batches_in_order(
    config: Config, run: Run, recorder: Any, make_table: Table
) -> None:
    context, batches = seen(config, run, recorder, overfit_batches=2, epochs=3)
    first = make_table(10).tensors[0][:8, 0].tolist()
    assert batches == [first[:4], first[4:]] * 3
    x, y = (each[:8] for each in make_table(10).tensors)
    expected = mse(context["model"]["line"]["model"](x), y).item()
    assert context["metrics"]["line"]["valid_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("runner", "epochs", "batches"),
    [
        ({}, 2, 2),
        ({"debug_epochs": 1, "debug_batches": 1}, 1, 1),
        ({"debug_epochs": 9, "debug_batches": 9}, 5, 3),
        ({"epochs": None, "max_steps": 100}, 2, 2),
        ({"max_steps": 3}, 2, 2),
        ({"limit_batches": 1}, 2, 1),
    ],
)
def test_a_debug_run_stops_after_so_many_batches_of_each_pass_and_so_many_epochs(
    config: Config, run: Run, recorder: Any, runner: dict[str, Any], epochs: int, batches: int
) -> None:
    _, given = seen(config, run, recorder, **{"epochs": 5, "debug": True, **runner})
    assert len(given) == min(epochs * batches, runner.get("max_steps", 100))
    hooks = [hook for hook, _, _ in recorder.calls]
    assert (hooks.count("before_epoch"), hooks.count("before_validation")) == (epochs, epochs)


def test_a_debug_run_validates_on_as_many_batches(config: Config, run: Run, make_table: Table) -> None:
    chosen = config(debug=True, debug_batches=1, epochs=1)
    chosen["phase"][0]["valid_dataset_name"] = "data"
    context = run(chosen)
    x, y = (each[:4] for each in make_table(10).tensors)
    expected = mse(context["model"]["line"]["model"](x), y).item()
    assert context["metrics"]["line"]["valid_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("limit", "iterations", "epochs"), [(1, 2, 0), (2, 3, 1), (3, 5, 1), (4, 6, 2), (100, 9, 3)])
def test_optimizer_step_limit_counts_updates_and_not_iterations(
    config: Config, run: Run, limit: int, iterations: int, epochs: int
) -> None:
    # Three batches to an epoch: a full window of two, and a short one.
    state = run(config(epochs=3, accum_grad=2, optimizer_step_limit=limit))["train_state"]
    assert (state["update"], state["iteration"], state["epoch"]) == (min(limit, 6), iterations, epochs)


def test_a_limit_that_is_reached_when_the_last_window_of_a_stream_closes_ends_training_there(
    config: Config, run: Run, make_table: Table
) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(make_table(10))

    chosen = config(epochs=5, accum_grad=4, optimizer_step_limit=2)
    chosen["dataset"][0]["class_path"] = Stream
    state = run(chosen)["train_state"]
    assert (state["update"], state["iteration"], state["epoch"]) == (2, 6, 2)


def test_the_limit_alone_says_how_long_to_train(config: Config, run: Run) -> None:
    state = run(config(epochs=None, optimizer_step_limit=7))["train_state"]
    assert (state["update"], state["iteration"], state["epoch"]) == (7, 7, 2)


def test_max_steps_counts_iterations_and_not_updates(config: Config, run: Run) -> None:
    state = run(config(epochs=None, max_steps=7, accum_grad=2))["train_state"]
    # Of each epoch of three batches two updates, and the seventh batch closes its window since training ends.
    assert (state["iteration"], state["update"]) == (7, 5)


def test_samples_are_counted_while_a_pass_is_running(config: Config, run: Run) -> None:
    class Counter:
        counts: list[int] = []  # noqa: RUF012

        @hookimpl
        def on_print_interval(self, context: Context) -> None:
            self.counts.append(context["train_state"]["samples"])

    chosen = config(print_interval=1)
    chosen["plugins"].append(Counter)
    run(chosen)
    assert Counter.counts == [4, 8, 10, 14, 18, 20]


def test_no_loss_is_read_in_an_iteration_in_which_nothing_is_due(config: Config, run: Run) -> None:
    class Reads:
        counts: list[int] = []  # noqa: RUF012

        @hookimpl
        def after_batch(self, context: Context) -> None:
            self.counts.append(trainable_of(context["model"]["line"]["brain"]).numbers.loss.batches)

    chosen = config(save_interval="10 minute", print_interval=2, epochs=1)
    chosen["dataset"][0]["batch_size"] = 1
    chosen["plugins"].append(Reads)
    run(chosen)
    assert Reads.counts == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]


class Refusing:
    """A plugin that takes the storage away: from ``first`` to ``last`` the folder of checkpoints is a file."""

    first, last = 2, 4

    @hookimpl
    def before_batch(self, context: Context) -> None:
        iteration, folder = context["train_state"]["iteration"], context["checkpointer"].store.folder
        for each in threading.enumerate():
            if each.name.startswith("checkpoint"):
                each.join()
        if iteration == self.first:
            folder.rename(folder.with_name("away"))
            folder.write_text("")
        elif iteration == self.last:
            folder.unlink()
            folder.with_name("away").rename(folder)


@pytest.fixture
def refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A config of 6 iterations, saved after each, of which some find no storage."""

    def make(first: int, last: int, **runner: Any) -> dict[str, Any]:
        monkeypatch.setattr(Refusing, "first", first)
        monkeypatch.setattr(Refusing, "last", last)
        chosen = config(**{"save_interval": 1, "keep_last": None, **runner})
        chosen["plugins"].append(Refusing)
        return chosen

    return make


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_a_save_that_the_storage_refuses_ends_the_run_and_what_was_saved_is_there(
    refused: Callable[..., Any],
) -> None:
    with pytest.raises(StorageError, match=r"step-000000000003: cannot be written: Not a directory; free or repair"):
        GeneralTrainer(refused(2, 99)).run()
    (run_dir,) = Path("runs").glob("*/2*")
    assert saved_steps(run_dir / "train" / "away") == [1, 2]
    assert reader.problems_of(run_dir / "train" / "away" / "step-000000000002") == []


def test_with_warn_training_goes_on_and_the_next_save_is_tried(
    refused: Callable[..., Any], config: Config, log_lines: list[str]
) -> None:
    context = GeneralTrainer(refused(2, 4, on_save_error="warn")).run()
    assert saved_steps(context["checkpointer"].store.folder) == [1, 2, 5, 6]
    unbroken = GeneralTrainer(config()).run()["model"]["line"]["model"].state_dict()
    assert all(
        (value == unbroken[name]).all() for name, value in context["model"]["line"]["model"].state_dict().items()
    )
    warned = [line for line in log_lines if "on_save_error is 'warn', so training continues" in line]
    assert ["step-000000000003" in warned[0], "step-000000000004" in warned[-1]] == [True, True]


def test_with_warn_the_last_save_has_to_succeed_nevertheless(refused: Callable[..., Any]) -> None:
    with pytest.raises(StorageError, match="step-000000000006: cannot be written: Not a directory; free or repair"):
        GeneralTrainer(refused(5, 99, on_save_error="warn")).run()


class FullArchive:
    """A plugin that copies each checkpoint elsewhere, where there is no room."""

    @hookimpl
    def after_checkpoint_saved(self, path: Path) -> None:
        raise StorageError(f"/archive/{path.name}: No space left on device; free some")


def test_with_warn_a_storage_error_of_a_plugin_still_ends_the_run(config: Config) -> None:
    chosen = config(save_interval=1, on_save_error="warn")
    chosen["plugins"].append(FullArchive)
    with pytest.raises(StorageError, match="/archive/step-000000000001: No space left on device"):
        GeneralTrainer(chosen).run()


class Scored:
    """A metric whose numbers are given beforehand."""

    values = (5.0, 4.0, 6.0, 3.0, 7.0, 1.0)

    def __init__(self) -> None:
        self.coming = iter(self.values)

    def update(self, predictions: Any, target: Any) -> None:
        pass

    def compute(self) -> float:
        return next(self.coming)

    def reset(self) -> None:
        pass


def judged(chosen: dict[str, Any]) -> dict[str, Any]:
    chosen["phase"][0] |= {"valid_dataset_name": "data", "metrics": {"score": {"class": Scored}}}
    return chosen


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("count", "best"), [(1, [18]), (2, [12, 18]), (3, [6, 12, 18]), (9, [3, 6, 9, 12, 15, 18])])
def test_so_many_of_the_best_are_kept_beside_the_newest(config: Config, count: int, best: list[int]) -> None:
    keep = {"metric": "valid_score", "mode": "min", "count": count}
    context = GeneralTrainer(judged(config(epochs=6, keep_last=2, keep_best=keep))).run()
    assert saved_steps(context["checkpointer"].store.folder) == sorted({*best, 15, 18})


def test_the_best_goes_only_when_a_better_one_is_on_disk(refused: Callable[..., Any]) -> None:
    keep = {"metric": "valid_score", "mode": "min"}
    # The better ones, of the iterations 6 and 12, are refused; that of 9 is worse than the one of 3 that is there.
    runner = {"epochs": 5, "keep_last": 2, "keep_best": keep, "on_save_error": "warn"}
    chosen = judged(refused(4, 13, **runner))
    context = GeneralTrainer(chosen).run()
    assert saved_steps(context["checkpointer"].store.folder) == [3, 14, 15]
    assert context["best"]["iteration"] == 12


@pytest.fixture
def printed() -> Any:
    """A plugin class whose ``numbers`` are (iteration, phase, numbers) of each print."""

    class Printed:
        numbers: list[tuple[int, str, dict[str, float]]] = []  # noqa: RUF012

        @hookimpl
        def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
            self.numbers.append((context["train_state"]["iteration"], phase, metrics))

    return Printed


class Silent(UpdaterBase):
    """Trains nothing, returns nothing and logs the samples."""

    def update(self, batch: Any) -> None:
        self.log("samples", len(batch[0]))


def test_a_print_has_the_loss_the_rate_what_was_logged_and_the_speed(config: Config, run: Run, printed: Any) -> None:
    chosen = config(print_interval=1, epochs=1)
    chosen["plugins"].append(printed)
    run(chosen)
    assert [(at, phase) for at, phase, _ in printed.numbers] == [(1, "line"), (2, "line"), (3, "line")]
    assert all(set(numbers) == {"loss", "learning_rate", "samples_per_second"} for _, _, numbers in printed.numbers)
    assert all(numbers["samples_per_second"] > 0 for _, _, numbers in printed.numbers)


def test_without_a_loss_samples_are_counted_all_the_same(config: Config, run: Run, printed: Any) -> None:
    chosen = config(print_interval=2, epochs=1)
    chosen["phase"][0]["updater"] = {"class_path": Silent}
    chosen["plugins"].append(printed)
    run(chosen)
    ((_, _, numbers),) = printed.numbers
    assert numbers["loss"] != numbers["loss"]
    assert numbers["samples"] == 4
    assert numbers["samples_per_second"] > 0


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
        attach_optimizer_hooks({"mine": scheduler}, each, "line")
        assert (scheduler.before_update is None) is (each is plain)
