"""A run that a signal or is_exit ends anywhere in its loop, and that goes on: equal bit for bit to one that was not stopped."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.errors import ExitCode
from pipeline.signals import StoppedError


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3) + index, torch.tensor([index / 10.0])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def send_signal(context: Context) -> None:
    signal.raise_signal(signal.SIGTERM)


def set_is_exit(context: Context) -> None:
    context["is_exit"] = True


class Asks:
    """A plugin that asks the run to end at the ``at``-th call of a hook, once."""

    hook, at, calls = "", 0, 0
    ask = staticmethod(send_signal)

    def called(self, hook: str, context: Context) -> None:
        if hook == self.hook:
            Asks.calls += 1
            if self.calls == self.at:
                self.ask(context)

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        self.called("before_epoch", context)

    @hookimpl
    def before_pass(self, context: Context) -> None:
        self.called("before_pass", context)

    @hookimpl
    def before_batch(self, context: Context) -> None:
        self.called("before_batch", context)

    @hookimpl
    def before_backward(self, context: Context) -> None:
        self.called("before_backward", context)

    @hookimpl
    def after_backward(self, context: Context) -> None:
        self.called("after_backward", context)

    @hookimpl
    def after_update(self, context: Context) -> None:
        self.called("after_update", context)

    @hookimpl
    def after_batch(self, context: Context) -> None:
        self.called("after_batch", context)

    @hookimpl
    def extend_metrics(self, context: Context) -> None:
        self.called("extend_metrics", context)

    @hookimpl
    def on_print_interval(self, context: Context) -> None:
        self.called("on_print_interval", context)

    @hookimpl
    def after_pass(self, context: Context) -> None:
        self.called("after_pass", context)

    @hookimpl
    def before_validation(self, context: Context) -> None:
        self.called("before_validation", context)

    @hookimpl
    def after_validation(self, context: Context) -> None:
        self.called("after_validation", context)

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        self.called("after_epoch", context)

    @hookimpl
    def before_checkpoint_saved(self, context: Context) -> None:
        self.called("before_checkpoint_saved", context)

    @hookimpl
    def after_checkpoint_saved(self, context: Context) -> None:
        self.called("after_checkpoint_saved", context)


def config(**changed: Any) -> dict[str, Any]:
    """Two epochs of two phases of 4 and 3 batches, with accumulation, and validation by interval and after each."""
    schedule = {"optim_type": "Adam", "optim_conf": {"lr": 0.01}, "accum_grad": 3, "grad_clip": 1.0}
    phase = {
        "model": Net,
        "loss": nn.functional.mse_loss,
        "valid_dataset_name": "valid",
        "optim_schedulers": {"main": {"class": "noam", "args": {**schedule, "warmup_steps": 3}}},
    }
    runner = {"name": "t", "class": "train", "device": "cpu", "epochs": 2, "valid_interval": [3, "1 epoch"]}
    return {
        "name": "config",
        "plugins": [{"progress_bar": False}, Asks],
        "dataset": [
            {"name": "four", "class_path": Noisy, "batch_size": 3, "shuffle": True},
            {"name": "three", "class_path": Noisy, "batch_size": 4, "shuffle": True},
            {"name": "valid", "class_path": Noisy, "batch_size": 2},
        ],
        "runner": [{**runner, "print_interval": 2, **changed}],
        "phase": [{**phase, "name": "a", "dataset_name": "four"}, {**phase, "name": "b", "dataset_name": "three"}],
    }


def end(context: Context) -> dict[str, Any]:
    models = {name: entry["model"].state_dict() for name, entry in context["model"].items()}
    weights = {f"{name}.{key}": value.tolist() for name, each in models.items() for key, value in each.items()}
    lines = (context["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8")
    return {"weights": weights, "lines": lines, "state": dict(context["train_state"]), "metrics": context["metrics"]}


CALLS = {"before_epoch": 2, "after_batch": 14, "before_validation": 8, "after_validation": 8, "after_epoch": 2}
"""How often each is called in an unbroken run."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return end(GeneralTrainer({**config(), "output_dir": str(tmp_path_factory.mktemp("unbroken"))}).run())


QUICK = [("after_batch", 5), ("after_batch", 7), ("before_validation", 3)]
"""In a window, at the end of an epoch, and in a validation at an interval."""
SLOW = [
    *(("before_epoch", at) for at in (1, 2)),
    *(("after_batch", at) for at in (1, 3, 4, 6, 14)),
    *(("before_validation", at) for at in (1, 8)),
    *(("after_validation", at) for at in (1, 2, 4, 8)),
    *(("after_epoch", at) for at in (1, 2)),
]
"""The first and the last of each, and those around a window, a phase and an epoch."""


def mark(moment: tuple[str, int]) -> Any:
    if moment in QUICK:
        return ()
    return pytest.mark.slow if moment in SLOW else pytest.mark.release


EVERY = [(hook, at) for hook, times in CALLS.items() for at in range(1, times + 1)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("hook", "at"), [pytest.param(*moment, marks=mark(moment)) for moment in EVERY])
def test_a_run_that_is_stopped_at_any_moment_saves_and_goes_on_exactly(
    hook: str, at: int, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"hook": hook, "at": at, "calls": 0}.items():
        monkeypatch.setattr(Asks, name, value)
    with pytest.raises(StoppedError, match="asked to end by SIGTERM"):
        GeneralTrainer(config()).run()
    assert Asks.calls == at
    torch.manual_seed(at + 100)
    context = GeneralTrainer(config(), resume="auto").run()
    assert end(context) == unbroken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "hook", "at"),
    [
        ({"max_steps": 12}, "before_validation", 1),
        ({"max_steps": 12}, "after_validation", 4),
        ({"epochs": 1}, "before_validation", 2),
        ({"epochs": 1}, "after_validation", 3),
    ],
)
def test_a_run_that_is_stopped_in_its_last_validation_makes_it_again(
    hook: str, at: int, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(valid_interval=[5, 6], **limit)
    expected = end(GeneralTrainer({**chosen, "output_dir": "unbroken"}).run())
    for name, value in {"hook": hook, "at": at, "calls": 0}.items():
        monkeypatch.setattr(Asks, name, value)
    with pytest.raises(StoppedError):
        GeneralTrainer(chosen).run()
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected


class Halves:
    """A plugin that halves the rate of every other update."""

    @hookimpl
    def before_update(self, optim_scheduler: Any) -> None:
        if optim_scheduler.real_step % 2:
            optim_scheduler.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("schedule", ["noam", pytest.param("constant", marks=pytest.mark.slow)])
def test_the_rates_of_a_plugin_and_the_norms_are_reported_alike_by_a_run_that_is_stopped_in_a_window(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(print_interval=1)
    chosen["plugins"].append(Halves)
    for phase in chosen["phase"]:
        args = {"optim_type": "Adam", "optim_conf": {"lr": 0.01}, "accum_grad": 3, "grad_clip": 1.0}
        phase["optim_schedulers"] = {"main": {"class": schedule, "args": args}}
    expected = end(GeneralTrainer({**chosen, "output_dir": "unbroken"}).run())
    # The first window of each phase ends with its third batch.
    assert all(expected["lines"].count(f'"{name}": ') == 10 for name in ("learning_rate", "gradient_norm"))
    for name, value in {"hook": "after_batch", "at": 5, "calls": 0}.items():
        monkeypatch.setattr(Asks, name, value)
    with pytest.raises(StoppedError):
        GeneralTrainer(chosen).run()
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected


@pytest.mark.parametrize("at", [4, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 8))])
def test_a_validation_that_was_stopped_is_made_again_and_nothing_of_the_training_is(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"hook": "before_validation", "at": at, "calls": 0}.items():
        monkeypatch.setattr(Asks, name, value)
    trainer = GeneralTrainer(config())
    with pytest.raises(StoppedError):
        trainer.run()
    monkeypatch.setattr(Asks, "hook", "after_batch")
    monkeypatch.setattr(Asks, "calls", 100)
    batches = 14 - GeneralTrainer(config(), resume="auto").run()["train_state"]["iteration"]
    assert batches == 0
    ran = Asks.calls - 100
    assert ran < 14


MOMENTS = [(hook, at) for hook, times in CALLS.items() for at in {1, times}]
MOMENTS += [
    ("before_batch", 6),
    ("after_backward", 3),
    ("after_update", 2),
    ("on_print_interval", 3),
    ("after_checkpoint_saved", 1),
    ("after_checkpoint_saved", 2),
]
MOMENTS = list(dict.fromkeys(MOMENTS))
QUICK_EXITS = {("before_batch", 6), ("after_update", 2), ("after_checkpoint_saved", 2)}
SLOW_EXITS = set(CALLS.items()) | {("before_epoch", 1), ("after_backward", 3)}
"""The last call of each hook; before everything; and in a window."""


def mark_exit(moment: tuple[str, int]) -> Any:
    if moment in QUICK_EXITS:
        return ()
    return pytest.mark.slow if moment in SLOW_EXITS else pytest.mark.release


def stopped(hook: str, at: int, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A run that ``is_exit`` has ended at this call of a hook."""
    for name, value in {"hook": hook, "at": at, "calls": 0, "ask": staticmethod(set_is_exit)}.items():
        monkeypatch.setattr(Asks, name, value)
    trainer = GeneralTrainer(config())
    context = trainer.run()
    assert Asks.calls >= at
    assert (context["is_exit"], trainer.outcome) == (True, ExitCode.DONE)
    return context


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("hook", "at"), [pytest.param(*moment, marks=mark_exit(moment)) for moment in MOMENTS])
def test_a_run_that_is_exit_ends_at_any_moment_goes_on_exactly(
    hook: str, at: int, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stopped(hook, at, monkeypatch)["run_dir"]
    status = json.loads((run_dir / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["exit_code"], status["resumable"]) == ("stopped", 0, True)
    assert re.fullmatch(r"context\['is_exit'\] was set in runner \(test_stopped.py:\d+\) of t", status["reason"])
    torch.manual_seed(at + 100)
    context = GeneralTrainer(config(), resume="auto").run()
    assert context["is_exit"] is False
    assert end(context) == unbroken


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("hook", "at", "iteration"),
    [("before_epoch", 1, 0), ("before_epoch", 2, 7), ("before_batch", 5, 5), ("after_backward", 5, 5), ("after_batch", 5, 5),
     ("after_validation", 1, 3), ("after_epoch", 1, 7)],
)  # fmt: skip
def test_is_exit_ends_the_training_at_the_next_boundary_between_two_steps_with_a_checkpoint(
    hook: str, at: int, iteration: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = stopped(hook, at, monkeypatch)
    assert context["train_state"]["iteration"] == iteration
    assert context["checkpointer"].newest().name == f"step-{iteration:012d}"
    results = json.loads((context["run_dir"] / "t" / "results.json").read_text(encoding="utf-8"))
    assert results["train_state"]["iteration"] == iteration


def test_an_is_exit_that_is_taken_back_ends_nothing(unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    take_back = staticmethod(lambda context: (set_is_exit(context), context.update(is_exit=False)))
    for name, value in {"hook": "after_batch", "at": 5, "calls": 0, "ask": take_back}.items():
        monkeypatch.setattr(Asks, name, value)
    assert end(GeneralTrainer(config()).run()) == unbroken
