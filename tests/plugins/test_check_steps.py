"""What ``check --steps`` finds although it is shorter than the run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Call = Callable[..., Result]


def write(linear: Path, text: str) -> None:
    (linear.parent / "own.py").write_text(textwrap.dedent(text), encoding="utf-8")


# Losses that are not finite.

LOSSES = """
import torch
from pipeline import Brain, ExperimentBase, RunnerBase, Stage
from torch import nn

def bad(predictions, target):
    return (predictions * float("nan")).mean()

def infinite_gradient(predictions, target):
    # The root of 0 is 0, and its slope is not finite.
    return (predictions - predictions).sqrt().sum() + predictions.mean()

class Valid(Brain):
    def __init__(self):
        super().__init__({"net": nn.Linear(1, 1)})

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        loss = nn.functional.mse_loss(predictions, batch[1])
        return loss if stage is Stage.TRAIN else loss * float("inf")

class Second(Valid):
    def compute_objectives(self, predictions, batch, stage):
        loss = nn.functional.mse_loss(predictions, batch[1])
        return {"loss": loss, "other": loss.log() * float("nan")}

class Loop(RunnerBase):
    def run(self, context):
        model = context["model"]["line"].model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in context.epochs():
            for inputs, target in context.batches("line"):
                optimizer.zero_grad()
                bad(model(inputs), target).backward()
                optimizer.step()

class Experiment(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = [torch.ones(2, 1)] * 6

    def setup_model(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train_batch(self):
        self.optimizer.zero_grad()
        bad(self.model(self.read_batch()), None).backward()
        self.optimizer.step()

    def valid(self): ...
"""
LOGGING = """
class Logging(Valid):
    def compute_objectives(self, predictions, batch, stage):
        loss = nn.functional.mse_loss(predictions, batch[1])
        self.log("type", loss)
        return loss
"""
LOSS = "phase.line.loss={workspace}/own.py:bad"
MODEL = ["phase.line.model_args={}", "phase.line.loss=null"]
RUNNER = "runner.train_runner.runner_class_path={workspace}/own.py:"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([LOSS], "phase.line: 'loss' is nan in iteration 1"),
        ([LOSS, "runner.train_runner.nonfinite_patience=null"], "'loss' is nan in iteration 1"),
        (
            [*MODEL, "phase.line.model={workspace}/own.py:Valid"],
            "phase.line: 'loss' is inf in an evaluation",
        ),
        ([*MODEL, "phase.line.model={workspace}/own.py:Second"], "phase.line: 'other' is nan"),
        (
            [RUNNER + "Loop", "phase.line.valid_dataset_name=null"],
            "phase.line: 'weight' is not finite after the training",
        ),
    ],
)
def test_steps_with_a_nonfinite_loss_are_a_fault(
    pipeline: Call, linear: Path, overrides: list[str], message: str
) -> None:
    write(linear, LOSSES)
    done = pipeline("check", "--steps", 2, linear, *overrides)
    assert done.exit_code == 2
    assert message in done.stderr


def test_steps_find_the_nonfinite_loss_of_an_experiment(pipeline: Call, linear: Path) -> None:
    """It does not tell its losses, and its weights show them."""
    write(linear, LOSSES)
    linear.write_text(
        "runner: [{name: train_runner, class: train, device: cpu, max_steps: 9,"
        " runner_class_path: '{workspace}/own.py:Experiment'}]\n",
        encoding="utf-8",
    )
    done = pipeline("check", "--steps", 2, linear)
    assert done.exit_code == 2
    assert "phase.experiment: 'weight' is not finite after the training" in done.stderr


def test_steps_allow_a_gradient_that_is_not_finite(pipeline: Call, linear: Path) -> None:
    write(linear, LOSSES)
    loss = "phase.line.loss={workspace}/own.py:infinite_gradient"
    looks = "runner.train_runner.check_gradients=true"
    assert pipeline("check", "--steps", 2, linear, loss, looks).exit_code == 0


# Schedules, with the length of the whole training.


def schedule(text: str) -> list[str]:
    address = "phase.line.optim_schedulers"
    conf = "optim_type: SGD, optim_conf: {lr: 0.1, momentum: 0.9}"
    return [f"{address}={{main: {{{text.format(conf)}}}}}", "hyper_parameters={}"]


WARMUP = "class: warmup_linear, args: {{{}, warmup_steps: 1000}}"
CYCLE_ARGS = "schedule: OneCycleLR, args: {{max_lr: 0.4, total_steps: 5}}"
CYCLE = f"class: torch_schedule, args: {{{{{{}}, {CYCLE_ARGS}}}}}"
STREAM = """
from torch.utils.data import IterableDataset
from .data import Line

class Stream(IterableDataset):
    def __init__(self, size):
        self.line = Line(size)

    def __iter__(self):
        return map(self.line.__getitem__, range(len(self.line)))
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (WARMUP, [], "warmup_steps is 1000 and total_steps 12"),
        (CYCLE, [], "OneCycleLR has 5 steps, and the training has 12"),
        (
            "class: warmup_linear, args: {{{}}}",
            ["dataset.train_data.class_path={workspace}/own.py:Stream"],
            "dataset.train_data has no length",
        ),
    ],
)
def test_steps_build_schedules_of_the_whole_training(
    pipeline: Call, linear: Path, text: str, overrides: list[str], message: str
) -> None:
    """Each of these ends `run` before its first step."""
    write(linear, STREAM)
    arguments = [linear, *schedule(text), *overrides]
    run, check = pipeline("run", *arguments), pipeline("check", "--steps", 2, *arguments)
    assert (run.exit_code, check.exit_code) == (1, 2)
    assert message in run.stderr
    assert message in check.stderr


def test_steps_leave_the_limits_that_a_schedule_refers_to(pipeline: Call, linear: Path) -> None:
    """With max_steps: 2 in their place, the rise would be longer than the training."""
    total = "${{runner.train_runner.max_steps}}"
    text = f"class: warmup_linear, args: {{{{{{}}, warmup_steps: 50, total_steps: '{total}'}}}}"
    limit = "runner.train_runner.max_steps=100"
    done = pipeline("check", "--steps", 2, linear, limit, *schedule(text))
    assert done.exit_code == 0, done.stderr


EXPERIMENT = """
import torch
from pipeline import ExperimentBase
from torch import nn

class Experiment(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = [torch.ones(2, 1)] * 6

    def setup_model(self):
        self.model = nn.Linear(1, 1)
        assert self.config.training.max_iteration == 12

    def train_batch(self):
        self.read_batch()
        print("step")

    def valid(self): ...
"""


def test_steps_tell_an_experiment_its_whole_length(pipeline: Call, linear: Path) -> None:
    write(linear, EXPERIMENT)
    linear.write_text(
        "runner: [{name: train_runner, class: train, device: cpu, epochs: 2,"
        " runner_class_path: '{workspace}/own.py:Experiment'}]\n",
        encoding="utf-8",
    )
    done = pipeline("check", "--steps", 3, linear)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("step\n") == 3


PRINTING = """
from pipeline import hookimpl

class Plugin:
    @hookimpl
    def on_print_interval(self, metrics):
        raise KeyError("mine")
"""


def test_steps_call_what_the_run_calls_at_long_intervals(pipeline: Call, linear: Path) -> None:
    """The run would print, and give the schedule a validation, only after 1000 iterations."""
    write(linear, PRINTING)
    printing = ["plugins=['{workspace}/own.py']", "runner.train_runner.print_interval=1000"]
    done = pipeline("check", "--steps", 2, linear, *printing)
    assert done.exit_code == 2
    assert "KeyError: 'mine'" in done.stderr
    write(linear, LOSSES + LOGGING)
    plateau = schedule("class: plateau, args: {{{}, metric: valid_typo}}")
    model = [*MODEL, "phase.line.model={workspace}/own.py:Logging"]
    interval = "runner.train_runner.valid_interval=1000"
    done = pipeline("check", "--steps", 2, linear, *plateau, *model, interval)
    assert done.exit_code == 2
    assert "Plateau watches 'valid_typo'" in done.stderr


SWAPPING = """
from pipeline import hookimpl

class Plugin:
    changes_weights = CHANGES

    @hookimpl
    def before_validation(self, context):
        context["model"]["line"].model.weight.data.add_(1)
"""


@pytest.mark.parametrize(("plugin", "warnings"), [("ema", 0), ("True", 0), ("False", 1)])
def test_steps_warn_of_weights_that_a_plugin_changes_unsaid(
    pipeline: Call, linear: Path, plugin: str, warnings: int
) -> None:
    write(linear, SWAPPING.replace("CHANGES", plugin))
    chosen = plugin if plugin == "ema" else "'{workspace}/own.py'"
    export = "runner.train_runner.save_inference_interval=1"
    done = pipeline("check", "--steps", 2, linear, f"plugins=[{chosen}]", export)
    assert done.exit_code == 0
    assert done.stderr.count("WARNING") == warnings
