"""User code with long chains of base classes or deeply nested expressions: what ``check`` costs, and what it finds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pipeline.check.checker import check

# How each base class begins, and the class from which the first derives.
CHAINS = {
    "runner.train_runner.runner_class_path": "stages.Runner",
    "runner.train_runner.trainer_class": "GeneralTrainer",
    "phase.line.model": "Brain",
}
HEAD = "import torch\nfrom pipeline import Brain, GeneralTrainer, stages\n"
MANY = 900


def count_calls(function: Callable[[], object]) -> int:
    """Return how many Python and C functions are called."""
    calls = 0

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def write_chain(file: Path, base: str, length: int, mixins: str) -> str:
    """Write classes of which each derives from the one before it; return a class path of the last."""
    lines = [HEAD, "class Shared:\n    def shared(self): return 1\n"]
    for number in range(length):
        lines.append(f"class Mixin{number}:\n    def mixed{number}(self): return 1\n")
        bases = f"Class{number - 1}" if number else base
        body = f"    def method{number}(self): return self.method{max(number - 1, 0)}()\n"
        lines.append(f"class Class{number}({mixins.format(bases=bases, number=number)}):\n{body}")
    file.write_text("".join(lines), encoding="utf-8")
    return f"'{{workspace}}/{file.name}:Class{length - 1}'"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("address", "mixins"),
    [
        ("runner.train_runner.runner_class_path", "{bases}"),
        ("runner.train_runner.runner_class_path", "Mixin{number}, {bases}"),
        ("runner.train_runner.runner_class_path", "{bases}, Shared"),
        ("runner.train_runner.trainer_class", "{bases}"),
        ("phase.line.model", "{bases}"),
    ],
)
def test_check_of_a_base_class_chain_takes_linear_work(linear: Path, address: str, mixins: str) -> None:
    file = linear.parent / "chain.py"
    # The first check reads our own files, which are then kept.
    check(linear, [f"{address}={write_chain(file, CHAINS[address], 2, mixins)}"])
    work = []
    for length in (10, 20, 40):
        override = f"{address}={write_chain(file, CHAINS[address], length, mixins)}"
        work.append(count_calls(partial(check, linear, [override])))
    assert work[2] - work[1] < 2.3 * (work[1] - work[0])


def test_check_follows_a_chain_that_is_longer_than_the_stack(linear: Path) -> None:
    path = write_chain(linear.parent / "chain.py", "stages.Runner", 1500, "{bases}")
    assert check(linear, [f"runner.train_runner.runner_class_path={path}"]) == []


ELIF = "if y == 0:\n            pass\n" + "".join(
    f"        elif y == {number}:\n            pass\n" for number in range(MANY)
)
NESTED = {
    "sum": f"v = {' + '.join(['y'] * MANY)}",
    "strings": f"v = {' + '.join(['str(y)'] * MANY)}",
    "elif": ELIF,
    "attributes": f"v = y{'.b' * MANY}",
    "calls": f"v = y{'.b()' * (MANY // 2)}",
    "arguments": f"v = {'str(' * 190}y{')' * 190}",
    "conditions": f"v = {'1 if y else ' * MANY}2",
}
STARTUP = """\
from pipeline import stages
class Startup(stages.Startup):
    def startup(self, context):
        y = 1
        {statement}
        super().startup(context)
        context["{key}"]
"""


def startup_faults(config: Path, text: str) -> list[str]:
    (config.parent / "own.py").write_text(text, encoding="utf-8")
    return [fault.message for fault in check(config, ["runner.train_runner.startup_class_path='{workspace}/own.py'"])]


@pytest.mark.parametrize("statement", ["sum", "strings", "elif"])
def test_a_missing_key_after_a_long_statement_is_found(linear: Path, statement: str) -> None:
    (found,) = startup_faults(linear, STARTUP.format(statement=NESTED[statement], key="lacking"))
    assert "reads context['lacking']" in found


@pytest.mark.parametrize("statement", NESTED)
def test_check_accepts_deeply_nested_code_anywhere(linear: Path, statement: str) -> None:
    text = STARTUP.format(statement=NESTED[statement], key="model")
    module = NESTED[statement].replace("\n        ", "\n")
    assert startup_faults(linear, f"y = 1\n{module}\n{text}") == []


MODULES = """\
import torch
from pipeline import Brain, GeneralTrainer, hookimpl

class Trainer(GeneralTrainer):
    def run_all(self, run, y={value}):
        v = {value}
        return super().run_all(run)

class Model(Brain):
    def __init__(self, y=1):
        v = {value}
        super().__init__({{"net": torch.nn.Linear(1, 1)}})
    def _compile(self, y):
        v = {value}
    def compute_forward(self, batch, stage): return self.modules.net(batch[0])
    def compute_objectives(self, predictions, batch, stage): return predictions.mean()

class Plugin:
    @hookimpl
    def before_epoch(self, context):
        y = {value}
"""


def test_faults_beside_a_long_sum_are_found(linear: Path) -> None:
    text = MODULES.format(value=" + ".join(["1"] * MANY))
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    overrides = ["phase.line.model='{workspace}/own.py'", "phase.line.loss=null", "phase.line.model_args={}"]
    overrides.append("plugins=['{workspace}/own.py:Plugin']")
    overrides.append("runner.train_runner.trainer_class='{workspace}/own.py'")
    (found,) = check(linear, overrides)
    assert found.message.startswith("Model._compile (own.py:13) is called by nobody")


UPDATER = """from pipeline import UpdaterBase
class Updater(UpdaterBase):
    def __init__(self, brain):
        super().__init__()
        self.brain = brain
    def update(self, batch):
        y = ({value}).real
        return self.brain.fit_batch(batch)
"""


def test_updater_with_an_attribute_of_a_long_sum_is_accepted(linear: Path) -> None:
    text = UPDATER.format(value=" + ".join(["1"] * MANY))
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    assert check(linear, ["phase.line.updater={class_path: '{workspace}/own.py'}"]) == []
