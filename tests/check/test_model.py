"""Whether the model of a phase can be built of the modules that the config names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import check

Workspace = Callable[..., Path]
Faults = Callable[..., list[str]]

CONFIG = """\
hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}
dataset: [{name: points, class_path: "{workspace}/own.py:Points"}]
runner: [{name: learn, class: train, epochs: 2}]
phase:
  - name: line
    dataset_name: points
    model: "{workspace}/own.py"
    modules:
      encoder: {class: Linear, args: {in_features: 1, out_features: 2}}
      head: {class: "{workspace}/own.py:Head", args: {width: 2}}
"""
OWN = """\
import torch
from pipeline import Brain

class Points: ...
def make(width): ...

class Head(torch.nn.Module):
    def __init__(self, width: int): super().__init__()

class Model(Brain):
    def compute_forward(self, batch, stage): ...
    def compute_objectives(self, predictions, batch, stage): ...

class Own(Model):
    def __init__(self, modules, depth): super().__init__(modules)

class Alone(Model):
    def __init__(self): Model.__init__(self)

class Any(Model):
    def __init__(self, **others): super().__init__()

class Plain(torch.nn.Module):
    def __init__(self, modules): super().__init__()

class Forgetful(Model):
    def __init__(self, modules): self.depth = 1

class Middle(Forgetful):
    def other(self): ...

class Ends(Forgetful):
    def __init__(self, modules): super().__init__(modules)

class Recipe(Model):
    def on_stage_end(self, stage, stage_loss, epoch=None): self.train_loss = self.total = self.options = stage_loss

class Around(Forgetful):
    def __init__(self, modules): Model.__init__(self, modules)
"""


@pytest.fixture
def faults(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The faults of the config with one text in the place of another."""

    def found(old: str = "", new: str = "", *overrides: str) -> list[str]:
        assert old in CONFIG
        folder = workspace({"own.py": OWN, "config.yaml": CONFIG.replace(old, new) if old else CONFIG})
        monkeypatch.chdir(folder)
        lines = [str(fault).splitlines()[0] for fault in check("config.yaml", overrides)]
        return [line.replace(str(folder), "{ws}") for line in lines]

    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('model: "{workspace}/own.py"', 'model: "{workspace}/own.py:Own"\n    model_args: {depth: 2}'),
        ('model: "{workspace}/own.py"', 'model: "{workspace}/own.py:Any"'),
        ('model: "{workspace}/own.py"', 'model: "{workspace}/own.py:Recipe"'),
        ("class: Linear", "class: torch.nn.modules.linear:Linear"),
        ("own.py:Head", "own.py:make"),
    ],
)
def test_modules_that_can_be_built_and_given_to_the_brain_are_no_fault(faults: Faults, old: str, new: str) -> None:
    assert faults(old, new) == []


IN_MODULES = "config.yaml:9:{}: phase.line.modules.encoder"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("class: Linear", "class: Linaer", f"{IN_MODULES.format(24)}.class: 'Linaer': torch.nn has no 'Linaer'; did you mean 'Linear'?"),
        ("class: Linear", "class: 5", f"{IN_MODULES.format(24)}.class: is 5; write the name of a class in torch.nn, or a class path"),
        ("class: Linear", "clas: Linear", f"{IN_MODULES.format(17)}.clas: unknown key; did you mean 'class'?"),
        ("class: Linear, ", "",
         f"{IN_MODULES.format(16)}: has no class; write {{class: Linear, args: {{in_features: 8, out_features: 1}}}}"),
        ("out_features: 2", "out_featurs: 2",
         f"{IN_MODULES.format(55)}.args.out_featurs: Linear has no argument 'out_featurs'; did you mean 'out_features'?"),
        ("{in_features: 1, out_features: 2}", "[1, 2]",
         f"{IN_MODULES.format(38)}.args: is [1, 2], a list; write a mapping, such as {{in_features: 8, out_features: 1}}"),
        ("encoder:", "en-coder:", "config.yaml:9:7: phase.line.modules.en-coder: 'en-coder' is no name of a module; "
         "use letters, digits and '_', as in 'encoder'"),
        ("{width: 2}", "{width: two}",
         "config.yaml:10:55: phase.line.modules.head.args.width: Head's argument width is 'two', a string; write an integer (own.py:8: width: int)"),
        ("own.py:Head", "own.py:Points", "config.yaml:10:21: phase.line.modules.head.class: "
         "Points is not a torch.nn.Module; write `class Points(torch.nn.Module)`"),
        ("class: Linear", "class: MSELos", f"{IN_MODULES.format(24)}.class: 'MSELos': torch.nn has no 'MSELos'; did you mean 'MSELoss'?"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_built_is_told(faults: Faults, old: str, new: str, fault: str) -> None:
    assert [each for each in faults(old, new) if "needs the argument" not in each] == [fault]


def test_an_argument_that_a_module_needs_is_told_where_its_arguments_stand(faults: Faults) -> None:
    message = "phase.line.modules.encoder.args: Linear needs the argument out_features; add it"
    assert faults(", out_features: 2", "") == [f"config.yaml:9:38: {message}"]


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("Alone", "config.yaml:8:5: phase.line.modules: are given to Alone as `modules`, which it does not take; "
         "write `def __init__(self, modules)` in own.py, or remove them"),
        ("Plain", "config.yaml:9:5: phase.line.modules: are for a Brain, and Plain is none; "
         "write `class Plain(Brain)`, or remove them"),
    ],
)  # fmt: skip
def test_modules_go_to_a_brain_that_takes_them(faults: Faults, model: str, fault: str) -> None:
    loss = "\n    loss: torch.nn.MSELoss" if model == "Plain" else ""
    assert faults('"{workspace}/own.py"', f'"{{workspace}}/own.py:{model}"{loss}') == [fault]


@pytest.mark.parametrize(
    ("model", "told"), [("Forgetful", 1), ("Middle", 1), ("Ends", 1), ("Around", 0), ("Own", 0), ("Model", 0)]
)
def test_the_constructor_of_a_brain_calls_the_one_above_it(faults: Faults, model: str, told: int) -> None:
    found = [each for each in faults("own.py", f"own.py:{model}") if "__init__" in each]
    what = "Forgetful.__init__ (own.py:27) does not call super().__init__(); call it first, with the modules"
    assert found == [f"config.yaml:7:12: phase.line.model: {what}: super().__init__({{'net': net}})"] * told


def test_modules_are_given_once(faults: Faults) -> None:
    found = faults("    modules:", "    model_args: {modules: 1}\n    modules:")
    message = "Model is given the phase's own `modules`; keep one of the two"
    assert found[0] == f"config.yaml:8:18: phase.line.model_args.modules: {message}"


def test_what_the_constructor_takes_beside_modules_is_still_asked_for(faults: Faults) -> None:
    found = faults('"{workspace}/own.py"', '"{workspace}/own.py:Own"')
    assert found == ["config.yaml:7:12: phase.line.model_args: Own needs the argument depth; add it"]
