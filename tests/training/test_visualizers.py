"""Where the numbers of an experiment go."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Context
from pipeline.hookspecs import hookimpl
from pipeline.stages.experiment_config import JsonLines, PluginNumbers
from pipeline.user_code.plugins import plugin_manager


class Heard:
    """A plugin that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, float]]] = []

    @hookimpl
    def on_print_interval(self, phase: str, metrics: dict[str, float]) -> None:
        self.told.append((phase, metrics))

    @hookimpl
    def after_validation(self, phase: str, metrics: dict[str, float]) -> None:
        self.told.append((phase, metrics))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def numbers(heard: Heard) -> PluginNumbers:
    """In an epoch, with no iteration done."""
    plugins = plugin_manager()
    plugins.register(heard)
    made = PluginNumbers(Context(hooks=plugins.hook, train_state={"iteration": 0}))
    made.begin_epoch()
    return made


def test_each_number_is_a_json_line() -> None:
    lines = JsonLines(Path("metrics.jsonl"))
    for step, value in enumerate([0.5, torch.tensor(2.0, requires_grad=True), math.nan, 3]):
        lines.add_scalar("loss", value, step)
    lines.close()
    written = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert written == [{"step": step, "name": "loss", "value": value} for step, value in enumerate([0.5, 2, None, 3])]


def test_json_lines_are_added_to_what_is_there_also_after_closing() -> None:
    for steps in ((1, 2), (3,)):
        lines = JsonLines(Path("metrics.jsonl"))
        for step in steps:
            lines.add_scalar("loss", 0, step)
            lines.close()
    assert [json.loads(line)["step"] for line in Path("metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_plugins_are_told_the_mean_since_the_last_time(numbers: PluginNumbers, heard: Heard) -> None:
    for values in ([1.0, torch.tensor(3.0)], [5.0]):
        for value in values:
            numbers.add_scalar("loss", value, 1)
        numbers.print()
    assert heard.told == [("experiment", {"loss": 2.0}), ("experiment", {"loss": 5.0})]


def test_the_epoch_has_the_means_of_all_and_the_numbers_of_its_validations(numbers: PluginNumbers) -> None:
    for value in (1.0, 3.0, 5.0):
        numbers.add_scalar("loss", value, 1)
        numbers.print()
    with numbers.validating():
        numbers.add_scalar("valid_loss", 7.0, 0)
    numbers.end_epoch()
    assert numbers.context["metrics"] == {"experiment": {"loss": 3.0, "valid_loss": 7.0}}
    numbers.begin_epoch()
    assert numbers.context["metrics"] == {"experiment": {}}


def test_a_validation_has_its_own_numbers(numbers: PluginNumbers, heard: Heard) -> None:
    numbers.add_scalar("loss", 1.0, 1)
    with numbers.validating():
        numbers.add_scalar("loss", 4.0, 0)
        numbers.add_scalar("loss", 6.0, 0)
    numbers.print()
    assert heard.told == [("experiment", {"loss": 5.0}), ("experiment", {"loss": 1.0})]


def test_a_validation_that_fails_is_over(numbers: PluginNumbers, heard: Heard) -> None:
    with pytest.raises(OverflowError), numbers.validating():
        raise OverflowError
    assert (numbers.validation, heard.told) == (None, [])


def test_a_step_that_is_no_iteration_is_warned_of_once(numbers: PluginNumbers, log_lines: list[Any]) -> None:
    for step in (0, 1):
        numbers.add_scalar("loss", 1.0, step)
    assert log_lines == []
    for step in (5, 6):
        numbers.add_scalar("rate", 1.0, step)
    assert [line.strip() for line in log_lines] == [
        "WARNING visualizer: 'rate' is given for step 5; the plugins are told iteration 0"
    ]
