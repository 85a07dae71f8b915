"""``valid_interval: start``: what is trained is validated before its first step, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipeline import GeneralTrainer, RunnerBase, hookimpl
from pipeline.context import Context
from pipeline.signals import StoppedError
from tests.training import test_stopped
from tests.training.conftest import mse
from tests.training.test_stopped import Asks, end, send_signal

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
Table = Callable[..., TensorDataset]


def starting(config: Config, **runner: Any) -> dict[str, Any]:
    chosen = config(**{"epochs": 2, "valid_interval": ["start", "1 epoch"], **runner})
    chosen["phase"][0]["valid_dataset_name"] = "data"
    del chosen["plugins"]
    return chosen


def lines(context: Context) -> list[dict[str, Any]]:
    text = (context["run_dir"] / context["runner_name"] / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def validated(context: Context) -> list[tuple[str, int]]:
    return [(line["phase"], line["iteration"]) for line in lines(context) if line["event"] == "validate"]


@pytest.mark.parametrize(
    ("interval", "iterations"),
    [("start", [0, 6]), (["start", 2], [0, 2, 4, 6]), (["start", "2 update"], [0, 2, 4, 6]), ("1 epoch", [3, 6])],
)
def test_the_first_weights_are_validated_as_those_of_iteration_0(
    config: Config, run: Run, interval: Any, iterations: list[int]
) -> None:
    assert [iteration for _, iteration in validated(run(starting(config, valid_interval=interval)))] == iterations


def test_the_number_is_that_of_weights_that_were_not_trained(config: Config, run: Run, make_table: Table) -> None:
    torch.manual_seed(0)
    (x, y), model = make_table(10).tensors, nn.Linear(3, 1)
    first = lines(run(starting(config)))[0]
    assert (first["event"], first["epoch"]) == ("validate", 0)
    assert first["loss"] == pytest.approx(mse(model(x), y).item(), rel=1e-5)


def test_the_training_is_the_same_as_without_it(config: Config, run: Run, by_hand: Any) -> None:
    model = run(starting(config))["model"]["line"]["model"]
    expected = by_hand(lambda parameters: torch.optim.SGD(parameters, 0.1), epochs=2)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_what_the_first_weights_give_is_logged_and_may_be_the_best(
    config: Config, run: Run, log_lines: list[str]
) -> None:
    best = {"metric": "valid_loss", "mode": "max"}
    chosen = starting(config, keep_best=best)
    chosen["runner"].append({"name": "judge", "class": "infer", "device": "cpu", "init_model_path": "best"})
    context = run(chosen)
    results = json.loads((context["run_dir"] / "train" / "results.json").read_text())
    first = json.loads((context["run_dir"] / "train" / "metrics.jsonl").read_text().splitlines()[0])
    assert results["best"] == {**best, "value": first["loss"], "iteration": 0}
    assert context["metrics"]["line"]["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert any(f"iteration 0  line  valid_loss {first['loss']:.4f}" in line for line in log_lines)


def test_a_resumed_run_does_not_do_it_again_and_knows_its_best(config: Config, run: Run) -> None:
    chosen = starting(config, keep_best={"metric": "valid_loss", "mode": "max"})
    before = run({**chosen, "output_dir": "runs"})
    chosen["runner"][0]["epochs"] = 3
    resumed = GeneralTrainer(chosen, resume="auto").run()
    assert [iteration for _, iteration in validated(resumed)] == [0, 3, 6, 9]
    assert resumed["best"] == before["best"]


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["before_validation", "after_validation"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_run_that_a_signal_ends_in_it_goes_on_with_it(hook: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = test_stopped.config(valid_interval=["start", 3, "1 epoch"])
    whole = end(GeneralTrainer({**chosen, "output_dir": "unbroken"}).run())
    for name, value in {"hook": hook, "at": call, "calls": 0, "ask": staticmethod(send_signal)}.items():
        monkeypatch.setattr(Asks, name, value)
    with pytest.raises(StoppedError):
        GeneralTrainer(chosen).run()
    assert end(GeneralTrainer(chosen, resume="auto").run()) == whole


def test_each_phase_is_validated_once_before_the_first_step() -> None:
    context = GeneralTrainer(test_stopped.config(valid_interval="start")).run()
    assert validated(context) == [("a", 0), ("b", 0), ("a", 14), ("b", 14)]


def test_averages_of_weights_and_early_stopping_take_it_as_any_validation(config: Config, run: Run) -> None:
    chosen = starting(config, epochs=5)
    chosen["plugins"] = ["ema", {"early_stopping": {"min_delta": 100.0, "patience": 2}}]
    assert run(chosen)["train_state"]["epoch"] == 2


def test_a_loop_of_one_s_own_begins_with_it_too(config: Config, run: Run) -> None:
    class Own(RunnerBase):
        def run(self, context: Context) -> None:
            for batch in context.batches("line"):
                context["model"]["line"]["updater"].update(batch)

    assert validated(run(starting(config, runner_class_path=Own, epochs=None))) == [("line", 0), ("line", 3)]


def test_plugins_find_it_among_the_metrics(config: Config, run: Run) -> None:
    class Finds:
        found: list[dict[str, Any]] = []  # noqa: RUF012

        @hookimpl
        def after_validation(self, context: Context) -> None:
            self.found.append(dict(context["metrics"]["line"]))

    chosen = starting(config, epochs=1)
    chosen["plugins"] = [Finds]
    run(chosen)
    assert [list(numbers) for numbers in Finds.found] == [["valid_loss"], ["loss", "valid_loss"]]
