"""A limit that ends a training inside an epoch keeps its place: what was trained is trained once, and the rest later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import run_limits
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from whole_runs import differences

from pipeline import Context, GeneralTrainer, RunnerBase, hookimpl, stages
from pipeline.checkpoint import reader
from tests.training.conftest import KilledError, linear_config, mse, table

ByHand = Callable[..., dict[str, Tensor]]


class Hooks:
    """Notes which hooks of epochs, passes and validations are called."""

    calls: ClassVar[list[str]] = []

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        Hooks.calls.append(f"before_epoch {context['current_epoch']}")

    @hookimpl
    def after_pass(self, phase: str) -> None:
        Hooks.calls.append(f"after_pass {phase}")

    @hookimpl
    def after_validation(self, phase: str) -> None:
        Hooks.calls.append(f"after_validation {phase}")

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        Hooks.calls.append(f"after_epoch {context['current_epoch']}")


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(Hooks, "calls", calls)
    return calls


def config(**runner: Any) -> dict[str, Any]:
    """Seven batches of 26 samples in an epoch."""
    chosen = linear_config(seed=0, **{"epochs": 3, **runner})
    chosen["dataset"] = [{"name": "data", "class_path": lambda: table(26), "batch_size": 4, "shuffle": True}]
    chosen["plugins"] = [{"progress_bar": False}, Hooks]
    return chosen


def weights(context: Context) -> dict[str, Tensor]:
    state: dict[str, Tensor] = context["model"]["line"].model.state_dict()
    return state


def last_checkpoint(context: Context) -> dict[str, Tensor]:
    return reader.read_checkpoint(context["checkpointer"].newest()).weights["line"]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_limit_inside_epoch_resumes_as_plain_loop(by_hand: ByHand, log_lines: list[str]) -> None:
    first = GeneralTrainer(config(max_steps=3)).run()
    resumed = GeneralTrainer(config(max_steps=12), resume=first["run_dir"]).run()
    expected = by_hand(optimizer, samples=26, epochs=3, steps=12, shuffle=True)
    assert differences(weights(resumed), expected) == []
    assert any("stopped in epoch 0 after 3 of 7 batches" in line for line in log_lines)


def test_limit_inside_epoch_calls_hooks_once(hooks: list[str]) -> None:
    first = GeneralTrainer(config(max_steps=3)).run()
    assert hooks == ["before_epoch 0"]
    GeneralTrainer(config(max_steps=14), resume=first["run_dir"]).run()
    epochs = [["after_pass line", f"after_epoch {epoch}"] for epoch in range(2)]
    assert hooks == ["before_epoch 0", *epochs[0], "before_epoch 1", *epochs[1]]


PLACES = [
    ("phases", {"max_steps": 2}),
    pytest.param("phases", {"max_time": "70 second"}, marks=pytest.mark.slow),
    ("loop", {"optimizer_step_limit": 2}),
    pytest.param("rounds", {"max_steps": 7}, marks=pytest.mark.slow),
    pytest.param("wrong_length", {"max_steps": 4}, marks=pytest.mark.slow),
    ("experiment", {"max_steps": 9}),
]
"""Inside a window; between two phases; in the second phase of a loop; where passes are nested; in data of unknown length."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("program", "limit"), PLACES)
def test_limit_then_higher_limit_equals_unbroken(
    program: str, limit: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is equal: weights, optimizers, generators, schedules, counters and ``metrics.jsonl``.

    ``python tests/faults/run_limits.py`` does it at every place within two epochs.
    """
    monkeypatch.setattr("pipeline.engine.triggers.time", SimpleNamespace(monotonic=lambda: run_limits.Clock.now))
    expected = run_limits.unbroken(tmp_path / "unbroken", program)
    assert differences(run_limits.resumed(tmp_path / "limited", program, limit, None), expected) == []


def test_experiment_limit_after_epoch_keeps_its_schedule(tmp_path: Path) -> None:
    """The validation of the last weights, which no interval asks for, steps a plateau schedule."""

    def states(folder: str, *limits: int) -> dict[str, Any]:
        context = None
        for limit in limits:
            chosen = run_limits.config(
                tmp_path / folder,
                runner_class_path=run_limits.Experiment,
                valid_interval=4,
                max_steps=limit,
            )
            resume = context["run_dir"] if context else "never"
            context = GeneralTrainer(chosen, resume=resume).run()
        assert context
        checkpoint = reader.read_checkpoint(context["checkpointer"].newest())
        state = checkpoint.state
        assert state
        assert state.experiment
        return {"weights": checkpoint.weights, "attributes": state.parts}

    assert differences(states("limited", 7, 15), states("unbroken", 15)) == []


def test_fit_with_higher_limit_equals_unbroken(tmp_path: Path) -> None:
    expected = run_limits.fit(tmp_path / "unbroken", 5)
    assert differences(run_limits.fit(tmp_path / "limited", 2, 5), expected) == []


def test_limit_inside_window_saves_it_open_and_leaves_it_closed(by_hand: ByHand) -> None:
    """``last`` is the checkpoint from which a resumed run continues; the run itself leaves the last update too."""
    context = GeneralTrainer(config(max_steps=3, accum_grad=2)).run()

    def train(closes: bool) -> dict[str, Tensor]:
        batches = iter(context["dataset"]["data"])
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        (x1, y1), (x2, y2), (x3, y3) = (next(batches) for _ in range(3))
        windows = [(torch.cat([x1, x2]), torch.cat([y1, y2])), (x3, y3)]
        for x, y in windows if closes else windows[:1]:
            model.zero_grad()
            mse(model(x), y).backward()
            optimizer(model.parameters()).step()
        return model.state_dict()

    context["dataset"]["data"].set_epoch(0)
    for found, closes in [(weights(context), True), (last_checkpoint(context), False)]:
        for name, value in train(closes).items():
            torch.testing.assert_close(found[name], value)


class Killing:
    """A plugin that ends the process in the last validation, once."""

    armed = True

    @hookimpl
    def before_validation(self) -> None:
        if Killing.armed:
            raise KilledError


def test_kill_in_last_validation_after_limit_resumes(by_hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is saved before the last weights are validated."""
    monkeypatch.setattr(Killing, "armed", True)
    chosen = config(max_steps=3) | {"name": "killed"}
    chosen["plugins"].append(Killing)
    chosen["phase"][0]["valid_dataset_name"] = "data"
    with pytest.raises(KilledError):
        GeneralTrainer(chosen, resume="auto").run()
    Killing.armed = False
    chosen["runner"][0]["max_steps"] = 12
    resumed = GeneralTrainer(chosen, resume="auto").run()
    assert differences(weights(resumed), by_hand(optimizer, samples=26, epochs=3, steps=12, shuffle=True)) == []


def test_limit_between_phases_continues_with_the_next(hooks: list[str], log_lines: list[str]) -> None:
    def two(**runner: Any) -> dict[str, Any]:
        chosen = config(**runner)
        chosen["phase"].append({**chosen["phase"][0], "name": "second"})
        return chosen

    first = GeneralTrainer(two(max_steps=7)).run()
    assert (hooks, first["train_state"]["epoch"]) == (["before_epoch 0", "after_pass line"], 0)
    assert any("stopped in epoch 0 between two phases" in line for line in log_lines)
    GeneralTrainer(two(max_steps=14), resume=first["run_dir"]).run()
    assert hooks[2:] == ["after_pass second", "after_epoch 0"]


class OnePass(RunnerBase):
    """Trains one pass in each epoch, as a loop by hand."""

    def run(self, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("line"):
                context["model"]["line"].brain.fit_batch(batch)


@pytest.mark.parametrize("runner_class", [stages.Runner, OnePass])
def test_limit_at_the_end_of_the_data_ends_the_epoch(runner_class: type, hooks: list[str]) -> None:
    context = GeneralTrainer(config(max_steps=7, runner_class_path=runner_class)).run()
    assert hooks == ["before_epoch 0", "after_pass line", "after_epoch 0"]
    assert context["train_state"]["epoch"] == 1


@pytest.mark.parametrize("batches", [6, 4])
def test_limit_of_batches_ends_the_epoch_of_a_stream(batches: int, hooks: list[str]) -> None:
    """So does the end of a stream without a length, where only asking for the next batch tells."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(table(16))

    chosen = config(max_steps=4, limit_batches=batches)
    chosen["dataset"] = [{"name": "data", "class_path": Stream, "batch_size": 4}]
    GeneralTrainer(chosen).run()
    assert hooks == ["before_epoch 0", "after_pass line", "after_epoch 0"]


def test_limit_in_an_order_that_torch_samples_is_resumed_there(hooks: list[str]) -> None:
    class Network(stages.Network):
        def build_network(self, context: Context) -> None:
            super().build_network(context)
            context["dataset"]["data"] = DataLoader(table(26), batch_size=4, shuffle=True)

    unbroken = GeneralTrainer(config(max_steps=10, network_class_path=Network)).run()
    hooks.clear()
    first = GeneralTrainer(config(max_steps=3, network_class_path=Network)).run()
    assert hooks == ["before_epoch 0"]
    torch.manual_seed(99)
    resumed = GeneralTrainer(config(max_steps=10, network_class_path=Network), resume=first["run_dir"]).run()
    assert differences(last_checkpoint(resumed), dict(last_checkpoint(unbroken))) == []


class Stopping:
    """A plugin that stops the training after five batches."""

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 5:
            context.stop("enough")


def test_stop_inside_epoch_leaves_nothing_to_resume(by_hand: ByHand, hooks: list[str]) -> None:
    chosen = config()
    chosen["plugins"].append(Stopping)
    first = GeneralTrainer(chosen).run()
    assert hooks == ["before_epoch 0"]
    GeneralTrainer(chosen, resume=first["run_dir"]).run()
    assert hooks == ["before_epoch 0"]
    expected = by_hand(optimizer, samples=26, epochs=1, steps=5, shuffle=True)
    assert differences(last_checkpoint(first), dict(expected)) == []


def test_stop_resumed_from_older_checkpoint_is_exact() -> None:
    chosen = config(save_interval=2)
    chosen["plugins"].append(Stopping)
    first = GeneralTrainer(chosen).run()
    before = {name: value.clone() for name, value in weights(first).items()}
    older = first["run_dir"] / "train" / "checkpoints" / "step-000000000004"
    resumed = GeneralTrainer(chosen, resume=older).run()
    assert resumed["train_state"] == first["train_state"]
    assert differences(weights(resumed), before) == []


@pytest.mark.slow
def test_last_validation_does_not_count_for_early_stopping() -> None:
    """Neither inside an epoch nor at its end, if no interval asks for it."""
    stopping = {"early_stopping": {"patience": 1, "min_delta": 1e9}}
    states = []
    for limits in ([14], [7, 14], [5, 14]):
        resume: Any = "never"
        for limit in limits:
            chosen = config(max_steps=limit, valid_interval=8)
            chosen["plugins"].append(stopping)
            chosen["phase"][0]["valid_dataset_name"] = "data"
            context = GeneralTrainer(chosen, resume=resume).run()
            resume = context["run_dir"]
        states.append((context["train_state"]["iteration"], weights(context)))
    assert [iteration for iteration, _ in states] == [14, 14, 14]
    assert differences(states[0], states[1]) == differences(states[0], states[2]) == []


def test_last_validation_after_limit_is_no_part_of_the_best(log_lines: list[str]) -> None:
    """Only validations that an interval asks for count: the checkpoint that is left was saved before the last one."""
    chosen = config(max_steps=9, valid_interval=4, keep_best={"metric": "valid_loss", "mode": "min"})
    chosen["phase"][0]["valid_dataset_name"] = "data"
    context = GeneralTrainer(chosen).run()
    assert context["best"]["iteration"] == 8
    assert context["metrics"]["line"]["valid_loss"] < context["best"]["value"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("experiment", [False, True])
def test_early_stopping_in_last_validation_ends_no_resumed_run(experiment: bool, tmp_path: Path) -> None:
    """The unbroken run stops at its second validation that is due; the one after the limit is none of these."""
    program = run_limits.PROGRAMS["experiment" if experiment else "phases"]

    def run(limit: int, resume: Any = "never") -> Context:
        chosen = run_limits.config(tmp_path, **program, max_steps=limit, valid_interval=4)
        chosen["runner"][0].pop("keep_best", None)
        stopping = {"early_stopping": {"patience": 1, "min_delta": 1e6}}
        chosen["plugins"] = [{"progress_bar": False}, stopping]
        return GeneralTrainer(chosen, resume=resume).run()

    first = run(6)
    resumed = run(24, first["run_dir"])
    assert (first["train_state"]["iteration"], resumed["train_state"]["iteration"]) == (6, 8 if experiment else 12)
