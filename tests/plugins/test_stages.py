"""``pipeline stages`` says what the five stages are, as their source and the table of context keys have it."""

from __future__ import annotations

import inspect
import re
import shutil
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from pipeline_plugins.stages.command import keys_at
from torch import nn

import pipeline as package
from pipeline import GeneralTrainer, stages
from pipeline.context import FIRST_KEYS, STAGES, Context
from pipeline.run.session import RunnerSession
from pipeline.stages.base import METHODS

REPOSITORY = Path(__file__).parents[2]
Call = Callable[..., Result]
Said = Callable[..., str]


@pytest.fixture
def said(pipeline: Call, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What the command prints, by default where no line has to be wrapped."""

    def call(*names: str, columns: int = 1000) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        done = pipeline("stages", *names)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    return call


def pairs(text: str) -> dict[str, str]:
    """The first column of each line -> the second."""
    cells = [re.split(" {2,}", line.strip(), maxsplit=1) for line in text.splitlines()]
    return dict(cells)


def section(text: str, title: str) -> str:
    """What stands below a title."""
    return re.split(r"\n\n(?=\S)|\Z", text.partition(f"\n{title}:\n")[2])[0]


def methods(text: str) -> dict[str, tuple[str, str]]:
    """Name of a method -> its signature, and what it does."""
    lines = [line.strip() for line in section(text, "Methods to call or override").splitlines()]
    return {line.partition("(")[0]: (line, does) for line, does in zip(lines[::2], lines[1::2], strict=True)}


def first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").splitlines()[0].replace("``", "`")


@pytest.fixture
def shipped() -> dict[str, type]:
    """Stage -> the default class, imported."""
    return {stage: getattr(stages, stage.capitalize()) for stage in METHODS}


def test_without_a_name_there_is_a_line_for_each_stage_in_their_order(said: Said, shipped: dict[str, type]) -> None:
    listed, _, end = said().partition("\n\n")
    assert [re.split(" {2,}", line) for line in listed.splitlines()] == [
        [stage, f"stages.{default.__name__}", first_line(default)] for stage, default in shipped.items()
    ]
    assert end == "`pipeline stages NAME` says which methods and keys a stage has, with an example.\n"


@pytest.mark.parametrize("stage", METHODS)
def test_a_name_gives_the_facts_of_its_stage(said: Said, shipped: dict[str, type], stage: str) -> None:
    base, method = METHODS[stage]
    title, facts, *_ = said(stage).split("\n\n")
    assert title == f"{stage}: {first_line(base)}"
    assert (
        pairs(facts).items()
        >= {
            "base class": f"pipeline.{base.__name__}; the trainer calls its method {method}",
            "default": f"pipeline.stages.{shipped[stage].__name__}: {first_line(shipped[stage])}",
            "config keys": f"{stage}_class_path, {stage}_args",
            "runs": "on every rank; write files if context['world'].is_main only",
        }.items()
    )
    assert getattr(package, base.__name__) is base


def test_the_keys_that_a_stage_reads_and_writes_are_those_that_it_was_seen_to_use(said: Said, linear: Path) -> None:
    accesses = GeneralTrainer(linear).run().accesses
    for stage in METHODS:
        facts = pairs(said(stage).split("\n\n")[1])
        own = {each for each in accesses if each.stage == stage and each.where.startswith(f"{stage}.py:")}
        reads = {each.key for each in own if each.action == "read"}
        wrote = {each.key for each in accesses if each.stage == stage and each.action == "write"}
        assert reads <= set(facts["reads"].split(", "))
        assert (wrote or {"nothing"}) == set(facts["writes"].split(", "))


@pytest.mark.parametrize("stage", METHODS)
def test_the_methods_that_one_may_override_are_listed_with_what_they_do(
    said: Said, shipped: dict[str, type], stage: str
) -> None:
    public = {name: each for name, each in inspect.getmembers(shipped[stage], inspect.isfunction) if name[0] != "_"}
    listed = methods(said(stage))
    assert next(iter(listed)) == METHODS[stage][1]
    assert {name: does for name, (_, does) in listed.items() if name in public} == {
        name: first_line(method) for name, method in public.items()
    }


def test_of_methods_with_an_underscore_those_that_have_the_names_of_paddlerec_are_listed(said: Said) -> None:
    assert [name for stage in METHODS for name in methods(said(stage)) if name.startswith("_")] == ["_run"]


@pytest.mark.parametrize(
    ("stage", "signature"),
    [
        ("startup", "load(context, is_fleet: bool = False, main_program=None) -> None"),
        ("runner", "train_batch(context, phase: Phase, batch)"),
        ("runner", "train_epoch(context, epoch: int) -> None"),
        ("network", "build_modules(phase, context) -> dict[str, nn.Module]"),
        ("runner", "save(epoch: int | None = None, context: Context | None = None, is_fleet: bool = False) -> None"),
    ],
)
def test_a_signature_has_the_types_that_say_something(said: Said, stage: str, signature: str) -> None:
    assert methods(said(stage))[signature.partition("(")[0]][0] == signature


@pytest.mark.parametrize("stage", METHODS)
def test_no_signature_has_a_type_that_is_not_public(said: Said, stage: str) -> None:
    words = {word for line, _ in methods(said(stage)).values() for word in re.findall(r"\b[A-Z]\w+", line)}
    foreign = {"None", "False", "True", "Any", "Module", *typing.__all__}
    assert words - foreign <= {*package.__all__}


def test_a_runner_sees_what_the_context_does_in_its_stage_alone(said: Said) -> None:
    lines = section(said("runner"), "Methods of the context in this stage").splitlines()
    names = re.findall(r"^  context\.(\w+)\(", "\n".join(lines), flags=re.MULTILINE)
    assert names == ["epochs", "batches", "validate", "save"]
    assert all(callable(getattr(Context, name)) for name in names)
    assert [stage for stage in METHODS if "Methods of the context" in said(stage)] == ["runner"]


@pytest.mark.parametrize("stage", METHODS)
def test_the_keys_to_rely_on_are_listed_with_type_and_meaning(said: Said, stage: str) -> None:
    page = said(stage)
    first, others = (
        pairs(section(page, title)) for title in ("Keys to rely on", "Keys that few stages need, or PaddleRec's code")
    )
    assert {name.partition(" ")[0] for name in first} <= {key.name for key in FIRST_KEYS}
    assert first | others == {f"{key.name} ({key.type})": key.meaning for key in keys_at(stage)}


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_longer_than_the_terminal_is_wide(said: Said, columns: int) -> None:
    pages = [said(columns=columns), *(said(stage, columns=columns).partition("\nExample:")[0] for stage in METHODS)]
    assert max(len(line) for page in pages for line in page.splitlines()) <= columns


def test_an_example_fits_a_narrow_terminal(said: Said) -> None:
    assert max(len(line) for stage in METHODS for line in section(said(stage), "Example").splitlines()) <= 80


EFFECTS: dict[str, Callable[[Context], bool]] = {
    "instance": lambda context: context["words"] == ["to", "be"],
    "network": lambda context: type(context["model"]["circle"].model) is nn.Sequential,
    "startup": lambda context: not context["model"]["circle"].model.get_parameter("layers.0.bias").any(),
    "runner": lambda context: context["train_state"]["epoch"] < 30,
    "terminal": lambda context: "valid_loss" in (context["run_dir"] / "report.txt").read_text(encoding="utf-8"),
}
"""Stage -> what its example has done in the workspace that `pipeline new` writes."""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("stage", STAGES)
def test_an_example_is_short_and_does_what_it_says(said: Said, stage: str) -> None:
    shutil.copytree(REPOSITORY / "plugins" / "new" / "templates" / "plain", "mine")
    text = inspect.cleandoc(section(said(stage), "Example"))
    assert len(text.partition("\nclass ")[2].splitlines()) <= 7
    Path("mine", f"{stage}.py").write_text(text, encoding="utf-8")
    Path("mine/words.txt").write_text("to be", encoding="utf-8")
    settings = [f"{stage}_class_path={{workspace}}/{stage}.py", "epochs=30" if stage == "runner" else "epochs=1"]
    overrides = [f"runner.train_runner.{each}" for each in settings]
    still = ["hyper_parameters.optimizer.learning_rate=0"] if stage == "startup" else []
    assert EFFECTS[stage](GeneralTrainer("mine/config.yaml", [*overrides, *still]).run())


def test_the_keys_to_rely_on_are_those_that_are_there_when_the_stage_begins(linear: Path) -> None:
    there = {}

    class Watching(GeneralTrainer):
        def enter(self, stage: str, runner: RunnerSession) -> bool:
            there[stage] = set(runner.context)
            return super().enter(stage, runner)

    Watching(linear).run()
    assert there == {stage: {key.name for key in keys_at(stage)} for stage in METHODS}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("startp", "there is no stage 'startp'; did you mean 'startup'?"),
        ("x", "there is no stage 'x'; known: instance, network, runner, startup, terminal"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(pipeline: Call, name: str, message: str) -> None:
    done = pipeline("stages", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"Error: {message}\n")
