"""The verbs of the default Runner, overridden one by one, with and without ``super()``: nothing else is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Context, GeneralTrainer, RunnerBase, UpdaterBase, hookimpl, optimize, stages
from pipeline.errors import DataError, StageError

VERBS = ("train_epoch", "train_phase", "train_batch", "validate", "is_over")
mse = nn.functional.mse_loss


class KilledError(BaseException):
    """Stands for the end of the process."""


class Watching:
    """A plugin that writes down each call, and ends the run after an iteration."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012
    kill_at = 0

    def note(self, hook: str, context: Context, *values: Any) -> None:
        self.calls.append((hook, context["train_state"]["iteration"], *values))

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        self.note("before_epoch", context)

    @hookimpl
    def before_batch(self, context: Context, batch: Any) -> None:
        self.note("before_batch", context)

    @hookimpl
    def after_batch(self, context: Context, predictions: Any, losses: dict[str, Tensor]) -> None:
        seen = None if predictions is None else predictions.tolist()
        self.note("after_batch", context, seen, {name: loss.item() for name, loss in losses.items()})
        if context["train_state"]["iteration"] == self.kill_at:
            raise KilledError

    @hookimpl
    def on_print_interval(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        self.note("on_print_interval", context, phase, metrics["loss"])

    @hookimpl
    def before_validation(self, context: Context, phase: str) -> None:
        self.note("before_validation", context, phase)

    @hookimpl
    def after_validation(self, context: Context, phase: str, metrics: dict[str, float]) -> None:
        self.note("after_validation", context, phase, dict(metrics))

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        self.note("after_epoch", context)


@pytest.fixture
def make(config: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Makes a config of a train runner: 3 batches an epoch, validation after each epoch."""

    def with_runner(cls: type[stages.Runner] = stages.Runner, **runner: Any) -> dict[str, Any]:
        Watching.calls.clear()
        Watching.kill_at = 0
        settings = {"runner_class_path": cls, "print_interval": 2, "seed": 3}
        train = {**config["runner"][0], **settings, **runner}
        return config | {"name": "c", "plugins": [{"progress_bar": False}, Watching], "runner": [train]}

    return with_runner


def result(context: Context) -> dict[str, Any]:
    """What a run leaves."""
    run_dir = context["run_dir"]
    return {
        "weights": {name: value.tolist() for name, value in context["model"]["line"].model.state_dict().items()},
        "counters": dict(context["train_state"]),
        "metrics": context["metrics"],
        "lines": (run_dir / "train" / "metrics.jsonl").read_text(),
        "saved": [path.name for path in context["checkpointer"].all()],
        "status": {
            key: json.loads((run_dir / "status.json").read_text())[key] for key in ("state", "iteration", "epoch")
        },
        "generator": torch.get_rng_state().tolist(),
    }


def calling_super(*verbs: str) -> type[stages.Runner]:
    """A Runner that overrides verbs by calls of what they override."""

    def by_super(verb: str) -> Callable[..., Any]:
        def method(self: stages.Runner, *given: Any) -> Any:
            used.add(verb)
            return getattr(super(cls, self), verb)(*given)

        return method

    used: set[str] = set()
    cls = type("Own", (stages.Runner,), {**{verb: by_super(verb) for verb in verbs}, "used": used})
    return cls


# With super().


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulating": {"accum_grad": 2, "valid_interval": 2, "save_interval": 2},
    "bf16": {"precision": "bf16", "max_steps": 4},
}


def super_cases() -> list[Any]:
    """Return all verbs at once for each config, which is quick, and one alone for each verb.

    That each works alone in each config is tested before a release.
    """
    cases = [pytest.param(runner, VERBS, id=f"{name}-all") for name, runner in CONFIGS.items()]
    for number, verb in enumerate(VERBS):
        for place, (name, runner) in enumerate(CONFIGS.items()):
            mark = pytest.mark.slow if number % len(CONFIGS) == place else pytest.mark.release
            cases.append(pytest.param(runner, (verb,), id=f"{name}-{verb}", marks=mark))
    return cases


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("runner", "verbs"), super_cases())
def test_a_verb_that_calls_super_changes_nothing(
    make: Callable[..., Any], runner: dict[str, Any], verbs: tuple[str, ...]
) -> None:
    expected, calls = result(GeneralTrainer(make(**runner)).run()), list(Watching.calls)
    own = calling_super(*verbs)
    assert result(GeneralTrainer(make(own, **runner)).run()) == expected
    assert Watching.calls == calls
    assert own.used == set(verbs)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kill_at", [2, 5])
def test_verbs_that_call_super_are_resumed_as_the_default_is(make: Callable[..., Any], kill_at: int) -> None:
    runner = {"save_interval": 1, "valid_interval": [2, "1 epoch"]}
    expected = result(GeneralTrainer(make(**runner)).run())
    chosen = make(calling_super(*VERBS), **runner)
    Watching.kill_at = kill_at
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    Watching.kill_at = 0
    assert result(GeneralTrainer(chosen, resume="auto").run()) == expected


def test_evaluate_that_calls_super_changes_nothing(config: dict[str, Any]) -> None:
    expected = GeneralTrainer(config).run()["metrics"]
    own = calling_super("evaluate")
    config["runner"][1]["runner_class_path"] = own
    assert GeneralTrainer(config).run()["metrics"] == expected
    assert own.used == {"evaluate"}


def test_save_that_calls_super_saves_where_a_verb_calls_it(make: Callable[..., Any]) -> None:
    class Saving(stages.Runner):
        def train_epoch(self, context: Context, epoch: int) -> None:
            self.save(epoch, context)
            super().train_epoch(context, epoch)

        def save(self, epoch: int | None = None, context: Context | None = None, is_fleet: bool = False) -> None:
            saved.append(epoch)
            super().save(epoch, context, is_fleet)

    saved: list[int | None] = []
    steps = result(GeneralTrainer(make(Saving, save_interval="2 epoch")).run())["saved"]
    assert saved == [0, 1]
    assert [int(name[5:]) for name in steps] == [0, 3, 6]


def test_save_needs_a_context(make: Callable[..., Any]) -> None:
    class Saving(stages.Runner):
        def train_epoch(self, context: Context, epoch: int) -> None:
            self.save(epoch)

    with pytest.raises(StageError, match=r"Runner.save: there is no context; call save\(epoch, context\)"):
        GeneralTrainer(make(Saving)).run()


# Without super().


def kinds(*hooks: str) -> list[tuple[str, int]]:
    """The calls of some hooks, each with its iteration."""
    return [call[:2] for call in Watching.calls if call[0] in hooks]


BATCHES = [(hook, number + (hook == "after_batch")) for number in range(6) for hook in ("before_batch", "after_batch")]


def nothing_else_is_lost(context: Context) -> None:
    """Plugins, counters, metrics.jsonl, checkpoints and status.json are there."""
    found = result(context)
    assert kinds("before_batch", "after_batch") == BATCHES
    assert kinds("before_epoch", "after_epoch") == [
        ("before_epoch", 0), ("after_epoch", 3), ("before_epoch", 3), ("after_epoch", 6),
    ]  # fmt: skip
    assert kinds("before_validation") == [("before_validation", 3), ("before_validation", 6)]
    assert found["counters"] == {"iteration": 6, "update": 6, "epoch": 2, "samples": 20, "phase_index": 0}
    lines = [json.loads(line) for line in found["lines"].splitlines()]
    events = [
        (2, "train"),
        (3, "validate"),
        (3, "epoch"),
        (4, "train"),
        (6, "train"),
        (6, "validate"),
        (6, "epoch"),
    ]
    assert [(line["iteration"], line["event"]) for line in lines] == events
    assert found["saved"] == ["step-000000000003", "step-000000000006"]
    assert found["status"] == {"state": "done", "iteration": 6, "epoch": 2}


def same_when_resumed(chosen: dict[str, Any], expected: dict[str, Any]) -> None:
    """Killed in the second epoch and resumed it ends as before."""
    Watching.kill_at = 5
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    Watching.kill_at = 0
    ours = result(GeneralTrainer(chosen, resume="auto").run())
    assert [name for name in expected if ours[name] != expected[name]] == []


class OwnEpoch(stages.Runner):
    def train_epoch(self, context: Context, epoch: int) -> None:
        self.train_phase(context, context["model"]["line"])


class OwnPhase(stages.Runner):
    def train_phase(self, context: Context, phase: Any) -> dict[str, float]:
        own = context.batches(phase)
        for batch in own:
            self.train_batch(context, phase, batch)
        return own.numbers


class OwnBatch(stages.Runner):
    def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
        inputs, target = batch
        loss = mse(phase.model(inputs), target)
        optimize({"loss": loss}, list(phase.optim_schedulers.values()), context["current_epoch"])
        return loss


class OwnRun(stages.Runner):
    def run(self, context: Context) -> None:
        for epoch in context.epochs():
            self.train_epoch(context, epoch)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("own", [OwnEpoch, OwnPhase, OwnBatch, OwnRun])
def test_a_verb_without_super_that_trains_the_same_is_a_whole_run_and_resumed(
    make: Callable[..., Any], own: type[stages.Runner]
) -> None:
    expected = result(GeneralTrainer(make()).run())
    context = GeneralTrainer(make(own)).run()
    nothing_else_is_lost(context)
    ours = result(context)
    assert [name for name in expected if ours[name] != expected[name]] == []
    same_when_resumed(make(own), expected)


def test_a_train_phase_without_a_pass_is_validated_and_saved_and_has_no_batches(make: Callable[..., Any]) -> None:
    class Doubling(stages.Runner):
        def train_phase(self, context: Context, phase: Any) -> dict[str, float]:
            with torch.no_grad():
                phase.model[0].bias += 1
            return {}

    found = result(GeneralTrainer(make(Doubling)).run())
    assert kinds("before_validation", "after_batch") == [("before_validation", 0), ("before_validation", 2)]
    assert found["counters"]["epoch"] == 2
    assert found["saved"] == ["step-000000000001", "step-000000000002"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("returned", "reported"),
    [
        (lambda loss: loss, {"loss"}),
        (lambda loss: {"loss": loss, "half": loss / 2}, {"loss", "half"}),
        (lambda loss: None, set()),
    ],
    ids=["tensor", "dict", "none"],
)
@pytest.mark.parametrize("runner", [{}, {"precision": "bf16"}, {"accum_grad": 2}])
def test_train_batch_may_return_a_loss_several_or_none(
    make: Callable[..., Any], returned: Callable[[Tensor], Any], reported: set[str], runner: dict[str, Any]
) -> None:
    class Own(stages.Runner):
        def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
            predictions = phase.model(batch[0])
            assert (predictions.dtype == torch.bfloat16) == ("precision" in runner)
            loss = mse(predictions, batch[1])
            (scheduler,) = phase.optim_schedulers.values()
            scheduler.step(loss)
            return returned(loss)

    found = result(GeneralTrainer(make(Own, **runner)).run())
    after = [call[3] for call in Watching.calls if call[0] == "after_batch"]
    assert [set(losses) for losses in after] == [reported] * 6
    # Of three batches in windows of two, the last window is closed by the end of the pass.
    assert found["counters"]["update"] == (4 if "accum_grad" in runner else 6)
    assert set(found["metrics"]["line"]) == {"loss", "valid_loss"} | reported


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("much", r"Own.train_batch returned a str"),
        (torch.ones(2), r"Own.train_batch: the loss 'loss' has shape \(2,\)"),
    ],
)
def test_what_is_no_loss_is_refused_with_the_name_of_the_verb(
    make: Callable[..., Any], returned: Any, message: str
) -> None:
    class Own(stages.Runner):
        def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
            return returned

    with pytest.raises(DataError, match=message):
        GeneralTrainer(make(Own)).run()


class Twice(UpdaterBase):
    """Trains twice on each batch."""

    def __init__(self, brain: Any) -> None:
        super().__init__()
        self.brain = brain

    def update(self, batch: Any) -> Tensor:
        self.brain.fit_batch(batch)
        loss: Tensor = self.brain.fit_batch(batch)
        self.log("twice", loss)
        return loss


@pytest.mark.parametrize(
    "verbs", [(), ("train_batch",), ("train_phase",)], ids=["default", "train_batch", "train_phase"]
)
def test_an_updater_of_ones_own_is_what_trains_on_a_batch(make: Callable[..., Any], verbs: tuple[str, ...]) -> None:
    chosen = make(calling_super(*verbs))
    chosen["phase"][0]["updater"] = {"class_path": Twice}
    found = result(GeneralTrainer(chosen).run())
    assert (found["counters"]["iteration"], found["counters"]["update"], found["counters"]["samples"]) == (6, 12, 40)
    assert set(found["metrics"]["line"]) == {"loss", "twice", "valid_loss"}


def test_a_train_batch_of_ones_own_stands_before_the_updater(make: Callable[..., Any]) -> None:
    class Refusing(Twice):
        def update(self, batch: Any) -> Tensor:
            raise AssertionError

    chosen = make(OwnBatch)
    chosen["phase"][0]["updater"] = {"class_path": Refusing}
    assert GeneralTrainer(chosen).run()["train_state"]["update"] == 6


class OwnValidation(stages.Runner):
    def validate(self, context: Context, phase: Any) -> dict[str, float]:
        return {"score": float(context["train_state"]["iteration"] % 4)}


def test_the_numbers_of_a_validation_of_ones_own_are_reported_kept_and_saved(make: Callable[..., Any]) -> None:
    runner = {"keep_best": {"metric": "valid_score", "mode": "max"}, "valid_interval": 1, "save_interval": 1}
    context = GeneralTrainer(make(OwnValidation, **runner)).run()
    after = [call[1:] for call in Watching.calls if call[0] == "after_validation"]
    assert after == [(number, "line", {"score": float(number % 4)}) for number in range(1, 7)]
    assert context["metrics"]["line"]["valid_score"] == 2.0
    assert context["best"] == {"metric": "valid_score", "mode": "max", "value": 3.0, "iteration": 3}
    same_when_resumed(make(OwnValidation, **runner), result(context))


def test_a_validation_that_returns_no_numbers_is_refused(make: Callable[..., Any]) -> None:
    class Silent(stages.Runner):
        def validate(self, context: Context, phase: Any) -> Any:
            return None

    with pytest.raises(DataError, match=r"Silent.validate returned a NoneType; return a dict of numbers by name"):
        GeneralTrainer(make(Silent)).run()


def test_an_evaluation_of_ones_own_is_reported_and_told(config: dict[str, Any]) -> None:
    class Own(stages.Runner):
        def evaluate(self, context: Context, phase: Any) -> dict[str, float]:
            return {"bias": phase.model[3].bias.item()}

    config["plugins"].append(Watching)
    config["runner"][1]["runner_class_path"] = Own
    context = GeneralTrainer(config).run()
    assert context["metrics"] == {"line": {"bias": context["model"]["line"].model[3].bias.item()}}
    assert Watching.calls[-1] == ("after_validation", 6, "line", context["metrics"]["line"])


def test_training_ends_when_is_over_says_so_and_at_no_other_limit(make: Callable[..., Any]) -> None:
    class Until(stages.Runner):
        def is_over(self, context: Context) -> bool:
            return context["metrics"].get("line", {}).get("valid_loss", 9.0) < 9.0 and context["current_epoch"] == 3

    found = result(GeneralTrainer(make(Until, epochs=2)).run())
    assert found["counters"]["epoch"] == 4
    assert found["saved"][-1] == "step-000000000012"
    assert found["status"]["state"] == "done"


def test_an_is_over_that_returns_nothing_is_refused_and_does_not_train_for_ever(make: Callable[..., Any]) -> None:
    class Silent(stages.Runner):
        def is_over(self, context: Context) -> Any:
            super().is_over(context)

    with pytest.raises(StageError, match=r"Silent.is_over returned None; return True or False"):
        GeneralTrainer(make(Silent)).run()


def test_is_over_is_asked_after_each_validation_pass_and_epoch(make: Callable[..., Any]) -> None:
    class Asked(stages.Runner):
        def is_over(self, context: Context) -> bool:
            asked.append(context["train_state"]["iteration"])
            return context["train_state"]["iteration"] >= 5

    asked: list[int] = []
    found = result(GeneralTrainer(make(Asked, epochs=None, valid_interval=5, print_interval=None)).run())
    assert set(asked) == {0, 3, 5}
    assert found["counters"]["iteration"] == 5
    assert found["saved"][-1] == "step-000000000005"
    assert kinds("after_validation")[-1] == ("after_validation", 5)


def test_a_save_of_ones_own_does_not_replace_those_that_are_due(make: Callable[..., Any]) -> None:
    class Own(stages.Runner):
        def save(self, epoch: int | None = None, context: Context | None = None, is_fleet: bool = False) -> None:
            raise AssertionError

    nothing_else_is_lost(GeneralTrainer(make(Own)).run())


# Whose they are.


def by_kit(self: Any, context: Context) -> None:
    """Train as the default does."""
    for _ in context.epochs():
        for batch in context.batches("line"):
            context["model"]["line"].brain.fit_batch(batch)


def test_methods_of_these_names_are_no_verbs_where_only_the_base_class_is_derived_from(
    make: Callable[..., Any],
) -> None:
    class Own(RunnerBase):
        run = by_kit

        def validate(self, rows: list[str]) -> bool:
            raise AssertionError

        def is_over(self, context: Context) -> bool:
            raise AssertionError

    expected = result(GeneralTrainer(make(valid_interval=2)).run())
    assert result(GeneralTrainer(make(Own, valid_interval=2)).run()) == expected


def test_verbs_are_called_in_a_loop_of_ones_own_too(make: Callable[..., Any]) -> None:
    class Own(OwnValidation):
        run = by_kit

        def is_over(self, context: Context) -> bool:
            return context["metrics"].get("line", {}).get("valid_score") == 1.0

    found = result(GeneralTrainer(make(Own, epochs=None, max_steps=None, valid_interval=1)).run())
    assert found["counters"]["iteration"] == 1
    assert found["metrics"]["line"]["valid_score"] == 1.0
