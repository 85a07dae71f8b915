"""``pipeline stages`` says what the five stages are, as their source and the table of context keys have it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import GeneralTrainer, stages
from pipeline.check.data_flow import keys_at
from pipeline.run.session import RunnerSession
from pipeline.stages.base import METHODS

Call = Callable[..., Result]


def rows(text: str) -> list[list[str]]:
    """The cells of each line."""
    return [re.split(r" {3,}", line.strip()) for line in text.splitlines()]


def facts(text: str) -> dict[str, str]:
    """The first block: label -> what it says."""
    return dict(rows(text.partition("\n\n")[0]))


def first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").splitlines()[0]


@pytest.fixture
def shipped() -> dict[str, type]:
    """Stage -> the default class, imported."""
    return {stage: getattr(stages, stage.capitalize()) for stage in METHODS}


def test_without_a_name_there_is_a_line_for_each_stage(pipeline: Call, shipped: dict[str, type]) -> None:
    done = pipeline("stages")
    header, *lines = rows(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert header == ["stage", "base class and method", "default", "arguments", "reads", "writes"]
    for line, (stage, (base, method)) in zip(lines, METHODS.items(), strict=True):
        default = shipped[stage]
        path = f"{default.__module__}:{default.__name__}"
        assert line[:4] == [stage, f"{base.__name__}.{method}(context)", path, "-"]
        said = facts(pipeline("stages", stage).stdout)
        assert [each.replace("-", "nothing") for each in line[4:]] == [said["reads"], said["writes"]]


@pytest.mark.parametrize("stage", METHODS)
def test_a_name_gives_the_facts_of_its_stage(pipeline: Call, shipped: dict[str, type], stage: str) -> None:
    base, method = METHODS[stage]
    default = shipped[stage]
    assert (
        facts(pipeline("stages", stage).stdout).items()
        >= {
            "stage": f"{stage}: {first_line(base)}",
            "base class": f"pipeline.stages.base:{base.__name__}",
            "method": f"{method}(context: Context) -> None",
            "config keys": f"{stage}_class_path, {stage}_args",
            "default": f"pipeline.stages.{stage}:{default.__name__}: {first_line(default)}",
            "arguments": "none",
        }.items()
    )


def test_the_keys_that_a_stage_reads_and_writes_are_those_that_it_was_seen_to_use(pipeline: Call, linear: Path) -> None:
    accesses = GeneralTrainer(linear).run().accesses
    for stage in METHODS:
        said = facts(pipeline("stages", stage).stdout)
        own = {each for each in accesses if each.stage == stage and each.where.startswith(f"{stage}.py:")}
        reads = {each.key for each in own if each.action == "read"}
        wrote = {each.key for each in accesses if each.stage == stage and each.action == "write"}
        assert reads <= set(said["reads"].split(", "))
        assert (wrote or {"nothing"}) == set(said["writes"].split(", "))


@pytest.mark.parametrize("stage", METHODS)
def test_the_other_public_methods_are_listed(pipeline: Call, shipped: dict[str, type], stage: str) -> None:
    blocks = pipeline("stages", stage).stdout.split("\n\n")
    found = [block for block in blocks if block.startswith("methods to call or override")]
    listed = {line[0].partition("(")[0]: line[1] for block in found for line in rows(block)[1:]}
    methods = dict(inspect.getmembers(shipped[stage], inspect.isfunction))
    others = [name for name in methods if not name.startswith("_") and name != METHODS[stage][1]]
    assert listed == {name: first_line(methods[name]) for name in others}


def test_a_startup_may_call_load(pipeline: Call) -> None:
    said = "Load the weights that the runner's ``init_model_path`` names; without one, nothing."
    assert ["load(context: Context) -> None", said] in rows(pipeline("stages", "startup").stdout)


@pytest.mark.parametrize("stage", METHODS)
def test_the_keys_to_rely_on_are_listed_with_type_writer_and_meaning(pipeline: Call, stage: str) -> None:
    header, *lines = rows(pipeline("stages", stage).stdout.split("\n\n")[-1])
    assert header == ["keys to rely on", "type", "written by", "meaning"]
    assert lines == [[key.name, key.type, key.writer, key.meaning] for key in keys_at(stage)]


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
