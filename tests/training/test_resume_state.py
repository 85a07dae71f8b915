"""What a checkpoint keeps beside weights and optimizers: resumed runs against unbroken ones, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, Context, GeneralTrainer, Stage, hookimpl
from pipeline.checkpoint.comparison import differences
from pipeline.stages.base import RunnerBase
from tests.training.conftest import mse, table

AT = 5
Options = dict[str, Any]


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """A plugin that ends the run before a batch."""

    at = AT

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == self.at:
            raise KilledError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def config(runner: Options | None = None, **phase: Any) -> Options:
    """Three epochs of 3 batches, saved after each."""
    settings = {"epochs": 3, "save_interval": 1, **(runner or {})}
    return {
        "name": "state",
        "plugins": [{"progress_bar": False}, Kill],
        "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.1}},
        "dataset": [{"name": "d", "class_path": lambda: table(12), "batch_size": 4, "shuffle": True}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", **settings}],
        "phase": [{"name": "p", "model": net, "loss": mse, "dataset_name": "d", **phase}],
    }


def both(monkeypatch: pytest.MonkeyPatch, chosen: Options) -> tuple[Context, Context]:
    """The contexts of a run that nothing interrupts, and of one that is killed and resumed."""
    monkeypatch.setattr(Kill, "at", -1)
    unbroken = GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", AT)
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", -1)
    return unbroken, GeneralTrainer(chosen, resume="auto").run()


def end(context: Context) -> Options:
    """Weights, optimizers and numbers."""
    entry = context["model"]["p"]
    lines = (context["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8")
    schedulers = {name: each.state_dict() for name, each in entry["optim_schedulers"].items()}
    return {"weights": entry["brain"].modules.state_dict(), "optim_schedulers": schedulers, "lines": lines}


def unlike(contexts: tuple[Context, Context]) -> list[str]:
    return [str(each) for each in differences(*map(end, contexts))]


class Fresh(Brain):
    """Begins each fit with weights and counters of its own."""

    def __init__(self) -> None:
        super().__init__({"net": net()})
        self.begins = 0

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.begins += 1
        with torch.no_grad():
            self.modules.net[0].bias.fill_(0.5)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


def test_what_on_fit_start_sets_is_taken_back_by_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = both(monkeypatch, config(model=Fresh, loss=None))
    assert unlike(contexts) == []
    assert [each["model"]["p"]["brain"].begins for each in contexts] == [1, 1]


class OwnRunner(RunnerBase):
    """Trains by itself, and saves after each batch."""

    def run(self, context: Context) -> None:
        entry, state = context["model"]["p"], context["train_state"]
        for batch in list(context["dataset"]["d"]) * 3:
            if state["iteration"] == Kill.at:
                raise KilledError
            if state["iteration"] < 9:
                entry["brain"].fit_batch(batch)
                state["iteration"] += 1
                context["checkpointer"].save(context["model"], state, {})
        context["current_epoch"], context["metrics"] = 0, {}


def test_on_fit_start_comes_before_a_runner_of_ones_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = {"runner_class_path": OwnRunner}
    for context in both(monkeypatch, config(runner, model=Fresh, loss=None)):
        assert context["model"]["p"]["brain"].begins == 1
        assert not torch.all(context["model"]["p"]["brain"].modules.net[0].bias == 0.5)
