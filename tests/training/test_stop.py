"""``context.stop`` ends the training of a runner wherever it is called: validated, saved, done, and resumed by nobody."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import Context, ExperimentBase, GeneralTrainer, RunnerBase, StartupBase, hookimpl, stages
from pipeline.context import Phase
from pipeline.errors import ExitCode
from pipeline.signals import StoppedError
from tests.training.test_stopped import Asks, config, end

Body = Callable[[Any, Context], None]
WHY = "enough is enough"


def stop(context: Context) -> None:
    context.stop(WHY)


def status(context: Context) -> dict[str, Any]:
    path: Path = context["run_dir"] / "status.json"
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return written


def events(context: Context, name: str = "t") -> list[tuple[str, int]]:
    """The lines of ``metrics.jsonl``, but for those of print intervals: event and iteration."""
    text = (context["run_dir"] / name / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["event"], line["iteration"]) for line in lines if line["event"] != "train"]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the plugin of the runs call ``ask`` at the n-th call of a hook."""

    def plan(hook: str, call: int, ask: Callable[[Context], None] = stop) -> None:
        for name, value in {"hook": hook, "at": call, "calls": 0, "ask": staticmethod(ask)}.items():
            monkeypatch.setattr(Asks, name, value)

    return plan


MOMENTS = [
    ("before_epoch", 1, 0), ("before_epoch", 2, 7), ("before_batch", 6, 6), ("after_backward", 5, 5), ("after_update", 1, 3),
    ("after_batch", 3, 3), ("after_batch", 5, 5), ("after_batch", 14, 14), ("on_print_interval", 1, 2),
    ("before_validation", 1, 3), ("after_validation", 1, 3), ("after_validation", 2, 4), ("after_epoch", 1, 7),
    ("before_pass", 1, 1), ("before_pass", 2, 5), ("before_backward", 5, 5), ("extend_metrics", 1, 2), ("after_pass", 1, 4),
    ("before_checkpoint_saved", 1, 7), ("after_checkpoint_saved", 1, None),
]  # fmt: skip


# Every third is quick.
SOME = [pytest.param(*moment, marks=() if at % 3 == 0 else pytest.mark.slow) for at, moment in enumerate(MOMENTS)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("hook", "call", "iteration"), SOME)
def test_a_training_that_is_stopped_at_any_moment_is_validated_saved_and_done(
    hook: str, call: int, iteration: int | None, at: Callable[..., None]
) -> None:
    at(hook, call)
    trainer = GeneralTrainer(config())
    context = trainer.run()
    # When a checkpoint is on disk, the training may have gone on.
    iteration = context["train_state"]["iteration"] if iteration is None else iteration
    assert (context["train_state"]["iteration"], trainer.outcome) == (iteration, ExitCode.DONE)
    assert iteration <= 14
    assert context["checkpointer"].newest().name == f"step-{iteration:012d}"
    assert ("validate", iteration) in events(context)
    assert [status(context)[key] for key in ("state", "exit_code", "reason", "resumable")] == ["done", 0, WHY, False]
    assert (context["run_dir"] / "t" / "results.json").exists()
    before = end(context)
    GeneralTrainer(config(), resume="auto").run()
    assert (end(context), status(context)["reason"]) == (before, WHY)


@pytest.mark.parametrize(
    ("hook", "call", "steps"),
    [
        ("before_batch", 6, 6),
        ("after_update", 2, 4),
        pytest.param("after_batch", 2, 2, marks=pytest.mark.slow),
        pytest.param("after_update", 4, 10, marks=pytest.mark.slow),
    ],
)
def test_a_training_that_is_stopped_ends_as_one_with_that_limit(
    hook: str, call: int, steps: int, at: Callable[..., None]
) -> None:
    expected = end(GeneralTrainer({**config(max_steps=steps), "output_dir": "limited"}).run())
    at(hook, call)
    assert end(GeneralTrainer(config()).run()) == expected


class Killed(BaseException):
    """Stands for the end of the process."""


class Kills:
    """A plugin that ends the process once the runner stage is through."""

    @hookimpl
    def after_stage(self, name: str) -> None:
        if name == "runner":
            raise Killed


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("after_batch", 5),
        pytest.param("after_validation", 2, marks=pytest.mark.slow),
        pytest.param("before_epoch", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_after_the_stop_does_not_train_on(hook: str, call: int, at: Callable[..., None]) -> None:
    at(hook, call)
    expected = end(GeneralTrainer({**config(), "output_dir": "unbroken"}).run())
    at(hook, call)
    chosen = config()
    chosen["plugins"].append(Kills)
    with pytest.raises(Killed):
        GeneralTrainer(chosen).run()
    at("", 0)
    context = GeneralTrainer(config(), resume="auto").run()
    assert (end(context), status(context)["reason"]) == (expected, WHY)


def test_a_signal_in_the_validation_after_the_stop_leaves_a_run_that_does_not_train_on(at: Callable[..., None]) -> None:
    class Asking(Asks):
        signalled = False

        @hookimpl
        def before_validation(self, context: Context) -> None:
            if context.stop_reason is not None and not self.signalled:
                Asking.signalled = True
                signal.raise_signal(signal.SIGTERM)

    at("after_batch", 5)
    expected = end(GeneralTrainer({**config(), "output_dir": "unbroken"}).run())
    at("after_batch", 5)
    chosen = config()
    chosen["plugins"][-1] = Asking
    with pytest.raises(StoppedError):
        GeneralTrainer(chosen).run()
    at("", 0)
    assert end(GeneralTrainer(chosen, resume="auto").run()) == expected


def test_a_stop_before_the_loop_begins_trains_nothing_and_says_so(log_lines: list[str]) -> None:
    class Startup(StartupBase):
        def startup(self, context: Context) -> None:
            stop(context)

    context = GeneralTrainer(config(startup_class_path=Startup)).run()
    assert (context["train_state"]["iteration"], status(context)["reason"]) == (0, WHY)
    assert f"INFO training ends after iteration 0: {WHY}\n" in log_lines
    assert (context["run_dir"] / "t" / "results.json").exists()


def test_later_runners_run_and_the_reasons_of_all_are_kept(at: Callable[..., None], log_lines: list[str]) -> None:
    class Ends(stages.Terminal):
        def terminal(self, context: Context) -> None:
            super().terminal(context)
            stop(context)
            context.request("checkpoint")

    chosen = config()
    infer = {"name": "i", "class": "infer", "device": "cpu", "terminal_class_path": Ends}
    chosen["runner"] += [{**chosen["runner"][0], "name": "second"}, infer]
    at("after_batch", 5, lambda context: (context.stop("the first reason"), context.stop("another"))[0])
    trainer = GeneralTrainer(chosen)
    trainer.run()
    iterations = [context["train_state"]["iteration"] for context in trainer.contexts.values()]
    assert iterations == [5, 14, 14]
    assert status(trainer.contexts["t"])["reason"] == "the first reason"
    for call in ("stop('enough is enough')", "request('checkpoint')"):
        assert any(f"i: context.{call} has done nothing" in line for line in log_lines)


def own(body: Body) -> type[RunnerBase]:
    return type("Own", (RunnerBase,), {"run": body})


def in_a_pass(stage: Any, context: Context) -> None:
    for _ in context.epochs():
        for batch in context.batches("a"):
            context["model"]["a"].brain.fit_batch(batch)
            if context["train_state"]["iteration"] == 4:
                stop(context)


def without_epochs(stage: Any, context: Context) -> None:
    for batch in context.batches("a", repeat=True, count=50):
        context["model"]["a"].brain.fit_batch(batch)
        if context["train_state"]["iteration"] == 4:
            stop(context)


def after_a_validation(stage: Any, context: Context) -> None:
    for epoch in context.epochs(9):
        for batch in context.batches("a", count=2):
            context["model"]["a"].brain.fit_batch(batch)
        context.validate("a")
        if epoch == 1:
            stop(context)


def in_anothers_body(stage: Any, context: Context) -> None:
    """The pass over ``a`` leads: the end comes when it is asked."""
    for batch in context.batches("a", repeat=True):
        context["model"]["a"].brain.fit_batch(batch)
        for inner in context.batches("b", count=1):
            context["model"]["b"].brain.fit_batch(inner)
            if context["train_state"]["iteration"] == 4:
                stop(context)


def before_another_begins(stage: Any, context: Context) -> None:
    """The step in whose middle it is stopped is finished, with a pass that begins only then."""
    for batch in context.batches("a", repeat=True):
        context["model"]["a"].brain.fit_batch(batch)
        stop(context)
        context["model"]["b"].brain.fit_batch(next(context.batches("b")))


@pytest.mark.parametrize(
    ("body", "iteration"),
    [(before_another_begins, 2), (in_a_pass, 5), (without_epochs, 5), (after_a_validation, 4), (in_anothers_body, 6)],
)
def test_a_loop_of_ones_own_ends_when_it_asks_for_the_next(body: Body, iteration: int) -> None:
    context = GeneralTrainer(config(runner_class_path=own(body))).run()
    assert context["train_state"]["iteration"] == iteration
    assert context["checkpointer"].newest().name == f"step-{iteration:012d}"
    assert status(context)["reason"] == WHY


class InTraining(stages.Runner):
    def train_batch(self, context: Context, phase: Phase, batch: Any) -> Any:
        if context["train_state"]["iteration"] == 4:
            stop(context)
        return super().train_batch(context, phase, batch)


class InValidation(stages.Runner):
    def validate(self, context: Context, phase: Phase) -> dict[str, float]:
        stop(context)
        return super().validate(context, phase)


@pytest.mark.parametrize(("runner", "iteration"), [(InTraining, 5), (InValidation, 3)])
def test_a_verb_of_the_runner_stops_the_training(runner: type, iteration: int) -> None:
    context = GeneralTrainer(config(runner_class_path=runner)).run()
    assert (context["train_state"]["iteration"], status(context)["reason"]) == (iteration, WHY)


class Experiment(ExperimentBase):
    """Stops in ``where`` at iteration 4."""

    where = "batch"

    def setup_dataloader(self) -> None:
        self.train_loader = [torch.full((2, 1), float(number)) for number in range(3)]

    def setup_model(self) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train_batch(self) -> None:
        self.model(self.read_batch()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.stop("batch")

    def valid(self) -> None:
        self.visualizer.add_scalar("valid/loss", 1.0, self.iteration)
        self.stop("valid")

    def stop(self, where: str) -> None:
        if (self.where, self.iteration) == (where, 4):
            stop(self.context)


def experiment(where: str, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> dict[str, Any]:
    monkeypatch.setattr(Experiment, "where", where)
    runner = {
        "name": "t",
        "class": "train",
        "device": "cpu",
        "epochs": 4,
        "runner_class_path": Experiment,
        "valid_interval": [2, 7],
    }
    return {"name": "experiment", "runner": [{**runner, **changed}]}


@pytest.mark.parametrize("where", ["batch", "valid"])
def test_an_experiment_is_stopped_validated_saved_and_done(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = GeneralTrainer(experiment(where, monkeypatch)).run()
    assert (context["train_state"]["iteration"], status(context)["reason"]) == (4, WHY)
    assert events(context) == [("validate", 2), ("epoch", 3), ("validate", 4), ("epoch", 4)]
    assert context["checkpointer"].newest().name == "step-000000000004"


def test_an_experiment_that_is_killed_after_the_stop_does_not_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = experiment("batch", monkeypatch, valid_interval=3)
    with pytest.raises(Killed):
        GeneralTrainer({**chosen, "plugins": [Kills]}).run()
    context = GeneralTrainer(chosen, resume="auto").run()
    assert (context["train_state"]["iteration"], status(context)["reason"]) == (4, WHY)
    assert events(context) == [("validate", 3), ("epoch", 3), ("validate", 4), ("epoch", 4)]


def test_an_experiment_by_hand_is_stopped_likewise(tmp_path: Path) -> None:
    training = {"max_iteration": 12, "valid_interval": 3, "save_interval": 3}
    args = {"device": "cpu", "nprocs": 1, "output": str(tmp_path), "checkpoint_path": None}
    for _ in range(2):
        by_hand = Experiment({"training": training}, args)
        by_hand.setup()
        by_hand.run()
        assert (by_hand.iteration, by_hand.context.stop_reason) == (4, WHY)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4]
