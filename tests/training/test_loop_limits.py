"""Where training ends, and what a pass is limited to, in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from pipeline import hookimpl
from pipeline.context import Context

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
Table = Callable[..., TensorDataset]
mse = nn.functional.mse_loss


def seen(config: Config, run: Run, recorder: Any, **runner: Any) -> tuple[Context, list[list[float]]]:
    """The run, and the first input of each sample of each training batch."""
    chosen = config(**runner)
    chosen["dataset"][0]["shuffle"] = True
    chosen["phase"][0]["valid_dataset_name"] = "data"
    chosen["plugins"].append(recorder)
    context = run(chosen)
    return context, [value[0][:, 0].tolist() for hook, _, value in recorder.events if hook == "before_batch"]


def test_limit_batches_ends_each_pass_and_each_epoch_has_its_own_batches(
    config: Config, run: Run, recorder: Any, make_table: Table
) -> None:
    context, batches = seen(config, run, recorder, limit_batches=2, epochs=2)
    assert context["train_state"]["samples"] == 16
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    assert sorted(batches[0] + batches[1]) != sorted(batches[2] + batches[3])
    model, loader = context["model"]["line"]["model"], context["dataset"]["data"]
    loader.set_epoch(1)
    x, y = (torch.cat(parts) for parts in zip(*list(loader)[:2], strict=True))
    assert context["metrics"]["line"]["valid_loss"] == pytest.approx(mse(model(x), y).item(), rel=1e-5)


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
    hooks = [hook for hook, _, _ in recorder.events]
    assert (hooks.count("before_epoch"), hooks.count("before_validation")) == (epochs, epochs)


def test_a_debug_run_validates_on_as_many_batches(config: Config, run: Run, make_table: Table) -> None:
    chosen = config(debug=True, debug_batches=1, epochs=1)
    chosen["phase"][0]["valid_dataset_name"] = "data"
    context = run(chosen)
    x, y = (each[:4] for each in make_table(10).tensors)
    expected = mse(context["model"]["line"]["model"](x), y).item()
    assert context["metrics"]["line"]["valid_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("limit", "iterations", "epochs"), [(1, 2, 1), (2, 3, 1), (3, 5, 2), (4, 6, 2), (100, 9, 3)])
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
    assert (state["update"], state["iteration"], state["epoch"]) == (7, 7, 3)


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
            self.counts.append(context["model"]["line"]["brain"]._pass_loss.batches)

    chosen = config(save_interval="10 minute", print_interval=2, epochs=1)
    chosen["dataset"][0]["batch_size"] = 1
    chosen["plugins"].append(Reads)
    run(chosen)
    assert Reads.counts == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
