"""The modes of modules: what user code sets stays, as in a loop written by hand, and a resumed run has it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipeline import Brain, Checkpointer, Context, GeneralTrainer, Stage, hookimpl, load, stages
from pipeline.errors import ConfigError
from tests.training.conftest import Kill, KilledError, linear_config, mse, table

Options = dict[str, Any]
Modes = Callable[[nn.Sequential, int], object]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def dropout_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))


def config(model: Any = net, *plugins: Any, **runner: Any) -> Options:
    """Two epochs of 3 batches."""
    chosen = linear_config(**runner)
    chosen["name"] = "modes"
    chosen["plugins"] += plugins
    chosen["phase"][0] |= {"model": model}
    return chosen


def with_validation(chosen: Options) -> Options:
    """The same with a validation in the middle of each epoch and at its end."""
    chosen["dataset"].append({"name": "valid", "class_path": lambda: table(8, seed=2), "batch_size": 4})
    chosen["phase"][0]["valid_dataset_name"] = "valid"
    chosen["runner"][0]["valid_interval"] = [2, "1 epoch"]
    return chosen


def by_hand(set_modes: Modes, make: Callable[[], nn.Sequential] = net, epochs: int = 2) -> dict[str, Tensor]:
    """The state that a plain loop ends with; ``set_modes(model, epoch)`` comes before each epoch."""
    model, loader = make(), DataLoader(table(10), batch_size=4)
    optimizer = SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        model.train()
        set_modes(model, epoch)
        for x, y in loader:
            optimizer.zero_grad()
            backward(mse(model(x), y))
            optimizer.step()
    return model.state_dict()


def state_of(context: Context, phase: str = "line") -> dict[str, Tensor]:
    state: dict[str, Tensor] = context["model"][phase]["model"].state_dict()
    return state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class FreezingStartup(stages.Startup):
    """Puts the BatchNorm into evaluation mode."""

    def startup(self, context: Context) -> None:
        super().startup(context)
        context["model"]["line"]["model"][1].eval()


class FreezingPlugin:
    """The same as a plugin."""

    @hookimpl
    def after_stage(self, name: str, context: Context) -> None:
        if name == "network":
            context["model"]["line"]["model"][1].eval()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", ["startup", "plugin"])
def test_batchnorm_in_eval_mode_keeps_its_statistics(how: str, log_lines: list[str]) -> None:
    chosen = with_validation(config())
    if how == "startup":
        chosen["runner"][0]["startup_class_path"] = FreezingStartup
    else:
        chosen["plugins"].append(FreezingPlugin)
    state = state_of(GeneralTrainer(chosen).run())
    assert same(state, by_hand(lambda model, _: model[1].eval()))
    assert torch.equal(state["1.running_mean"], torch.zeros(4))
    logged = [line for line in log_lines if "training with" in line]
    assert logged == ["INFO phase.line: training with 1 of 4 modules in evaluation mode: 1\n"]


class Leaving:
    """A plugin that leaves the model in evaluation mode."""

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        context["model"]["line"]["model"].eval()


def test_model_left_in_eval_mode_is_trained_with_dropout(log_lines: list[str]) -> None:
    state = state_of(GeneralTrainer(config(dropout_net, Leaving)).run())
    assert same(state, by_hand(lambda *_: None, dropout_net))
    warnings = [line for line in log_lines if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "phase.line: every module is in evaluation mode" in warnings[0]


def test_model_that_a_factory_returns_in_eval_mode_is_trained(log_lines: list[str]) -> None:
    """As ``from_pretrained`` of Hugging Face does."""
    state = state_of(GeneralTrainer(config(lambda: dropout_net().eval())).run())
    assert same(state, by_hand(lambda *_: None, dropout_net))
    assert not any("evaluation mode" in line for line in log_lines)


class Halves(Brain):
    """A Brain of an encoder that is never trained, and a decoder."""

    def __init__(self, **keywords: Any) -> None:
        whole = net()
        self.encoder, self.decoder = whole[:2], whole[2:]
        super().__init__({"encoder": self.encoder, "decoder": self.decoder}, **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.decoder(self.encoder(batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


class EncoderInEvalMode:
    @hookimpl
    def before_pass(self, context: Context, phase: str) -> None:
        context["model"][phase]["brain"].modules["encoder"].eval()


def test_brain_keeps_one_of_its_modules_in_eval_mode(log_lines: list[str]) -> None:
    chosen = with_validation(config(Halves, EncoderInEvalMode))
    chosen["phase"][0]["loss"] = None
    brain = GeneralTrainer(chosen).run()["model"]["line"]["brain"]
    expected = by_hand(lambda model, _: model[:2].eval())
    state = brain.modules.state_dict()
    assert torch.equal(state["encoder.1.running_mean"], expected["1.running_mean"])
    assert torch.equal(state["decoder.2.weight"], expected["2.weight"])
    what = "training with 3 of 5 modules in evaluation mode: encoder, encoder.0, encoder.1\n"
    assert any(line.endswith(what) for line in log_lines)


def test_phases_that_share_a_model_keep_its_modes() -> None:
    chosen = config(net, FreezingPlugin)
    other = {"name": "again", "model_of": "line", "loss": None, "dataset_name": "data"}
    chosen["phase"].append({key: value for key, value in other.items() if value})
    state = state_of(GeneralTrainer(chosen).run())
    assert same(state, by_hand(lambda model, _: model[1].eval(), epochs=4))


class Statistics(Halves):
    """A Brain that freezes the statistics of its encoder at the start of each training pass."""

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        if stage is Stage.TRAIN:
            self.encoder.eval()


@pytest.mark.parametrize("brain_class", [Halves, Statistics])
def test_fit_calls_train_before_each_epoch(brain_class: type[Halves]) -> None:
    """As SpeechBrain's does; what ``on_stage_start`` sets stays."""
    brain = brain_class(opt_class=lambda parameters: SGD(parameters, 0.1))
    brain.modules.eval()
    brain.fit(range(2), DataLoader(table(10), batch_size=4), DataLoader(table(8), batch_size=4))
    frozen = brain_class is Statistics
    expected = by_hand(lambda model, _: model[:2].eval() if frozen else None)
    state = brain.modules.state_dict()
    assert torch.equal(state["encoder.1.running_mean"], expected["1.running_mean"])
    assert torch.equal(state["decoder.2.weight"], expected["2.weight"])


class Sampling:
    """A plugin that looks at the model in evaluation mode after each epoch."""

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        model = context["model"]["line"]["model"]
        model.eval()
        model.train()


def frozen_by_hand(model: nn.Sequential, epoch: int) -> None:
    model[:2].requires_grad_(False)
    model[1].eval()


def test_freeze_with_statistics_keeps_parameters_and_statistics(log_lines: list[str]) -> None:
    frozen = {"modules": ["0", "1"], "statistics": True}
    chosen = with_validation(config(net, Sampling, freeze=frozen))
    assert same(state_of(GeneralTrainer(chosen).run()), by_hand(frozen_by_hand))
    assert "INFO running statistics stay as they are: 1\n" in log_lines


def test_freeze_without_statistics_lets_them_change() -> None:
    chosen = config(net, freeze={"modules": ["0", "1"], "statistics": False})
    expected = by_hand(lambda model, _: model[:2].requires_grad_(False))
    assert same(state_of(GeneralTrainer(chosen).run()), expected)


class Unfreeze:
    """A plugin that has everything trained from the second epoch on."""

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        if context["current_epoch"] == 1:
            context["model"]["line"]["model"].requires_grad_(True).train()


def test_plugin_that_unfreezes_has_statistics_trained_too() -> None:
    chosen = config(net, Unfreeze, freeze={"modules": ["0", "1"], "statistics": True})

    def set_modes(model: nn.Sequential, epoch: int) -> None:
        model[:2].requires_grad_(epoch == 1)
        model[1].train(epoch == 1)

    assert same(state_of(GeneralTrainer(chosen).run()), by_hand(set_modes))


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ({"modules": "0", "statistics": True}, r"freeze.statistics: .* no layer in 0 has .*known: 1"),
        ({"modules": ["1", "5"], "statistics": True}, "freeze: '5' names no parameter"),
        ({"modules": ["1"], "statistic": True}, "freeze.statistic: unknown key; did you mean 'statistics'"),
        ({"statistics": True}, "freeze.modules: required key is missing"),
        ({"modules": ["1"], "statistics": "yes"}, "freeze.statistics: is 'yes', a string; write true or false"),
    ],
)
def test_freeze_that_names_nothing_is_an_error(freeze: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GeneralTrainer(config(net, freeze=freeze)).run()


class Changing:
    """A plugin that sets modes in the middle of a training: what was frozen is trained, and something else is not."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        model, iteration = context["model"]["line"]["model"], context["train_state"]["iteration"]
        if iteration == 2:
            model[1].train()
            model[3].eval()
        elif iteration == 5:
            model[3].train()
            model[1].eval()


def changing_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1)
    return nn.Sequential(*layers)


class OwnLoop(stages.Runner):
    """A loop that begins with the modes of its own."""

    def run(self, context: Context) -> None:
        line = context["model"]["line"]
        line.model[1].eval()
        for epoch in context.epochs():
            if epoch == 0:
                line.model[3].eval()
            for batch in context.batches(line):
                line.brain.fit_batch(batch)


class Setting(Brain):
    """A Brain that sets modes when a training pass begins."""

    def __init__(self, **keywords: Any) -> None:
        self.net = changing_net()
        super().__init__({"net": self.net}, **keywords)

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        if stage is Stage.TRAIN:
            self.net[1].eval()

    def fit_batch(self, batch: Any) -> Tensor:
        loss = super().fit_batch(batch)
        if self.step == 2:
            self.net[1].train()
        return loss

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("who", "at"),
    [
        ("plugin", 4),
        ("loop", 4),
        ("brain", 8),
        pytest.param("plugin", 6, marks=pytest.mark.slow),
        pytest.param("brain", 2, marks=pytest.mark.slow),
    ],
)
def test_modes_of_a_resumed_run_equal_those_of_an_unbroken_one(
    who: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(changing_net, Kill, epochs=3, save_interval=1)
    if who == "plugin":
        chosen["plugins"].append(Changing)
        chosen["runner"][0]["startup_class_path"] = FreezingStartup
    elif who == "loop":
        chosen["runner"][0]["runner_class_path"] = OwnLoop
    else:
        chosen["phase"][0] |= {"model": Setting, "loss": None}
    monkeypatch.setattr(Kill, "at", -1)
    unbroken = GeneralTrainer(chosen).run()["model"]["line"]["brain"].modules
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", -1)
    resumed = GeneralTrainer(chosen, resume="auto").run()["model"]["line"]["brain"].modules
    assert same(resumed.state_dict(), unbroken.state_dict())
    assert [part.training for part in resumed.modules()] == [part.training for part in unbroken.modules()]


def fit(folder: Path, kill_at: int = -1) -> dict[str, Tensor]:
    """Two epochs of 4 batches, saved after each; ``kill_at``: the update before which it ends."""

    class Killed(Setting):
        def fit_batch(self, batch: Any) -> Tensor:
            if self.optimizer_step == kill_at:
                raise KilledError
            return super().fit_batch(batch)

    saver = Checkpointer(folder)
    brain = Killed(
        opt_class=lambda parameters: SGD(parameters, 0.1),
        run_opts={"ckpt_interval_steps": 1},
        checkpointer=saver,
    )
    brain.fit(range(2), list(DataLoader(table(16), batch_size=4)))
    return brain.modules.state_dict()


def test_fit_goes_on_with_the_modes_of_its_checkpoint(tmp_path: Path) -> None:
    unbroken = fit(tmp_path / "unbroken")
    with pytest.raises(KilledError):
        fit(tmp_path / "broken", kill_at=3)
    assert same(fit(tmp_path / "broken"), unbroken)


def test_modes_that_config_changes_on_resume_are_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", 3)
    with pytest.raises(KilledError):
        GeneralTrainer(config(net, Kill)).run()
    monkeypatch.setattr(Kill, "at", -1)
    chosen = config(net, Kill, freeze={"modules": ["0", "1"], "statistics": True})
    state = state_of(GeneralTrainer(chosen, resume="auto").run())

    def set_modes(model: nn.Sequential, epoch: int) -> None:
        model[:2].requires_grad_(epoch == 0)
        model[1].train(epoch == 0)

    assert same(state, by_hand(set_modes))


class Merging(nn.Linear):
    """A layer that doubles its output in training alone, which ``train`` and ``eval`` decide, as those of LoRA do."""

    factor = 2.0

    def train(self, mode: bool = True) -> Merging:
        self.factor = 2.0 if mode else 1.0
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def test_train_of_a_module_is_called_after_a_validation() -> None:
    def merging() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Merging(3, 1))

    state = state_of(GeneralTrainer(with_validation(config(merging))).run())
    assert same(state, by_hand(lambda *_: None, merging))


class SavingInValidation(Halves):
    """A Brain that asks for a checkpoint while it is validated."""

    context: Context

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage is Stage.VALID:
            self.context.save()


class Introducing:
    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        SavingInValidation.context = context


def test_checkpoint_saved_in_a_validation_has_the_modes_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = with_validation(config(SavingInValidation, Introducing, EncoderInEvalMode, Kill, save_interval=None))
    chosen["phase"][0]["loss"] = None
    monkeypatch.setattr(Kill, "at", 3)
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", -1)
    modules = GeneralTrainer(chosen, resume="auto").run()["model"]["line"]["brain"].modules
    expected = by_hand(lambda model, _: model[:2].eval())
    assert torch.equal(modules.state_dict()["decoder.2.weight"], expected["2.weight"])
    assert modules.decoder.training


def test_loaded_model_is_in_evaluation_mode() -> None:
    context = GeneralTrainer(config(net, FreezingPlugin)).run()
    model = load(context["run_dir"], "last").model
    assert not any(part.training for part in model.modules())
