"""Twelve Runners that a user would write, in ``twelve_runners`` and in three examples: each has what the default one has."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from own_runners import RUNNER, RUNNERS, end, overrides

from pipeline import Context, GeneralTrainer
from pipeline.check.checker import check
from pipeline.checkpoint.comparison import differences
from pipeline.errors import ExitCode
from pipeline.signals import StoppedError

Ran = Callable[[str], Context]
EACH = pytest.mark.parametrize("name", RUNNERS)
pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = [name for name in RUNNERS if name != "evaluate_only"]
# The runners of the quick tests: each needs something else of the framework.
QUICK = {"two_phases", "k_fold", "rollouts", "lbfgs", "evaluate_only", "until_metric"}


def started(name: str, folder: Path = Path(), *more: str, resume: str = "never") -> GeneralTrainer:
    """One of the twelve, whose outputs go to the folder."""
    return GeneralTrainer(RUNNERS[name].config, [*overrides(name), f"output_dir={folder / 'runs'}", *more], resume)


def by_name(names: Iterable[str]) -> list[Any]:
    """Return one parameter for each name; those that are not in QUICK are slow."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


Unbroken = Callable[[str], tuple[Context, dict[str, Any]]]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The context after a run that nothing interrupts, and what the run has come to; each runs once."""

    @cache
    def run(name: str) -> tuple[Context, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(name)
        return started(name, folder).run(), end(folder, name)

    return run


@pytest.fixture(scope="module")
def ran(unbroken: Unbroken) -> Callable[[str], Context]:
    """The context after a run that nothing interrupts."""
    return lambda name: unbroken(name)[0]


# What each is


def runner_class(name: str) -> tuple[list[str], ast.Module]:
    """The code lines of its class Runner, without docstrings, and its module."""
    config = RUNNERS[name].config
    source = config.parent / ("runner.py" if config.stem == "config" else f"{name}.py")
    module = ast.parse(source.read_text(encoding="utf-8"))
    [cls] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Runner"]
    documented = [cls, *(node for node in cls.body if isinstance(node, ast.FunctionDef))]
    texts = [node.body[0] for node in documented if ast.get_docstring(node)]
    lines = source.read_text(encoding="utf-8").splitlines()
    numbers = set(range(cls.lineno, (cls.end_lineno or 0) + 1))
    for text in texts:
        numbers -= set(range(text.lineno, (text.end_lineno or 0) + 1))
    code = [lines[number - 1] for number in sorted(numbers)]
    return [line for line in code if line.strip() and not line.strip().startswith("#")], module


@EACH
def test_a_runner_of_ones_own_is_short_and_knows_public_names_alone(name: str) -> None:
    lines, module = runner_class(name)
    imported = [node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    assert len(lines) <= 15
    assert {each for each in imported if each and each.startswith("pipeline")} == {"pipeline"}


@pytest.mark.parametrize("name", by_name(RUNNERS))
def test_the_check_has_nothing_against_a_runner_of_ones_own(name: str) -> None:
    assert check(RUNNERS[name].config, RUNNERS[name].overrides) == []


# What it comes to


# iterations, epochs, (iteration, phase) of each validation; counted by hand of the batches of an epoch
ENDS: dict[str, tuple[int, int, list[tuple[int, str]]]] = {
    "gan": (36, 3, [(n, "points") for n in (7, 12, 14, 21, 24, 28, 35, 36)]),
    # A round is 4 iterations, and only after it is looked at what is due.
    "two_phases": (
        48,
        3,
        [(n, "seldom") for n in (8, 16, 24, 28, 32, 36, 44, 48)] + [(n, "often") for n in (16, 32, 48)],
    ),
    # 4, then 8, then 11 batches in an epoch; only the hard level has validation data.
    "curriculum": (34, 4, [(21, "hard"), (23, "hard"), (34, "hard")]),
    "sam": (40, 4, [(n, "rings") for n in (7, 10, 14, 20, 21, 28, 30, 35, 40)]),
    "distillation": (
        40,
        4,
        [(n, "teacher") for n in (7, 10, 14, 20)] + [(n, "student") for n in (21, 28, 30, 35, 40)],
    ),
    # After its last epoch, and then as the Runner asks for it.
    "k_fold": (
        36,
        6,
        [(n, "fold_0") for n in (6, 7, 12, 12)] + [(n, "fold_1") for n in (14, 18, 21, 24, 24)]
        + [(n, "fold_2") for n in (28, 30, 35, 36, 36)],
    ),
    "rollouts": (40, 8, []),
    "lbfgs": (40, 10, [(n, "net") for n in (4, 7, 8, 12, 14, 16, 20, 21, 24, 28, 32, 35, 36, 40)]),
    "gradient_surgery": (40, 4, [(n, "net") for n in (7, 10, 14, 20, 21, 28, 30, 35, 40)]),
    "evaluate_only": (0, 0, [(0, "clean"), (0, "noisy"), (0, "far")]),
}  # fmt: skip


def events(context: Context, *hooks: str) -> list[tuple[str, int, str]]:
    return [event for event in context.get("events", []) if event[0] in hooks]


def lines(context: Context, event: str) -> list[dict[str, Any]]:
    """What the run wrote to ``metrics.jsonl`` at an event."""
    text = (context["run_dir"] / RUNNER / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", by_name(ENDS))
def test_it_is_validated_where_that_is_due(name: str, ran: Ran) -> None:
    validations = ENDS[name][2]
    context = ran(name)
    assert sorted(each[1:] for each in events(context, "before_validation")) == sorted(validations)
    assert sorted((line["iteration"], line["phase"]) for line in lines(context, "validate")) == sorted(validations)


@pytest.mark.parametrize("name", by_name(ENDS))
def test_its_status_has_the_right_iteration_and_epoch(name: str, ran: Ran) -> None:
    status = json.loads((ran(name)["run_dir"] / "status.json").read_text(encoding="utf-8"))
    iterations, epochs, _ = ENDS[name]
    assert (status["state"], status["iteration"], status["epoch"]) == ("done", iterations, epochs)


@pytest.mark.parametrize("name", by_name(TRAINING))
def test_its_numbers_are_in_metrics_jsonl_and_in_the_bar(name: str, ran: Ran) -> None:
    context = ran(name)
    losses = [line["loss"] for line in [*lines(context, "train"), *lines(context, "epoch")]]
    assert losses
    assert all(isinstance(loss, float) for loss in losses)
    bars = [
        line for line in (context["run_dir"] / "log.txt").read_text(encoding="utf-8").splitlines() if "  batch " in line
    ]
    printed = events(context, "on_print_interval")
    assert len(bars) == len(printed) >= context["train_state"]["iteration"] // 5 - 3


@pytest.mark.parametrize(
    "name", by_name(name for name in ENDS if ENDS[name][2] and name not in {"gan", "self_training"})
)
def test_the_last_validation_is_of_the_last_weights(name: str, ran: Ran) -> None:
    context = ran(name)
    for phase, numbers in {line["phase"]: line for line in lines(context, "validate")}.items():
        settings = next(each for each in context["phases"] if each["name"] == phase)
        data = context["dataset"][settings["valid_dataset_name"]].dataset
        inputs, target = (torch.stack(column) for column in zip(*data, strict=True))
        brain = context["model"][phase].brain
        loss = brain.loss(context["model"][phase].model.eval()(inputs), target)
        assert numbers["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_until_metric_ends_with_the_first_validation_that_is_low_enough(ran: Ran) -> None:
    losses = [line["loss"] for line in lines(ran("until_metric"), "validate")]
    assert losses[-1] < 0.165 <= min(losses[:-1])


def test_k_fold_writes_the_mean_of_what_its_folds_come_to(ran: Ran) -> None:
    context = ran("k_fold")
    last = {line["phase"]: line["loss"] for line in lines(context, "validate")}
    assert context["cross_validated"] == pytest.approx(sum(last.values()) / 3)


def test_evaluate_only_tells_on_which_data_the_loss_is_the_highest(ran: Ran) -> None:
    context = ran("evaluate_only")
    losses = {line["phase"]: line["loss"] for line in lines(context, "validate")}
    assert context["hardest"] == max(losses, key=lambda phase: losses[phase])


@pytest.mark.slow
def test_self_training_has_more_samples_in_each_epoch(ran: Ran) -> None:
    batches = [line["iteration"] for line in lines(ran("self_training"), "epoch")]
    sizes = [after - before for before, after in zip([0, *batches], batches, strict=False)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


# In which order plugins are told

STEP = ["before_batch", "after_backward", "before_update", "after_update"]
BATCH = [*STEP, "after_batch"]
EPOCHS: dict[str, list[list[str]]] = {
    "gan": [12 * BATCH] * 3,
    # A batch of `seldom` is over when the next is asked for: after those of `often` that came in its body.
    "two_phases": [4 * [*STEP, *STEP, "after_batch", *STEP, "after_batch", *STEP, "after_batch", "after_batch"]] * 3,
    "curriculum": [count * BATCH for count in (4, 8, 11, 11)],
    "sam": [10 * BATCH] * 4,
    "distillation": [10 * BATCH] * 4,
    "k_fold": [6 * BATCH] * 6,
    "rollouts": [5 * BATCH] * 8,
    # It steps the optimizer itself.
    "lbfgs": [4 * ["before_batch", "after_batch"]] * 10,
    # It computes the gradients itself.
    "gradient_surgery": [10 * ["before_batch", "before_update", "after_update", "after_batch"]] * 4,
    "evaluate_only": [],
}
"""Of each epoch, the hooks about batches in their order."""


@pytest.mark.parametrize("name", by_name(EPOCHS))
def test_the_hooks_about_batches_come_in_their_order(name: str, ran: Ran) -> None:
    told = [each[0] for each in events(ran(name), *BATCH, "before_epoch", "after_epoch")]
    assert told == [hook for epoch in EPOCHS[name] for hook in ("before_epoch", *epoch, "after_epoch")]


@pytest.mark.parametrize("name", by_name(RUNNERS))
def test_every_hook_comes_at_its_iteration(name: str, ran: Ran) -> None:
    context = ran(name)
    counts = [event[1] for event in context["events"]]
    assert counts == sorted(counts)
    done = [event[1] for event in events(context, "after_batch")]
    assert done == list(range(1, context["train_state"]["iteration"] + 1))
    around = [event[0] for event in events(context, "before_validation", "after_validation")]
    assert around == ["before_validation", "after_validation"] * (len(around) // 2)
    assert events(context, "after_checkpoint_saved")


# Stopped, killed, resumed


def broken(name: str, hook: str, call: int, how: str, monkeypatch: pytest.MonkeyPatch) -> Context:
    """The context of the run that goes on after one that is ended at a call of a hook: by a signal, or by an error."""
    monkeypatch.setenv("END_AT", f"{hook} {call} {how}")
    trainer = started(name)
    with pytest.raises(Exception if how == "error" else StoppedError):
        trainer.run()
    assert trainer.outcome == (ExitCode.FAILED if how == "error" else ExitCode.STOPPED)
    monkeypatch.delenv("END_AT")
    return started(name, resume="auto").run()


def unlike(name: str, expected: dict[str, Any]) -> list[str]:
    """Where what the run in this folder came to is not what an unbroken one comes to."""
    return [str(each) for each in differences(expected, end(Path(), name))]


def chosen(every: list[tuple[str, Any]], quick: set[tuple[str, Any]], slow: set[tuple[str, Any]]) -> list[Any]:
    """Return one parameter for each (name, moment), marked by how often it runs.

    Those in neither set run before a release.
    """
    assert quick | slow <= set(every)
    marks = {**dict.fromkeys(slow, pytest.mark.slow), **dict.fromkeys(quick, ())}
    return [
        pytest.param(*each, marks=marks.get(each, pytest.mark.release), id=f"{each[0]}-{each[1]}") for each in every
    ]


# Two batches of each runner. Together they are the first batch of a run, and of each runner's epoch the first, one in
# the middle and the last; the counts of batches are in ENDS and EPOCHS.
SIGNALS: Mapping[str, tuple[int, int]] = {
    "two_phases": (17, 30),
    "gan": (12, 17),
    "curriculum": (5, 15),
    "sam": (1, 15),
    "distillation": (20, 27),
    "self_training": (17, 30),
    "k_fold": (7, 22),
    "rollouts": (5, 18),
    "lbfgs": (13, 30),
    "gradient_surgery": (10, 24),
    "until_metric": (9, 11),
}
SIXTH = [
    (name, call)
    for first, name in enumerate(TRAINING)
    for call in range(1, 35)
    if (first + call) % 6 == 0 or call in SIGNALS[name]
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "call"),
    chosen(
        SIXTH,
        quick={("two_phases", 17), ("rollouts", 18)},
        slow={(name, call) for name, calls in SIGNALS.items() for call in calls},
    ),
)
def test_a_signal_in_a_batch_stops_it_with_a_checkpoint_from_which_it_goes_on_exactly(
    name: str, call: int, unbroken: Unbroken, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(name, "before_batch", call, "SIGTERM", monkeypatch)
    assert unlike(name, unbroken(name)[1]) == []


# The last checkpoint is of an epoch's end, of an interval, or not there yet.
ERRORS = {name: (3, 22, 9, 15, 28)[number % 5] for number, name in enumerate(TRAINING)}


@pytest.mark.parametrize(
    ("name", "call"),
    chosen(
        [(name, call) for name in TRAINING for call in (3, 9, 15, 22, 28)],
        quick={("two_phases", 22)},
        slow={*ERRORS.items()},
    ),
)
def test_after_an_error_in_a_batch_it_goes_on_exactly_from_the_last_checkpoint(
    name: str, call: int, unbroken: Unbroken, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(name, "before_batch", call, "error", monkeypatch)
    assert unlike(name, unbroken(name)[1]) == []


HOOKS = ["before_validation", "after_validation", "after_epoch", "after_checkpoint_saved"]
BETWEEN = [name for name in TRAINING if name != "rollouts"]


@pytest.mark.parametrize(
    ("name", "hook"),
    chosen(
        [(name, hook) for name in BETWEEN for hook in HOOKS],
        # A short run; k_fold validates in two ways.
        quick={("until_metric", "before_validation")},
        slow={*((name, HOOKS[number % 4]) for number, name in enumerate(BETWEEN)),
              *(("two_phases", hook) for hook in HOOKS), ("k_fold", "before_validation")},
    ),
)  # fmt: skip
def test_a_signal_between_batches_stops_it_with_a_checkpoint_from_which_it_goes_on_exactly(
    name: str, hook: str, unbroken: Unbroken, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (1, 2):
        broken(name, hook, call, "SIGTERM", monkeypatch)
        assert unlike(name, unbroken(name)[1]) == []


@pytest.mark.parametrize(
    ("hook", "call"),
    chosen(
        [(hook, call) for hook in ("before_validation", "after_validation") for call in (1, 2, 3)],
        quick={("before_validation", 2)},
        slow={("after_validation", 1), ("after_validation", 3)},
    ),
)
def test_evaluate_only_stopped_in_any_of_its_validations_goes_on_with_that_one(
    hook: str, call: int, unbroken: Unbroken, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = broken("evaluate_only", hook, call, "SIGTERM", monkeypatch)
    assert unlike("evaluate_only", unbroken("evaluate_only")[1]) == []
    assert len(events(context, "before_validation")) < 4
    assert context["hardest"] == unbroken("evaluate_only")[0]["hardest"]
