"""A plugin asks for a checkpoint or a validation in any hook; it is done after the step, and a resumed run does the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import Context, ExperimentBase, GeneralTrainer, RunnerBase, hookimpl
from pipeline.errors import ContextError
from pipeline.signals import StoppedError
from tests.training.test_stopped import Asks, config, end, send_signal

At = Callable[..., None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """Has the plugin of the runs do something at the n-th call of a hook."""

    def plan(hook: str, call: int, ask: Callable[[Context], object]) -> None:
        for name, value in {"hook": hook, "at": call, "calls": 0, "ask": staticmethod(ask)}.items():
            monkeypatch.setattr(Asks, name, value)

    return plan


def request(what: Any) -> Callable[[Context], None]:
    return lambda context: context.request(what)


def rare(**runner: Any) -> dict[str, Any]:
    """The config of two epochs of phases of 4 and 3 batches, which saves and validates at the end of the training alone."""
    keys = {"save_interval": None, "valid_interval": "100 epoch", "print_interval": 2, **runner}
    chosen = config(**keys)
    # All that were saved, whatever is kept.
    chosen["runner"][0] |= {"keep_last": 20}
    return chosen


def saved(context: Context) -> list[int]:
    return sorted(int(path.name[5:]) for path in context["checkpointer"].all())


def validated(context: Context) -> list[tuple[str, int]]:
    lines = (context["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [(line["phase"], line["iteration"]) for line in found if line["event"] == "validate"]


MOMENTS = [
    ("before_epoch", 2, 7), ("before_pass", 2, 5), ("before_batch", 3, 3), ("before_backward", 3, 3), ("after_backward", 3, 3),
    ("after_update", 1, 3), ("after_batch", 3, 3), ("after_batch", 4, 4), ("extend_metrics", 1, 2), ("on_print_interval", 1, 2),
    ("after_pass", 1, 4), ("after_epoch", 1, 7),
]  # fmt: skip
"""Hook, its n-th call, and the iteration after which the request is done."""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("hook", "call", "iteration"), MOMENTS)
def test_requests_of_a_hook_are_done_after_its_step(hook: str, call: int, iteration: int, at: At) -> None:
    """A checkpoint is saved, and each phase is validated."""

    def ask(context: Context) -> None:
        context.request("checkpoint")
        context.request("validation")

    at(hook, call, ask)
    context = GeneralTrainer(rare()).run()
    assert saved(context) == [iteration, 14]
    assert validated(context) == [("a", iteration), ("b", iteration), ("a", 14), ("b", 14)]


def test_a_request_of_a_checkpoint_alone_validates_nothing(at: At) -> None:
    at("after_batch", 3, request("checkpoint"))
    context = GeneralTrainer(rare()).run()
    assert (saved(context), validated(context)) == ([3, 14], [("a", 14), ("b", 14)])


def test_a_request_of_a_validation_alone_saves_nothing(at: At) -> None:
    at("after_batch", 3, request("validation"))
    context = GeneralTrainer(rare()).run()
    assert (saved(context), validated(context)[:2]) == ([14], [("a", 3), ("b", 3)])


def test_a_phase_that_was_validated_after_the_same_step_is_not_validated_again(at: At) -> None:
    at("after_batch", 3, request("validation"))
    found = validated(GeneralTrainer(rare(valid_interval=3)).run())
    assert [iteration for phase, iteration in found if phase == "a"] == [3, 9, 14]


def test_a_validation_that_is_asked_for_before_a_checkpoint_is_in_it(at: At) -> None:
    at("before_checkpoint_saved", 1, request("validation"))
    context = GeneralTrainer(rare(save_interval=3)).run()
    assert validated(context)[:2] == [("a", 3), ("b", 3)]


def test_to_ask_for_something_else_is_an_error_that_says_what_to_write(at: At) -> None:
    at("after_batch", 1, request("checkpiont"))
    what = r"context.request\('checkpiont'\): is nothing .*; did you mean 'checkpoint'\?"
    with pytest.raises(ContextError, match=what):
        GeneralTrainer(rare()).run()


STOPS = [
    ("after_batch", 3, 2),
    ("after_batch", 3, 3),
    ("after_batch", 3, 4),
    ("after_pass", 1, 4),
    ("before_epoch", 2, 7),
    ("before_epoch", 2, 8),
    ("before_batch", 5, 4),
    ("before_batch", 5, 5),
    ("before_checkpoint_saved", 1, 3),
    ("before_checkpoint_saved", 1, 4),
    ("after_epoch", 1, 7),
]
QUICK = [
    ("checkpoint", "after_batch", 3, 3),
    ("checkpoint", "after_pass", 1, 4),
    ("validation", "before_batch", 5, 4),
    ("checkpoint", "before_checkpoint_saved", 1, 4),
]
SLOW = [
    ("checkpoint", "after_batch", 3, 2),
    ("checkpoint", "before_epoch", 2, 7),
    ("checkpoint", "after_epoch", 1, 7),
    ("validation", "after_batch", 3, 3),
    ("validation", "before_epoch", 2, 8),
    ("validation", "before_checkpoint_saved", 1, 3),
]
"""At the step of the request and around it: in a pass, between two passes, at the end of an epoch, and in a save."""
MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(QUICK, ())
EVERY = [(what, *stop) for what in ("checkpoint", "validation") for stop in STOPS]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("what", "hook", "call", "stop"),
    [pytest.param(*case, marks=MARKS.get(case, pytest.mark.release)) for case in EVERY],
)
def test_a_run_that_is_stopped_around_a_request_ends_as_one_that_was_not(
    what: str, hook: str, call: int, stop: int, at: At
) -> None:
    class Ends:
        @hookimpl
        def after_batch(self, context: Context) -> None:
            if context["train_state"]["iteration"] == stop:
                send_signal(context)

    chosen = rare(save_interval=3)
    at(hook, call, request(what))
    expected = end(GeneralTrainer({**chosen, "output_dir": "unbroken"}).run())
    at(hook, call, request(what))
    with pytest.raises(StoppedError):
        GeneralTrainer({**chosen, "plugins": [*chosen["plugins"], Ends]}).run()
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected


CALLS: dict[str, Callable[[Context], object]] = {
    "save": lambda context: context.save(),
    "validate": lambda context: context.validate("a"),
    "batches": lambda context: context.batches("a"),
    "epochs": lambda context: next(iter(context.epochs())),
}


@pytest.mark.parametrize("hook", ["before_batch", "after_validation"])
@pytest.mark.parametrize("call", CALLS)
def test_a_hook_that_calls_what_is_for_the_runner_stage_is_told_what_to_write(call: str, hook: str, at: At) -> None:
    at(hook, 1, CALLS[call])
    what = rf"plugin 'Asks', hook {hook} \(test_stopped.py:\d+\) called context.{call}, .*; write context.request\('checkpoint'\)"
    with pytest.raises(ContextError, match=what):
        GeneralTrainer(rare(valid_interval=3)).run()


def test_a_loop_of_ones_own_may_ask_too(at: At) -> None:
    class Own(RunnerBase):
        def run(self, context: Context) -> None:
            for _ in context.epochs(1):
                for number, batch in enumerate(context.batches("a")):
                    context["model"]["a"].brain.fit_batch(batch)
                    if number == 1:
                        context.request("checkpoint")
                        context.request("validation")

    at("", 0, request("nothing"))
    context = GeneralTrainer(rare(runner_class_path=Own)).run()
    assert (saved(context), validated(context)[:2]) == ([2, 4], [("a", 2), ("b", 2)])


class Experiment(ExperimentBase):
    def setup_dataloader(self) -> None:
        self.train_loader = self.valid_loader = [torch.ones(2, 3)] * 4

    def setup_model(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_batch(self) -> None:
        loss = self.model(self.read_batch()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.iteration in (2, 3):
            self.context.request("validation" if self.iteration == 2 else "checkpoint")

    def valid(self) -> None:
        self.visualizer.add_scalar("loss", 1.0, self.iteration)


def test_an_experiment_does_what_is_asked_for(at: At) -> None:
    at("", 0, request("nothing"))
    chosen = rare(runner_class_path=Experiment, epochs=2)
    context = GeneralTrainer({**chosen, "phase": [], "dataset": []}).run()
    assert (saved(context), validated(context)) == ([3, 8], [("experiment", 2), ("experiment", 8)])
