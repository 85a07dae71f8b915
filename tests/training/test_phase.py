"""What a network stage of one's own leaves out is named, not met as a KeyError somewhere in the loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import GeneralTrainer
from pipeline.brain.run_options import RunOptions, run_options_for
from pipeline.check.checker import check_or_raise
from pipeline.config.schema import RunnerSchema
from pipeline.context import Context
from pipeline.engine.phase import pass_loader
from pipeline.errors import ConfigError, ContextError

NETWORK = """
from pipeline import stages

class Network(stages.Network):
    def build_network(self, context):
        super().build_network(context)
        {line}
"""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("context['model']['line'].pop('brain')",
         "context['model']['line'] has no 'brain', only model, optim_schedulers, updater; the network stage has to write it"),
        ("context['model']['line'] = 3", "context['model']['line'] is a int, not a dict; write {model, brain, optim_schedulers, updater} there"),
        ("context['model']['lime'] = context['model'].pop('line')",
         "context['model'] has no entry for phase 'line'; did you mean 'lime'?; the network stage has to write it"),
        ("context['model'] = [3]", "context['model'] is a list, no dict of phases; write {phase: {model, brain, optim_schedulers, updater}} in the network stage"),
        ("context['dataset'] = {}", "context['dataset'] has no loader 'train_data'; there are none; the network stage has to write it"),
        ("context['dataset'] = 3", "context['dataset'] has no loader 'train_data'; it is a int; the network stage has to write it"),
    ],
)  # fmt: skip
def test_what_the_network_stage_leaves_out_is_named(linear: Path, line: str, message: str) -> None:
    (linear.parent / "own.py").write_text(NETWORK.format(line=line), encoding="utf-8")
    with pytest.raises(ContextError, match=re.escape(message)):
        GeneralTrainer(linear, ["runner.train_runner.network_class_path={workspace}/own.py"]).run()


CPU = torch.device("cpu")


def config_of(dataset: dict[str, Any]) -> Any:
    """A config with one dataset, ``data``, that has these keys."""
    data = {"name": "data", "class_path": lambda: [0], **dataset}
    chosen = {"dataset": [data], "phase": [PHASE], "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}}}
    return check_or_raise({"runner": [{"name": "train", "class": "train", "epochs": 1}], **chosen})


PHASE = {"name": "line", "model": lambda: torch.nn.Linear(1, 1), "loss": torch.nn.MSELoss, "dataset_name": "data"}


def runner(**keys: Any) -> RunnerSchema:
    return RunnerSchema.model_validate({"name": "train", "class": "train", **keys})


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("precision", "bf16", "precision"),
        ("eval_precision", "bf16", "eval_precision"),
        ("grad_clip", 2.5, "max_grad_norm"),
        ("accum_grad", 3, "grad_accumulation_factor"),
        ("check_gradients", True, "skip_nonfinite_grads"),
        ("nonfinite_patience", 7, "nonfinite_patience"),
        ("optimizer_step_limit", 9, "optimizer_step_limit"),
        ("debug", True, "debug"),
        ("debug_batches", 5, "debug_batches"),
        ("debug_epochs", 5, "debug_epochs"),
        ("debug_persistently", True, "debug_persistently"),
        ("compile", True, "compile"),
        ("compile_mode", "max-autotune", "compile_mode"),
        ("compile_using_fullgraph", True, "compile_using_fullgraph"),
        ("jit", True, "jit"),
    ],
)
def test_a_key_is_the_option_of_its_name_or_of_speechbrains(key: str, value: Any, option: str) -> None:
    options = run_options_for(runner(**{key: value}), CPU)
    assert getattr(options, option) == value
    others = set(RunOptions.model_fields) - {option}
    default = run_options_for(runner(), CPU)
    assert all(getattr(options, name) == getattr(default, name) for name in others)


def test_names_of_modules_are_taken_over() -> None:
    options = run_options_for(runner(compile=True, compile_module_keys=["one"], jit=True, jit_module_keys="two"), CPU)
    assert (options.modules_to("compile", ["one", "two"]), options.modules_to("jit", ["one", "two"])) == (
        ["one"],
        ["two"],
    )


def test_the_device_is_that_of_the_run_and_clipping_is_off_unless_the_config_says_so() -> None:
    options = run_options_for(runner(device="auto"), torch.device("cuda:1"))
    assert (options.device, options.max_grad_norm) == ("cuda:1", None)


def test_options_that_cannot_be_name_the_runner() -> None:
    with pytest.raises(ConfigError, match=r"^runner.train: .*precision is fp16, which needs a GPU.*; use bf16 or fp32"):
        run_options_for(runner(precision="fp16"), CPU)
    with pytest.raises(ConfigError, match=r"^runner.train: .*jit and compile are both asked for.*; keep compile, or"):
        run_options_for(runner(jit=True, compile=True), CPU)


@pytest.mark.parametrize(
    ("keys", "own_limit", "batches"),
    [
        ({}, None, [0, 1, 2, 3]),
        ({"limit_batches": 3}, None, [0, 1, 2]),
        ({"limit_batches": 1}, 3, [0, 1, 2]),
        ({}, 3, [0, 1, 2]),
        ({"debug": True}, None, [0, 1]),
        ({"debug": True}, 3, [0, 1]),
        ({"debug_batches": 1}, None, [0, 1, 2, 3]),
        ({"debug": True, "limit_batches": 1}, None, [0]),
        ({"debug": True, "debug_batches": 3, "limit_batches": 9}, None, [0, 1, 2]),
        ({"overfit_batches": 3}, None, [0, 1, 2]),
        ({"overfit_batches": 3}, 2, [0, 1]),
        ({"overfit_batches": 3, "debug": True}, None, [0, 1]),
    ],
)
def test_a_pass_has_as_many_batches_as_its_dataset_says_else_the_runner(
    keys: dict[str, Any], own_limit: int | None, batches: list[int]
) -> None:
    context = Context(dataset={"data": [0, 1, 2, 3]}, config=config_of({"limit_batches": own_limit}))
    loader = pass_loader("data", runner(**keys), context)
    assert list(loader) == batches
    assert len(loader) == len(batches)


def test_a_pass_over_a_dataset_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ContextError, match=r"context\['dataset'\] has no loader 'date'; did you mean 'data'\?"):
        pass_loader("date", runner(), Context(dataset={"data": []}, config=config_of({})))
