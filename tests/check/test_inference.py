"""What a runner saves for inference: settings without effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import check

Workspace = Callable[..., Path]
Faults = Callable[..., list[str]]

CONFIG = """\
hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}
dataset: [{name: points, class_path: "{workspace}/data.py:Points"}]
phase:
  - {name: line, model: torch.nn.Linear, model_args: {in_features: 1, out_features: 1}, loss: torch.nn.MSELoss, dataset_name: points}
  - {name: own, model: "{workspace}/own.py:Mine", dataset_name: points}
  - {name: again, model_of: own, dataset_name: points}
runner:
  - name: learn
    class: train
    epochs: 2
    {}
"""
FILES = {
    "data.py": "class Points: ...\n",
    "own.py": """\
from pipeline import Brain, ExperimentBase, RunnerBase

class Mine(Brain):
    def compute_forward(self, batch, stage): ...
    def compute_objectives(self, predictions, batch, stage): ...

class Run(RunnerBase):
    def run(self, context): ...

class Experiment(ExperimentBase):
    def setup_dataloader(self): ...
    def setup_model(self): ...
    def train_batch(self): ...
    def valid(self): ...
""",
}
WANTED = "save_inference_interval: 1; save_inference_export: true"
IGNORED = "would be ignored: save_inference_interval is null; set it, or remove this"


@pytest.fixture
def faults(workspace: Workspace) -> Faults:
    """The faults of the config with these keys in its runner, without where they stand."""

    def found(keys: str, *overrides: str) -> list[str]:
        text = CONFIG.replace("{}", keys.replace("; ", "\n    "))
        path = workspace({**FILES, "config.yaml": text}) / "config.yaml"
        return [f"{each.address}: {each.message}" for each in check(path, overrides)]

    return found


@pytest.mark.parametrize(
    "keys",
    [
        "save_inference_interval: [2, 30 second]; save_inference_path: weights",
        f"{WANTED}; phases: line",
        f"{WANTED}; phases: [line]; save_inference_path: /weights",
        f'{WANTED}; save_inference_path: /weights; runner_class_path: "{{workspace}}/own.py:Run"',
        "save_checkpoint_path: elsewhere",
    ],
)
def test_keys_that_have_an_effect_are_no_fault(faults: Faults, keys: str) -> None:
    assert faults(keys) == []


@pytest.mark.parametrize("key", ["save_inference_path: weights", "save_inference_export: true"])
def test_without_an_interval_nothing_would_be_saved(faults: Faults, key: str) -> None:
    expected = [f"runner.learn.{key.partition(':')[0]}: {IGNORED}"]
    assert faults(key) == expected
    assert faults(f"{key}; save_inference_interval: []") == expected


def test_the_modules_of_a_brain_may_be_exported_too(faults: Faults) -> None:
    assert faults(WANTED) == []


@pytest.mark.parametrize(
    "key",
    ["save_inference_interval=1", "save_inference_path=p", "save_inference_export=true", "save_checkpoint_path=p"],
)
def test_an_infer_runner_saves_nothing(faults: Faults, key: str) -> None:
    runner = ["class=infer", "epochs=null", "init_model_path=/dev/null", key]
    found = faults("device: auto", *(f"runner.learn.{each}" for each in runner))
    name = f"runner.learn.{key.partition('=')[0]}"
    assert found == [f"{name}: would be ignored: an infer runner makes one pass; remove it"]


def test_an_experiment_saves_its_weights_itself(faults: Faults) -> None:
    keys = f'{WANTED}; save_checkpoint_path: p; runner_class_path: "{{workspace}}/own.py:Experiment"'
    ignored = "would be ignored: Experiment is an experiment, which saves its weights itself; remove it"
    assert faults(keys) == [
        f"runner.learn.save_inference_interval: {ignored}",
        f"runner.learn.save_inference_export: {ignored}",
    ]
