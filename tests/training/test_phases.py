"""``before_phase`` and ``after_phase`` come once in an epoch for each phase that is trained in it, also after a resume."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import Context, GeneralTrainer, RunnerBase, hookimpl
from pipeline.signals import StoppedError
from tests.training.test_stopped import config, send_signal


class Notes:
    """A plugin that notes hooks of phases, passes and validations, and ends the run after iteration ``at``."""

    events: list[str] = []  # noqa: RUF012
    at = 0

    @hookimpl
    def before_phase(self, phase: str) -> None:
        self.events.append(f"begin {phase}")

    @hookimpl
    def after_phase(self, phase: str) -> None:
        self.events.append(f"end {phase}")

    @hookimpl
    def before_pass(self, phase: str) -> None:
        self.events.append(phase)

    @hookimpl
    def after_validation(self, phase: str) -> None:
        self.events.append(f"validated {phase}")

    @hookimpl
    def after_epoch(self) -> None:
        self.events.append("epoch")

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == self.at:
            send_signal(context)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notes, "events", [])


def noted(**runner: Any) -> dict[str, Any]:
    chosen = config(valid_interval="1 epoch", save_interval=None, **runner)
    return {**chosen, "plugins": [{"progress_bar": False}, {"metric_log": False}, Notes]}


DEFAULT = ["begin a", "a", "validated a", "end a", "begin b", "b", "validated b", "end b", "epoch"]


def test_the_default_runner_ends_a_phase_with_its_validation_before_the_next_begins() -> None:
    GeneralTrainer(noted()).run()
    assert Notes.events == DEFAULT * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [2, 4, 6, 7, 9])
def test_a_phase_that_is_resumed_in_its_middle_does_not_begin_again(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notes, "at", at)
    with pytest.raises(StoppedError):
        GeneralTrainer(noted()).run()
    monkeypatch.setattr(Notes, "at", 0)
    GeneralTrainer(noted(), resume="auto").run()
    assert Notes.events == DEFAULT * 2


class ByTurns(RunnerBase):
    """A pass before the epochs, and in each epoch two passes over ``a``, in whose bodies there is one over ``b``."""

    def run(self, context: Context) -> None:
        for batch in context.batches("b"):
            context["model"]["b"].brain.fit_batch(batch)
        for _ in context.epochs():
            for _ in range(2):
                own = context.batches("a")
                for batch in own:
                    context["model"]["a"].brain.fit_batch(batch)
                    for other in context.batches("b") if own.done == 1 else ():
                        context["model"]["b"].brain.fit_batch(other)


OWN = ["begin a", "a", "begin b", "b", "a", "b", "validated a", "validated b", "end a", "end b", "epoch"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [0, 5, 9, 13])
def test_in_a_loop_of_ones_own_all_phases_end_with_the_epoch(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = noted(runner_class_path=ByTurns)
    monkeypatch.setattr(Notes, "at", at)
    if at:
        with pytest.raises(StoppedError):
            GeneralTrainer(chosen).run()
        monkeypatch.setattr(Notes, "at", 0)
    GeneralTrainer(chosen, resume="auto").run()
    assert Notes.events == ["b", *OWN * 2]


def test_limit_inside_phase_does_not_end_the_phase() -> None:
    chosen = noted(max_steps=2)
    GeneralTrainer(chosen).run()
    assert [event for event in Notes.events if "validated" not in event] == ["begin a", "a"]
