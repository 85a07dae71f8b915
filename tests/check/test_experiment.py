"""An experiment as the runner stage is checked from source: what it needs, how it is built and called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import ExperimentBase
from pipeline.check.checker import check, inspect

RUNNER = "runner.train_runner"
Workspace = Callable[..., Path]

CONFIG = """
    hyper_parameters: {lr: 0.1}
    runner:
      - name: train_runner
        class: train
        epochs: 1
        runner_class_path: "{workspace}/experiment.py:Mine"
"""
EXPERIMENT = """
    from pipeline import ExperimentBase

    class Mine(ExperimentBase):
        def __init__(self, config, args, width=3, depth=1):
            super().__init__(config, args)
        def setup_dataloader(self): ...
        def setup_model(self):
            print(self.context["anything"])
        def train_batch(self): ...
        def valid(self): ...
"""


@pytest.fixture
def faults(workspace: Workspace) -> Callable[..., list[str]]:
    """The messages for an experiment of which some text is replaced, and for overrides."""

    def find(*overrides: str, replaced: tuple[str, str] = ("", "")) -> list[str]:
        files = {"config.yaml": CONFIG, "experiment.py": EXPERIMENT.replace(*replaced)}
        return [f"{fault.address}: {fault.message}" for fault in check(workspace(files) / "config.yaml", overrides)]

    return find


def test_neither_phase_nor_dataset_nor_optimizer_is_needed(faults: Callable[..., list[str]]) -> None:
    assert faults() == []
    assert faults(f"{RUNNER}.runner_args={{width: 2}}", f"{RUNNER}.epochs=null", f"{RUNNER}.max_steps=3") == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{RUNNER}.epochs=null", f"{RUNNER}: does not say how long to train; add `epochs:` or `max_steps:`"),
        (f"{RUNNER}.class=infer", f"{RUNNER}.class: is infer, and Mine is an experiment, which trains; write train"),
        (
            "+hyper_parameters.training={noise: 1, max_iteration: 3}",
            "hyper_parameters.training.max_iteration: would be ignored: the runner's `max_steps` says it; write it there",
        ),
        (
            "+hyper_parameters.training={save_interval: 3}",
            "hyper_parameters.training.save_interval: would be ignored: the runner's `save_interval` says it; write it there",
        ),
        (f"{RUNNER}.runner_args={{widht: 2}}", f"{RUNNER}.runner_args.widht: Mine has no argument 'widht'; did you mean 'width'?"),
        (f"{RUNNER}.runner_args={{args: 2}}", f"{RUNNER}.runner_args.args: Mine has no argument 'args'; known: depth, width"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_its_config_is_told(faults: Callable[..., list[str]], override: str, message: str) -> None:
    assert faults(override) == [message]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (("width=3, depth=1", "width"), f"{RUNNER}.runner_args: Mine needs the argument width; add it"),
        (
            ("config, args, width=3", "config, width"),
            f"{RUNNER}.runner_args.width: Mine's parameter 'width' is given the args; "
            "write `def __init__(self, config, args, width, …)`",
        ),
        (
            ("config, args, width=3, depth=1", "config, *, width=3"),
            f"{RUNNER}.runner_class_path: Mine.__init__ (experiment.py:5) takes (self, config, *, width=3), and is called "
            "with config and args; write `def __init__(self, config, args, …)`",
        ),
        (
            ("train_batch(self)", "train_batch(self, batch)"),
            f"{RUNNER}.runner_class_path: Mine.train_batch (experiment.py:10) takes (self, batch), and is called without "
            "arguments; write `def train_batch(self)`",
        ),
        (
            ("def valid(self)", "async def valid(self)"),
            f"{RUNNER}.runner_class_path: Mine.valid (experiment.py:11) is async, and nobody would await it: it would do "
            "nothing; write `def valid(self)`",
        ),
        (
            ("def setup_model(self)", "@property\n        def setup_model(self)"),
            f"{RUNNER}.runner_class_path: Mine.setup_model (experiment.py:9) is a property, and "
            "is called as setup_model(); take @property away",
        ),
        (
            ("def valid", "def validate"),
            "Mine does not define valid; define it, spelt exactly so; did you mean 'validate'?",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_its_class_is_told(
    faults: Callable[..., list[str]], replaced: tuple[str, str], message: str
) -> None:
    arguments = f"{RUNNER}.runner_args={{{'width: 2' if 'parameter' in message else ''}}}"
    (found,) = faults(arguments, replaced=replaced)
    assert message in found


def test_a_class_given_from_python_needs_no_phase_either() -> None:
    runner: dict[str, Any] = {"name": "train_runner", "class": "train", "runner_class_path": ExperimentBase}
    assert [fault.message for fault in check({"runner": [runner]})] == [
        "does not say how long to train; add `epochs:` or `max_steps:`"
    ]


def test_the_flow_says_that_it_may_do_anything(workspace: Workspace) -> None:
    path = workspace({"config.yaml": CONFIG, "experiment.py": EXPERIMENT}) / "config.yaml"
    flow = inspect(path).flows["train_runner"].stages["runner"]
    assert flow
    assert flow.flow.writes() == ["model", "current_epoch", "metrics"]
    assert flow.flow.unknown == "experiment.py:4"
