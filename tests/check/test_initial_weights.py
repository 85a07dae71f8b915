"""Whether a runner's first weights can come from where it says, and what of them is loaded and trained."""

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
phase:
  - {name: line, model: torch.nn.Linear, model_args: {in_features: 1, out_features: 1}, loss: torch.nn.MSELoss, dataset_name: points,
     valid_dataset_name: points}
runner:
  - name: learn
    class: train
    epochs: 2
    {learn}
  - name: judge
    class: infer
    {judge}
"""
OWN = """\
from pipeline import ExperimentBase, StartupBase, stages

class Points: ...

class Mine(StartupBase):
    def startup(self, context): ...

class Derived(stages.Startup):
    def startup(self, context): super().startup(context)

class Denoise(ExperimentBase):
    def setup_model(self): ...
    def setup_dataloader(self): ...
    def train_batch(self): ...
    def valid(self): ...
"""
KEEP = "keep_best: {metric: valid_loss, mode: min}"
JUDGE = "runner.judge.init_model_path"


@pytest.fixture
def faults(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The faults of the config with these keys in its two runners."""

    def found(judge: str, *overrides: str, learn: str = "device: auto") -> list[str]:
        keys = {"{judge}": judge, "{learn}": learn}
        text = CONFIG
        for name, given in keys.items():
            text = text.replace(name, given.replace("; ", "\n    "))
        monkeypatch.chdir(workspace({"own.py": OWN, "config.yaml": text}))
        return [str(fault).splitlines()[0] for fault in check("config.yaml", overrides)]

    return found


@pytest.mark.parametrize(
    ("judge", "learn"),
    [
        ("device: auto", "device: auto"),
        ("init_model_path: last", "device: auto"),
        ("init_model_path: best", KEEP),
        ("init_model_path: own.py; init_modules: encoder", "device: auto"),
        ('init_model_path: "{run_dir}/learn"', "device: auto"),
        ("device: auto", "init_model_path: own.py; init_modules: [encoder]; freeze: encoder"),
        ("device: auto", 'freeze: [encoder, "*.bias"]'),
        ("init_model_path: best; init_modules: a; startup_class_path: '{workspace}/own.py:Mine'", "device: auto"),
        ("init_modules: null; freeze: null", "init_modules: null; freeze: null"),
        ("init_model_path: {run: ., which: 12, runner: learn}", "init_model_path: {run: .}; init_modules: encoder"),
    ],
)
def test_weights_that_can_be_there_are_no_fault(faults: Faults, judge: str, learn: str) -> None:
    assert faults(judge, learn=learn) == []


NO_BEST = f"{JUDGE}: is 'best', and learn keeps no best checkpoint; add `{KEEP}` to learn, or name `last`"


@pytest.mark.parametrize(
    ("judge", "learn", "fault"),
    [
        ("init_model_path: best", "device: auto", f"config.yaml:13:22: {NO_BEST}"),
        ("startup_class_path: '{workspace}/own.py:Derived'; init_model_path: best", "device: auto",
         f"config.yaml:14:22: {NO_BEST}"),
        ("init_model_path: bets", "device: auto",
         f"config.yaml:13:22: {JUDGE}: no such checkpoint: {{here}}/bets; check the path"),
        ("init_model_path: {run: runs/x, which: best}", "device: auto",
         f"config.yaml:13:22: {JUDGE}: no such run directory: {{here}}/runs/x; check the path"),
        ("init_model_path: {run: ., which: bets}", "device: auto",
         f"config.yaml:13:38: {JUDGE}.which: is 'bets'; did you mean 'best'?"),
        ("init_model_path: {run: ., whcih: best}", "device: auto",
         f"config.yaml:13:31: {JUDGE}.whcih: unknown key; did you mean 'which'?"),
        ("init_model_path: {which: best}", "device: auto",
         f"config.yaml:13:22: {JUDGE}.run: required key is missing; add `run:`"),
        ("init_model_path: {run: 3}", "device: auto",
         f"config.yaml:13:28: {JUDGE}.run: is 3, a whole number; write a string"),
        ("init_model_path: 3", "device: auto", f"config.yaml:13:22: {JUDGE}: is 3, a whole number; write a string"),
        (f"init_model_path: {'a' * 300}", "device: auto",
         f"config.yaml:13:22: {JUDGE}: no such checkpoint: {{here}}/{'a' * 300}; check the path"),
        ("init_modules: encoder", "device: auto",
         "config.yaml:13:19: runner.judge.init_modules: would be ignored: there is no init_model_path; add it, or remove this"),
        ("freeze: encoder", "device: auto",
         "config.yaml:13:13: runner.judge.freeze: would be ignored: an infer runner makes one pass; remove it"),
        ("device: auto", "init_model_path: last",
         ("config.yaml:10:22: runner.learn.init_model_path: is 'last', and no train runner comes before it in `mode`; "
          "add one, or name a checkpoint")),
        ("device: auto", f"{KEEP}; init_model_path: best",
         ("config.yaml:11:22: runner.learn.init_model_path: is 'best', and no train runner comes before it in `mode`; "
          "add one, or name a checkpoint")),
        ("device: auto", "init_modules: encoder",
         "config.yaml:10:19: runner.learn.init_modules: would be ignored: there is no init_model_path; add it, or remove this"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_there_are_named_with_the_remedy(
    faults: Faults, judge: str, learn: str, fault: str
) -> None:
    found = faults(judge, learn=learn)
    assert found == [fault.replace("{here}", str(Path.cwd()))]


def test_the_order_of_mode_says_which_runner_comes_before(faults: Faults) -> None:
    [fault] = faults("init_model_path: last", "mode=[judge, learn]")
    assert fault.endswith("is 'last', and no train runner comes before it in `mode`; add one, or name a checkpoint")


def test_the_nearest_train_runner_has_to_keep_the_best(faults: Faults) -> None:
    other = "runner=[{name: a, class: train, epochs: 1, keep_best: {metric: valid_loss, mode: min}}, {name: b, class: train, epochs: 1}, "
    [fault] = faults("device: auto", f"{other}{{name: c, class: infer, init_model_path: best}}]")
    assert "runner.c.init_model_path: is 'best', and b keeps no best checkpoint" in fault


@pytest.mark.parametrize(
    ("keys", "address", "message"),
    [
        ("freeze: a", "freeze", "would be ignored: Denoise is an experiment, which loads all weights itself; remove it"),
        ("init_model_path: own.py; init_modules: a", "init_modules",
         "would be ignored: Denoise is an experiment, which loads all weights itself; remove it"),
        ("init_model_path: {run: .}", "init_model_path", "is of another run, and Denoise is an experiment; name a checkpoint or a file"),
        ("init_model_path: last", "init_model_path", "is 'last', and Denoise is an experiment; name a checkpoint or a file"),
    ],
)  # fmt: skip
def test_an_experiment_takes_all_weights_of_one_checkpoint_or_file(
    faults: Faults, keys: str, address: str, message: str
) -> None:
    learn = f"{keys}; runner_class_path: '{{workspace}}/own.py:Denoise'"
    [fault] = faults("device: auto", "mode=learn", "phase=[]", "dataset=[]", learn=learn)
    assert fault.partition(": ")[2] == f"runner.learn.{address}: {message}"


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ("rename: {module.: ''}", "rename: would be ignored: there is no init_model_path; add it, or remove this"),
        ("init_model_path: last; rename: {module.: 3}", "rename.module.: is 3, a whole number; write a string"),
    ],
)
def test_other_names_are_for_weights_that_are_loaded(faults: Faults, judge: str, message: str) -> None:
    assert [fault.partition("judge.")[2] for fault in faults(judge)] == [message]
