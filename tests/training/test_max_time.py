"""``max_time`` ends a training by the clock, over all parts of a resumed run, as ``context.stop`` would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import Context, ExperimentBase, GeneralTrainer, RunnerBase, hookimpl
from pipeline.check.checker import check
from pipeline.errors import ExitCode
from tests.training.conftest import KilledError, linear_config, table
from tests.training.test_stop import Killed, Kills, events, status


class Clock:
    """The clock of the training: each batch takes 10 seconds, and beside it nothing takes any."""

    now = 0.0
    killed_at = -1

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == Clock.killed_at:
            raise KilledError
        Clock.now += 10


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    monkeypatch.setattr("pipeline.engine.triggers.time", SimpleNamespace(monotonic=lambda: Clock.now))
    monkeypatch.setattr(Clock, "killed_at", -1)
    return Clock


def config(**runner: Any) -> dict[str, Any]:
    """Up to 100 epochs of 5 batches."""
    chosen = linear_config(**{"epochs": 100, "max_time": "70 second", "save_interval": 2, **runner})
    chosen["dataset"][0]["class_path"] = lambda: table(20)
    chosen["phase"][0]["valid_dataset_name"] = "data"
    chosen["plugins"][1:] = [Clock]
    return chosen | {"name": "timed"}


WHY = "max_time: 70 second of training are over"


def test_a_training_whose_time_is_over_is_validated_saved_and_done() -> None:
    trainer = GeneralTrainer(config())
    context = trainer.run()
    assert (context["train_state"]["iteration"], trainer.outcome) == (7, ExitCode.DONE)
    assert ("validate", 7) in events(context, "train")
    assert context["checkpointer"].newest().name == "step-000000000007"
    assert [status(context)[key] for key in ("state", "exit_code", "reason", "resumable")] == ["done", 0, WHY, False]
    assert (context["run_dir"] / "train" / "results.json").exists()


def test_each_runner_has_its_own_time() -> None:
    chosen = config()
    chosen["runner"].append({**chosen["runner"][0], "name": "second", "max_time": "2 minutes"})
    trainer = GeneralTrainer(chosen)
    trainer.run()
    assert [context["train_state"]["iteration"] for context in trainer.contexts.values()] == [7, 12]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("killed_at", [3, 4, 6])
def test_a_resumed_run_has_the_time_that_its_checkpoint_leaves(killed_at: int, clock: type[Clock]) -> None:
    clock.killed_at = killed_at
    with pytest.raises(KilledError):
        GeneralTrainer(config(), resume="auto").run()
    clock.killed_at = -1
    # What is between two parts is no training.
    clock.now += 1000
    context = GeneralTrainer(config(), resume="auto").run()
    assert (context["train_state"]["iteration"], status(context)["reason"]) == (7, WHY)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("max_time", "iterations"), [("70 second", 7), ("30 second", 7), ("2 minute", 12)])
def test_a_run_whose_time_is_over_does_nothing_more_unless_it_is_given_more(max_time: str, iterations: int) -> None:
    chosen = config()
    chosen["plugins"].append(Kills)
    with pytest.raises(Killed):
        GeneralTrainer(chosen).run()
    context = GeneralTrainer(config(max_time=max_time), resume="auto").run()
    assert context["train_state"]["iteration"] == iterations
    assert status(context)["reason"] == f"max_time: {max_time} of training are over"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("changed", "iterations"), [({"max_time": "2 minute"}, 12), ({"epochs": 200}, 7), ({}, 7)])
def test_a_run_that_its_time_has_finished_goes_on_with_more_of_it(changed: dict[str, Any], iterations: int) -> None:
    finished = GeneralTrainer(config()).run()
    GeneralTrainer(config(**changed), resume="auto").run()
    assert status(finished)["iteration"] == iterations


class Own(RunnerBase):
    def run(self, context: Context) -> None:
        for batch in context.batches("line", repeat=True):
            context["model"]["line"].brain.fit_batch(batch)


class Experiment(ExperimentBase):
    def setup_dataloader(self) -> None:
        self.train_loader = [torch.full((2, 1), float(number)) for number in range(3)]

    def setup_model(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train_batch(self) -> None:
        self.model(self.read_batch()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def valid(self) -> None:
        self.visualizer.add_scalar("valid/loss", 1.0, self.iteration)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("runner_class", [Own, Experiment])
def test_loops_of_ones_own_and_experiments_have_their_time_too(runner_class: type, clock: type[Clock]) -> None:
    chosen = config(runner_class_path=runner_class, epochs=None)
    if runner_class is Experiment:
        chosen |= {"phase": [], "dataset": []}
    clock.killed_at = 4
    with pytest.raises(KilledError):
        GeneralTrainer(chosen, resume="auto").run()
    clock.killed_at = -1
    context = GeneralTrainer(chosen, resume="auto").run()
    assert (context["train_state"]["iteration"], status(context)["reason"]) == (7, WHY)
    assert context["checkpointer"].newest().name == "step-000000000007"


def test_a_time_alone_says_how_long_to_train() -> None:
    assert GeneralTrainer(config(epochs=None)).run()["train_state"]["iteration"] == 7


def test_of_an_infer_runner_it_would_be_ignored() -> None:
    chosen = config()
    chosen["runner"].append({"name": "infer", "class": "infer", "max_time": "1 hour"})
    [fault] = check(chosen)
    assert str(fault) == "dict: runner.infer.max_time: would be ignored: an infer runner makes one pass; remove it"


def test_without_it_a_checkpoint_keeps_no_time_that_would_differ_between_two_runs() -> None:
    state = GeneralTrainer(config(max_time=None, epochs=1)).run()["checkpointer"]
    assert state.store.newest_valid().state.seconds is None
