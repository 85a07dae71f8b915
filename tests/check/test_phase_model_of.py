"""``model_of``: a phase that trains the model of another one; and two phases that only look as if they shared one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.check.checker import check, inspect

Workspace = Callable[..., Path]
Faults = Callable[..., list[str]]

CONFIG = """\
hyper_parameters: {optimizer: {class: SGD, learning_rate: 0.1}}
dataset: [{name: points, class_path: "{workspace}/own.py:Points"}]
runner: [{name: learn, class: train, epochs: 2}]
phase:
  - {name: first, model: "{workspace}/own.py", loss: torch.nn.MSELoss, dataset_name: points}
  - {name: second, dataset_name: points, {}}
"""
OWN = "import torch\nclass Points: ...\nclass Model(torch.nn.Module): ...\nclass Other(torch.nn.Module): ...\n"
PLATEAU = "{main: {class: plateau, args: {optim_type: SGD, optim_conf: {lr: 1}}}}"


@pytest.fixture
def faults(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The faults of the config with these keys in its second phase."""

    def found(keys: str, *overrides: str) -> list[str]:
        monkeypatch.chdir(workspace({"own.py": OWN, "config.yaml": CONFIG.replace("{}", keys)}))
        return [str(fault).splitlines()[0] for fault in check("config.yaml", overrides)]

    return found


def test_a_phase_with_the_model_of_another_needs_none_and_no_optimizer_of_its_own(faults: Faults) -> None:
    assert faults("model_of: first") == []
    assert faults("model_of: first, valid_dataset_name: points, metrics: {auc: {class: AUC}}") == []
    assert faults(
        "model_of: first",
        "phase.first.optim_schedulers={main: {class: constant, args: {optim_type: SGD, optim_conf: {lr: 1}}}}",
        "hyper_parameters={}",
    ) == []  # fmt: skip


AT = "config.yaml:6:52: phase.second.model_of"


@pytest.mark.parametrize(
    ("keys", "overrides", "fault"),
    [
        ("model_of: frist", [], f"{AT}: there is no phase 'frist'; did you mean 'first'?"),
        ("model_of: q", [], f"{AT}: there is no phase 'q'; known: first"),
        ("model_of: second", [], f"{AT}: 'second' is this phase itself; name another, or a `model`"),
        ("model_of: first", ["runner.learn.phases=[second]"],
         f"{AT}: phase 'first' is not run by runner 'learn'; add it to the runner's `phases`, or name one of those"),
        ("model_of: third}\n  - {name: third, model_of: first, dataset_name: points", [],
         f"{AT}: 'third' has the model of 'first'; name 'first' itself"),
        *((f"model_of: first, {key}: {value}", [],
           f"config.yaml:6:59: phase.second.{key}: would be ignored: the model is that of phase 'first'; remove it, or model_of")
          for key, value in [("model", "torch.nn.Identity"), ("model_args", "{a: 1}"), ("modules", "{a: {class: Identity}}"),
                             ("loss", "torch.nn.MSELoss"), ("optim_schedulers", PLATEAU)]),
    ],
)  # fmt: skip
def test_what_does_not_go_with_the_model_of_another_is_told(
    faults: Faults, keys: str, overrides: list[str], fault: str
) -> None:
    assert faults(keys, *overrides) == [fault]


def test_a_plateau_is_judged_by_the_validation_of_any_phase_with_its_model(faults: Faults) -> None:
    schedulers = [f"phase.first.optim_schedulers={PLATEAU}", "hyper_parameters={}"]
    assert faults("model_of: first, valid_dataset_name: points", *schedulers) == []
    (found,) = faults("model_of: first", *schedulers)
    assert found.endswith("by the numbers of the validation, and there is none; add valid_dataset_name to the phase")
    (found,) = faults("model_of: first, valid_dataset_name: points", *schedulers, "runner.learn.valid_interval=null")
    assert found.endswith("by the numbers of the validation, and there is none; give the runner a valid_interval")


def test_a_metric_to_keep_the_best_by_may_be_that_of_a_phase_with_the_model_of_another(faults: Faults) -> None:
    judged = "model_of: first, valid_dataset_name: points, metrics: {auc: {class: AUC}}"
    assert faults(judged, "runner.learn.keep_best={metric: valid_auc, mode: max}") == []
    (found,) = faults(judged, "runner.learn.keep_best={metric: valid_acu, mode: max}")
    assert found.endswith("runner.learn.keep_best.metric: nothing reports 'valid_acu'; did you mean 'valid_auc'?")


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ('model: "{workspace}/own.py", loss: torch.nn.MSELoss', True),
        ("model: own.py:Model, loss: torch.nn.MSELoss", True),
        ("model: own.py:Other, loss: torch.nn.MSELoss", False),
        ("model: torch.nn.Identity, loss: torch.nn.MSELoss", False),
        ("model_of: first", False),
    ],
)
def test_two_phases_with_one_file_get_a_note_that_each_has_its_own_model(
    faults: Faults, keys: str, noted: bool
) -> None:
    assert faults(keys) == []
    found = inspect("config.yaml").config
    assert found is not None
    what = "'own.py' is the model of phase 'first' too, and each gets one of its own; to share one, write `model_of: first`"
    assert found.notes == ([f"config.yaml:6: phase.second.model: {what}"] if noted else [])
