"""A hyper-parameter that nobody reads is a fault where the default stages run; what may be read is none."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline.check.checker import check

RUNNER = "runner.train_runner"
MODEL = """
    import torch
    class Model(torch.nn.Linear):
        def __init__(self, width=1, dropout=0.5):
            super().__init__(width, 1)
"""


def faults(config: Path, written: str, *overrides: str, **files: str) -> list[str]:
    """The faults with another line under ``hyper_parameters``, and with other files in the workspace."""
    for name, text in {"model": MODEL, **files}.items():
        (config.parent / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    config.write_text(config.read_text().replace("hyper_parameters:\n", f"hyper_parameters:\n  {written}\n"))
    given = ["phase.line.model={workspace}/model.py", "phase.line.model_args={}", *overrides]
    return [str(fault).partition("\n")[0] for fault in check(config, given)]


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("dropuot: 0.1", "did you mean 'dropout'?"),
        ("lr: 3", "did you mean 'optimizer.lr'?"),
        ("learning_rate: 3", "did you mean 'optimizer.learning_rate'?"),
        ("optimiser: {class: Adam}", "did you mean 'optimizer'?"),
        ("zz: 1", "known: dropout, width"),
    ],
)
def test_what_nobody_reads_is_a_fault_with_its_place_and_the_nearest_name(
    linear: Path, written: str, hint: str
) -> None:
    message = "nobody reads it: no model takes it, and nothing refers to it"
    name = written.partition(":")[0]
    assert faults(linear, written) == [f"{linear}:3:3: hyper_parameters.{name}: {message}; {hint}"]


PLUGIN = """
    from pipeline import hookimpl
    class Plugin:
        @hookimpl
        def after_epoch(self, context):
            {line}
"""
BRAIN = """
    from pipeline import Brain
    class Model(Brain):
        def bind(self, name, schedulers, context, patience=1):
            self.zz = context["hyper_parameters"]["z" + "z"]
        def compute_forward(self, batch, stage): return batch
        def compute_objectives(self, predictions, batch, stage): return 1
"""
ANY = "class Model(__import__('torch').nn.Linear):\n    def __init__(self, **more): super().__init__(1, 1)\n"
STAGE = "from pipeline import stages\nclass Startup(stages.Startup):\n    pass\n"
READERS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "the model": ("dropout: 0.1", [], {}),
    "a model that takes anything": ("zz: 1", [], {"model": ANY}),
    "a model that is made by a function": ("zz: 1", ["phase.line.model={workspace}/make.py:make"], {"make": "@print\ndef make(): pass"}),
    "a reference": ("zz: 8", ["dataset.train_data.args.size=${hyper_parameters.zz}"], {}),
    "a reference to a part": ("zz: {a: 8}", ["dataset.train_data.args.size=${hyper_parameters.zz.a}"], {}),
    "an alias": ("zz: &size 8", [], {}),
    "a stage": ("zz: 1", [f"{RUNNER}.startup_class_path={{workspace}}/stage.py"], {"stage": STAGE}),
    "a trainer": ("zz: 1", [f"{RUNNER}.trainer_class={{workspace}}/t.py:T"], {"t": "from pipeline import GeneralTrainer\nclass T(GeneralTrainer): pass"}),
    "a plugin": ("zz: 1", ["plugins=['{workspace}/p.py']"], {"p": PLUGIN.format(line="context['hyper_parameters']['zz']")}),
    "a plugin with a name that it computes": ("zz: 1", ["plugins=['{workspace}/p.py']"], {"p": PLUGIN.format(line="context['hyper_' + 'parameters']['z' * 2]; context['config']")}),
    "a Brain": ("zz: 1", ["phase.line.loss=null"], {"model": BRAIN}),
    "a program beside the config": ("zz: 1", [], {"prepare": "import sys\nprint(load(sys.argv[1]).zz)"}),
    "a program that reads the file": ("zz: 1", [], {"prepare": "import sys, yaml\nprint(yaml.safe_load(open(sys.argv[1])))"}),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_what_somebody_may_read_is_no_fault(linear: Path, reader: str) -> None:
    written, overrides, files = READERS[reader]
    assert faults(linear, written, *overrides, **files) == []


def test_what_a_base_says_may_be_for_another_config(linear: Path) -> None:
    faults(linear, "zz: 1")
    heir = linear.with_name("heir.yaml")
    heir.write_text(
        "_base_: config.yaml\nhyper_parameters: {dropuot: 1}\nphase: [{name: line, model: '{workspace}/model.py', model_args: {_delete_: true}}]\n"
    )
    assert [fault.address for fault in check(heir)] == ["hyper_parameters.dropuot"]


def test_a_config_from_python_may_serve_the_program_that_has_it(linear: Path) -> None:
    phase = {"name": "line", "model": "torch.nn.Linear", "model_args": {"in_features": 1, "out_features": 1},
             "loss": "torch.nn.functional.mse_loss", "dataset_name": "data"}  # fmt: skip
    dataset = {"name": "data", "class_path": "data.py:Line", "args": {"size": 8}}
    runner = {"name": "train_runner", "class": "train", "epochs": 1}
    optimizer = {"class": "SGD", "learning_rate": 0.1}
    config = {"workspace": str(linear.parent), "hyper_parameters": {"optimizer": optimizer, "zz": 1}}
    assert (
        check(
            {
                **config,
                "dataset": [dataset | {"class_path": str(linear.parent / "data.py:Line")}],
                "runner": [runner],
                "phase": [phase],
            }
        )
        == []
    )
