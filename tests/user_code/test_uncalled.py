"""Methods that SpeechBrain's Brain or PaddleRec's trainer would call, and nobody does here."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import Brain, GeneralTrainer, Stage
from pipeline.check.checker import check
from pipeline.errors import ConfigError, PipelineError

BRAIN = """\
import torch
from pipeline import Brain, UpdaterBase
class Model(Brain):
    def __init__(self):
        super().__init__({"net": torch.nn.Linear(1, 1)})
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])
    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, batch[1])
"""
VALID = "    def _fit_valid(self, valid_set, epoch, enable): ...\n"
TRAIN = "    def _fit_train(self, train_set, epoch, enable): self._fit_valid(train_set, epoch, enable)\n"
UPDATER = "class Updater(UpdaterBase):\n    def __init__(self, brain):\n        super().__init__()\n        self.brain = brain\n"
TRAINER = "from pipeline import GeneralTrainer\nclass Trainer(GeneralTrainer):\n"


def messages(config: Path, text: str, override: str = "") -> list[str]:
    (config.parent / "model.py").write_text(text, encoding="utf-8")
    overrides = ["phase.line.model='{workspace}/model.py'", "phase.line.model_args={}", "phase.line.loss=null"]
    return [
        f"{fault.address}: {fault.message}"
        for fault in check(config, [*overrides, override] if override else overrides)
    ]


@pytest.mark.parametrize(("method", "remedy"), [
    ("_fit_valid", "write on_stage_start, evaluate_batch and on_stage_end"), ("_fit_train", "a loop of your own, or a fit_batch"),
    ("_save_intra_epoch_ckpt", "set ckpt_interval_steps"), ("_compile", "the options compile and jit"),
    ("_wrap_distributed", "where a launcher starts them"), ("_train_loader_specifics", "write make_dataloader"),
])  # fmt: skip
def test_a_brain_in_a_config_may_not_define_what_nobody_calls(linear: Path, method: str, remedy: str) -> None:
    (found,) = messages(linear, f"{BRAIN}    def {method}(self, *given): super().{method}(*given)\n")
    assert found.startswith(f"phase.line.model: Model.{method} (model.py:10) is called by nobody; ")
    assert remedy in found


def test_what_only_an_uncalled_method_calls_is_called_by_nobody_either(linear: Path) -> None:
    names = [found.split()[1] for found in messages(linear, BRAIN + VALID + TRAIN)]
    assert names == ["Model._fit_valid", "Model._fit_train"]


@pytest.mark.parametrize(("text", "override"), [
    (BRAIN + VALID + TRAIN + "    def fit_batch(self, batch): self._fit_train(batch, 0, True)\n", ""),
    (BRAIN + VALID + "    def on_stage_start(self, stage, epoch=None): getattr(self, '_fit_valid')((), epoch, True)\n", ""),
    (BRAIN + VALID + UPDATER + "    def update(self, batch): self.brain._fit_valid(batch, 0, True)\n",
     "phase.line.updater={class_path: '{workspace}/model.py'}"),
])  # fmt: skip
def test_a_method_that_the_users_own_code_calls_is_no_fault(linear: Path, text: str, override: str) -> None:
    assert messages(linear, text, override) == []


@pytest.mark.parametrize("method", [
    "freeze_optimizers", "zero_grad", "optimizers_step", "check_gradients", "check_loss_isfinite", "update_average",
    "print_trainable_parameters",
])  # fmt: skip
def test_what_a_brain_calls_may_be_overridden(linear: Path, method: str) -> None:
    assert messages(linear, f"{BRAIN}    def {method}(self, *given): return super().{method}(*given)\n") == []


MAKING = f"{BRAIN}    def init_optimizers(self): self.optimizer = torch.optim.SGD(self.modules.parameters(), 0.1)\n"


def test_optimizers_of_the_brain_beside_one_of_the_config_are_a_fault_where_that_stands(linear: Path) -> None:
    expected = "Model.init_optimizers makes those of phase 'line'; remove one or the other"
    assert messages(linear, MAKING) == [f"hyper_parameters.optimizer: {expected}"]
    text = linear.read_text(encoding="utf-8")
    linear.write_text(
        text.replace("hyper_parameters:\n  optimizer: {class: SGD, learning_rate: 0.1}\n", ""), encoding="utf-8"
    )
    assert messages(linear, MAKING) == []
    scheduler = "{class: constant, args: {optim_type: SGD, optim_conf: {lr: 0.1}}}"
    override = f"phase.line.optim_schedulers={{main: {scheduler}}}"
    assert messages(linear, MAKING, override) == [f"phase.line.optim_schedulers: {expected}"]
    (missing,) = messages(linear, BRAIN)
    assert missing.startswith("hyper_parameters.optimizer: training needs an optimizer")


def test_an_infer_runner_makes_no_optimizers_so_that_a_brain_may_say_how_it_makes_its_own(linear: Path) -> None:
    text = linear.read_text(encoding="utf-8").replace(
        "class: train, device: cpu, epochs: 2, print_interval: 3", "class: infer, init_model_path: ."
    )
    linear.write_text(text, encoding="utf-8")
    assert messages(linear, MAKING) == []


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("instance", "write a class for the stage"),
        ("runner", "write a class for the stage"),
        ("reload_train_context", "write a plugin with before_stage"),
        ("handle_processor_exception", "write a plugin with on_stage_error"),
        ("processor_register", "write statuses = {**GeneralTrainer.statuses, "),
        ("context_process", "write statuses = {**GeneralTrainer.statuses, "),
        ("regist_context_processor", "write statuses = {**GeneralTrainer.statuses, "),
        ("other_status_processor", "an unknown status is an error at once; write statuses = "),
    ],
)
def test_a_trainer_class_may_not_define_what_nobody_calls(linear: Path, method: str, remedy: str) -> None:
    (linear.parent / "own.py").write_text(f"{TRAINER}    def {method}(self, context): pass\n", encoding="utf-8")
    (fault,) = check(linear, ["runner.train_runner.trainer_class='{workspace}/own.py'"])
    assert fault.address == "runner.train_runner.trainer_class"
    assert fault.message.startswith(f"Trainer.{method} (own.py:3) is called by nobody; {remedy}")


@pytest.mark.parametrize(
    ("body", "called"),
    [
        (
            "super().__init__(*given)\n        self.regist_context_processor('mine', self.mine)",
            "regist_context_processor",
        ),
        ("super().__init__(*given)\n        super().processor_register()", "processor_register"),
        ("super().__init__(*given)\n        self.startup = print\n        self.startup()", ""),
        ("super().__init__(*given)\n        self.mine(None)", ""),
    ],
)
def test_a_trainer_class_that_calls_what_nobody_has_is_told_what_to_write(linear: Path, body: str, called: str) -> None:
    text = f"{TRAINER}    def mine(self, context): pass\n    def __init__(self, *given):\n        {body}\n"
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    found = [fault.message for fault in check(linear, ["runner.train_runner.trainer_class='{workspace}/own.py'"])]
    what = f"Trainer (own.py:2) uses {called}, which nobody has here; write statuses = "
    assert [message.startswith(what) for message in found] == [True] * bool(called)


class MyTrainer(GeneralTrainer):
    """Names a method for a stage, as PaddleRec's trainers do."""

    def startup(self, context: Any) -> None: ...


def test_a_trainer_class_made_in_python_says_so_at_once(linear: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^MyTrainer.startup \(test_uncalled.py:\d+\) is called by nobody; write a class for the stage",
    ):
        MyTrainer(linear)


class Fitting(Brain):
    """A line, fitted by itself."""

    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(1, 1)}, opt_class=lambda parameters: torch.optim.SGD(parameters, 0.1))

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        return predictions.mean()


class Resting(Fitting):
    """Defines what nobody calls."""

    def _compile(self) -> None: ...

    def _wrap_distributed(self) -> None: ...


def test_a_brain_alone_says_before_it_trains_what_nobody_calls() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^Resting._compile \(test_un.* is called by nobody; .*\nResting._wrap_distributed .* by nobody; several",
    ):
        Resting().fit(range(1), [torch.ones(1)])
    with pytest.raises(ConfigError, match=r"Resting._compile .* is called by nobody"):
        Resting().evaluate([torch.ones(1)])


@pytest.mark.parametrize("helper", ["def look(brain): print('none')\n", "def look(brain): brain._compile()\n"])
def test_a_script_and_the_files_beside_it_are_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_script.py").write_text(helper, encoding="utf-8")
    script = tmp_path / "script.py"
    brain = f"from beside_script import look\n{BRAIN}    def _compile(self): pass\n"
    script.write_text(f"{brain}Model().fit(range(1), [(torch.ones(1, 1), torch.ones(1, 1))])\n", encoding="utf-8")
    expected = (
        "give it opt_class"
        if "compile" in helper
        else r"^Model._compile \(script.py:11\) is called by nobody; the options compile"
    )
    with pytest.raises(PipelineError, match=expected):  # where the check lets it pass, the optimizer that is missing
        runpy.run_path(str(script))


class Calling(Fitting):
    """Calls such a method itself."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def check_loss_isfinite(self, loss: Any) -> None:
        self.called.append("check_loss_isfinite")

    def init_optimizers(self) -> None:
        super().init_optimizers()
        self.called.append("init_optimizers")

    @torch.enable_grad()
    def fit_batch(self, batch: Any) -> Any:
        self.check_loss_isfinite(batch)
        return super().fit_batch(batch)


def test_a_method_that_both_its_own_fit_batch_and_ours_call_is_called_by_both() -> None:
    brain = Calling()
    brain.fit(range(1), [torch.ones(1)])
    assert brain.called == ["init_optimizers", "check_loss_isfinite", "check_loss_isfinite"]


def test_a_class_of_a_brain_given_from_python_is_checked_like_one_in_a_file() -> None:
    phase = {"name": "line", "model": Resting, "dataset_name": "points"}
    config = {"dataset": [{"name": "points", "class_path": list}], "phase": [phase],
              "hyper_parameters": {"optimizer": {"class": "SGD"}},
              "runner": [{"name": "learn", "class": "train", "epochs": 1}]}  # fmt: skip
    assert [fault.message.split()[0] for fault in check(config)] == ["Resting._compile", "Resting._wrap_distributed"]
