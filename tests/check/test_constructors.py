"""Constructors that do not call the one of their base: ``check`` names them before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Brain
from pipeline.check.checker import check

HEAD = """\
import torch
from pipeline import Brain, GeneralTrainer, UpdaterBase, hookimpl, stages
from pipeline.optim.optim_scheduler import OptimScheduler

"""
SCHEDULER = "phase.line.optim_schedulers={main: {class: P, args: {optim_type: SGD, optim_conf: {lr: 0.1}}}}"
BRAIN = ["phase.line.model=P", "phase.line.loss=null", "phase.line.model_args={}"]
# What is written, the overrides with P for its class path, and the address of the fault.
FORGETFUL = {
    "model": (
        "class Mine(torch.nn.Module):\n    def __init__(self): self.depth = 1\n    def forward(self, x): return x\n",
        ["phase.line.model=P", "phase.line.model_args={}"],
        "phase.line.model",
    ),
    "model_with_super_elsewhere": (
        "class Mine(torch.nn.Linear):\n"
        "    def __init__(self): self.depth = 1\n"
        "    def forward(self, x): return super().forward(x)\n",
        ["phase.line.model=P", "phase.line.model_args={}"],
        "phase.line.model",
    ),
    "loss": (
        "class Mine(torch.nn.Module):\n    def __init__(self): self.weight = 2\n    def forward(self, p, t): return p\n",
        ["phase.line.loss=P"],
        "phase.line.loss",
    ),
    "loss_without_brackets": (
        "class Mine(torch.nn.MSELoss):\n    def __init__(self):\n        super().__init__\n        self.weight = 2\n",
        ["phase.line.loss=P"],
        "phase.line.loss",
    ),
    "brain": (
        "class Mine(Brain):\n"
        "    def __init__(self): self.net = 1\n"
        "    def compute_forward(self, batch, stage): return super().compute_forward(batch, stage)\n"
        "    def compute_objectives(self, predictions, batch, stage): return predictions\n",
        BRAIN,
        "phase.line.model",
    ),
    "mixin": (
        "class Mixin:\n    def __init__(self): self.depth = 1\n"
        "class Mine(Mixin, torch.nn.Module):\n    def __init__(self): super().__init__()\n",
        ["phase.line.loss=P"],
        "phase.line.loss",
    ),
    "updater": (
        "class Mine(UpdaterBase):\n"
        "    def __init__(self, brain): self.brain = brain\n"
        "    def update(self, batch): return self.brain.fit_batch(batch)\n",
        ["phase.line.updater={class_path: P}"],
        "phase.line.updater.class_path",
    ),
    "optimizer": (
        "class Mine(torch.optim.SGD):\n    def __init__(self, params, lr): self.rate = lr\n",
        ["hyper_parameters.optimizer.class=P"],
        "hyper_parameters.optimizer.class",
    ),
    "schedule": (
        "class Mine(OptimScheduler):\n"
        "    def __init__(self, optim_type, optim_conf, model, accum_grad=1, grad_clip=None): self.rate = 1\n"
        "    def sche_init(self): ...\n"
        "    def update_lr(self, real_step, epoch_num): return 1.0\n",
        [SCHEDULER, "hyper_parameters={}"],
        "phase.line.optim_schedulers.main.class",
    ),
    "stage": (
        "class Base(stages.Runner):\n"
        "    def __init__(self, context): self.names = []\n"
        "    def run(self, context):\n"
        "        self.names.append('run')\n"
        "        super().run(context)\n"
        "class Mine(Base):\n    def __init__(self, context): self.depth = 1\n",
        ["runner.train_runner.runner_class_path=P"],
        "runner.train_runner.runner_class_path",
    ),
    "trainer": (
        "class Mine(GeneralTrainer):\n    def __init__(self, config, overrides=(), resume='never'): self.mine = 1\n",
        ["runner.train_runner.trainer_class=P"],
        "runner.train_runner.trainer_class",
    ),
    "plugin": (
        "class Base:\n"
        "    def __init__(self): self.names = []\n"
        "    @hookimpl\n"
        "    def before_epoch(self, context): self.names.append(1)\n"
        "class Mine(Base):\n    def __init__(self): self.depth = 1\n",
        ["plugins=[P]"],
        "plugins",
    ),
}


def constructor_faults(config: Path, source: str, overrides: list[str]) -> list[tuple[str, str]]:
    """Return (address, message) of the faults that speak of a constructor."""
    (config.parent / "own.py").write_text(HEAD + source, encoding="utf-8")
    path = "'{workspace}/own.py:Mine'"
    faults = check(config, [override.replace("P", path, 1) for override in overrides])
    return [(fault.address, fault.message) for fault in faults if "super().__init__" in fault.message]


@pytest.mark.parametrize("name", FORGETFUL)
def test_constructor_without_super_is_a_fault(linear: Path, name: str) -> None:
    source, overrides, address = FORGETFUL[name]
    line = 1 + (HEAD + source).splitlines().index(next(each for each in source.splitlines() if "__init__" in each))
    if name in ("stage", "plugin"):
        line = len((HEAD + source).splitlines())
    ((found, message),) = constructor_faults(linear, source, overrides)
    assert found == address
    assert f".__init__ (own.py:{line}) does not call super().__init__(); " in message


BASES = """\
def prepare(module): torch.nn.Module.__init__(module)
class Mixin:
    def __init__(self): self.depth = 1
class Prepared(torch.nn.Module):
    def __init_subclass__(cls): ...
"""
CALLING = {
    "in_a_helper": "    def __init__(self): self.prepare()\n    def prepare(self): super().__init__()\n",
    "by_the_name_of_the_base": "    def __init__(self): torch.nn.Module.__init__(self)\n",
    "under_a_condition": "    def __init__(self, deep=False):\n        if not deep: super().__init__()\n",
    "with_the_object_given_away": "    def __init__(self): prepare(self)\n",
    "with_a_class_and_an_object": "    def __init__(self): super(Mine, self).__init__()\n",
    "with_the_object_in_a_list": "    def __init__(self): prepare(*[self])\n",
    "after_that_of_a_mixin": (
        "    def __init__(self):\n        super().__init__()\n        torch.nn.Module.__init__(self)\n"
    ),
    "with_the_attributes_of_another": "    def __init__(self): self.__dict__.update(vars(torch.nn.MSELoss()))\n",
    "by_a_base_that_wraps_it": "    def __init__(self): self.depth = 1\n",
    "not_at_all": "    depth = 1\n",
}


@pytest.mark.parametrize("body", CALLING)
def test_constructor_that_may_call_super_is_accepted(linear: Path, body: str) -> None:
    special = {"by_a_base_that_wraps_it": "Prepared", "after_that_of_a_mixin": "Mixin, torch.nn.Module"}
    base = special.get(body, "torch.nn.Module")
    source = f"{BASES}class Mine({base}):\n{CALLING[body]}"
    assert constructor_faults(linear, source, ["phase.line.loss=P"]) == []


ALONE = {
    "stage": (
        "class Mine(stages.Runner):\n    def __init__(self, context): self.depth = 1\n",
        "runner.train_runner.runner_class_path=P",
    ),
    "updater_with_a_state": (
        "from pipeline.updater.updater import UpdaterState\n"
        "class Mine(UpdaterBase):\n"
        "    def __init__(self, brain): self.brain, self.state = brain, UpdaterState()\n"
        "    def update(self, batch): return self.brain.fit_batch(batch)\n",
        "phase.line.updater={class_path: P}",
    ),
    "optimizer_around_another": (
        "class Mine(torch.optim.Optimizer):\n"
        "    def __init__(self, params, lr):\n"
        "        self.base = torch.optim.SGD(params, lr)\n"
        "        self.param_groups = self.base.param_groups\n",
        "hyper_parameters.optimizer.class=P",
    ),
    "plugin_that_may_read_nothing": (
        "class Base:\n"
        "    def __init__(self): self.names = []\n"
        "    @hookimpl\n"
        "    def before_epoch(self, context):\n"
        "        if self.depth > 1: self.names.append(1)\n"
        "class Mine(Base):\n    def __init__(self): self.depth = 1\n",
        "plugins=[P]",
    ),
    "plugin_with_all_it_reads": (
        "class Base:\n    def __init__(self): self.names = []\n"
        "class Mine(Base):\n"
        "    def __init__(self): self.depth = 1\n"
        "    @hookimpl\n"
        "    def before_epoch(self, context): self.depth += 1\n",
        "plugins=[P]",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_constructor_whose_base_needs_none_is_accepted(linear: Path, name: str) -> None:
    source, override = ALONE[name]
    assert constructor_faults(linear, source, [override]) == []


class Forgetful(Brain):
    """A Brain whose constructor forgets that of its base."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(1, 1)

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        return self.net(batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> Any:
        return predictions.mean()


class Weighted(torch.nn.Module):
    """A loss whose constructor forgets that of its base."""

    def __init__(self) -> None:
        self.weight = 2


def test_class_given_from_python_is_checked_like_a_file() -> None:
    phase = {"name": "line", "model": Forgetful, "dataset_name": "points"}
    other = {"name": "other", "model": torch.nn.Linear, "loss": Weighted, "dataset_name": "points"}
    config = {
        "dataset": [{"name": "points", "class_path": list}],
        "phase": [phase, other],
        "hyper_parameters": {"optimizer": {"class": "SGD"}},
        "runner": [{"name": "learn", "class": "train", "epochs": 1}],
    }
    found = {fault.address for fault in check(config) if "does not call super().__init__()" in fault.message}
    assert found == {"phase.line.model", "phase.other.loss"}
