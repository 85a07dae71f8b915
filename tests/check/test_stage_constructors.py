"""The first parameter of a stage's constructor, which is given the context whatever its name is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check

STARTUP = """\
from pipeline import stages

class Startup(stages.Startup):
    def __init__({parameters}):
        {body}
        self.path = 1
"""
ADDRESS = "runner.train_runner.startup_class_path"


def faults(config: Path, parameters: str, body: str = "pass", args: str = "") -> list[tuple[str, str]]:
    """Return (address, message) of the faults of a config with such a startup stage."""
    text = STARTUP.format(parameters=parameters, body=body)
    (config.parent / "own.py").write_text(text, encoding="utf-8")
    overrides = [f"{ADDRESS}='{{workspace}}/own.py'"]
    overrides += [f"runner.train_runner.startup_args={args}"] if args else []
    return [(fault.address, fault.message) for fault in check(config, overrides)]


@pytest.mark.parametrize(
    ("parameters", "wrong", "signature"),
    [
        ("self, path='x'", "path", "self, context, path"),
        ("self, path=None", "path", "self, context, path"),
        ("self, path: str", "path", "self, context, path"),
        ("self, size: int, part='all'", "size", "self, context, size, part"),
        ("self, path, context", "path", "self, context, path"),
        ("self, path, *, context=None", "path", "self, context, path"),
        ("self, path='x', *paths", "path", "self, context, path"),
    ],
)
def test_first_parameter_that_is_no_context_is_a_fault(
    linear: Path, parameters: str, wrong: str, signature: str
) -> None:
    (found,) = faults(linear, parameters)
    message = (
        f"Startup.__init__ (own.py:4) gets the context as its parameter '{wrong}'; write `def __init__({signature}"
    )
    assert found[0] == ADDRESS
    assert found[1].startswith(message)


def test_first_parameter_with_an_argument_is_reported_once(linear: Path) -> None:
    (found,) = faults(linear, "self, path='x'", args="{path: y}")
    assert "gets the context as its parameter 'path'" in found[1]


@pytest.mark.parametrize(
    ("parameters", "body"),
    [
        ("self, context, path='x'", "pass"),
        ("self, ctx: dict", "pass"),
        ("self, given=None", "super().__init__(context=given)"),
        ("self, values=None", "self.epochs = values['config']"),
        pytest.param("self, context=None", "pass", marks=pytest.mark.slow),
        pytest.param("self, given=None", "super().__init__(given)", marks=pytest.mark.slow),
        pytest.param("self, values: dict[str, object]", "pass", marks=pytest.mark.slow),
        pytest.param("self, _=None", "pass", marks=pytest.mark.slow),
        pytest.param("self, run_context, path='x'", "pass", marks=pytest.mark.slow),
    ],
)
def test_first_parameter_for_the_context_is_accepted(linear: Path, parameters: str, body: str) -> None:
    assert faults(linear, parameters, body) == []
    GeneralTrainer(linear, [f"{ADDRESS}='{{workspace}}/own.py'"]).run()


EXPERIMENT = """\
from pipeline import ExperimentBase

class Runner(ExperimentBase):
    def __init__(self, config, path="x"):
        super().__init__(config, None)
    def setup_model(self): ...
    def setup_dataloader(self): ...
    def train_batch(self): ...
    def valid(self): ...
"""


def test_experiment_without_its_second_argument_is_a_fault(linear: Path) -> None:
    (linear.parent / "own.py").write_text(EXPERIMENT, encoding="utf-8")
    messages = [
        fault.message for fault in check(linear, ["runner.train_runner.runner_class_path='{workspace}/own.py'"])
    ]
    assert [message for message in messages if "gets the args as its parameter 'path'" in message]
