"""The default network stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, Context, GeneralTrainer, Stage, Updater, UpdaterBase, stages
from pipeline.brain.module_brain import ModuleBrain
from pipeline.brain.start import unregistered_modules
from pipeline.errors import ClassPathError, ConfigError, StageError

Data = Callable[[int, int], TensorDataset]


class Ranker(Brain):
    """Twice a network of two layers, with two losses."""

    def __init__(self, width: int, depth: int = 1, scale: float = 1.0) -> None:
        super().__init__({"net": nn.Linear(3, width), "head": nn.Linear(width, 1)})
        self.arguments = (width, depth, scale)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return 2 * self.modules.head(self.modules.net(batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> dict[str, Tensor]:
        error = predictions - batch[1]
        return {"loss": error.square().mean(), "absolute": error.abs().mean()}


def with_brain(config: dict[str, Any], **phase: Any) -> dict[str, Any]:
    config["phase"][0] = {"name": "line", "model": Ranker, "dataset_name": "train_data", **phase}
    return config


def test_what_a_phase_is_built_of_stands_in_the_context(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    context = GeneralTrainer(config).run()
    entry = context["model"]["line"]
    assert list(context["dataset"]) == ["train_data", "valid_data"]
    assert isinstance(entry["model"], nn.Sequential)
    assert isinstance(entry["brain"], ModuleBrain)
    assert entry["brain"].modules.model is entry["model"]
    assert isinstance(entry["updater"], Updater)
    assert list(entry["optim_schedulers"]) == ["main"]
    assert entry["optim_schedulers"]["main"].get_lr() == 0.1


def test_an_infer_runner_builds_only_the_data_that_it_evaluates_and_no_optimizer(config: dict[str, Any]) -> None:
    context = GeneralTrainer(config).run()
    assert list(context["dataset"]) == ["valid_data"]
    assert context["model"]["line"]["optim_schedulers"] == {}


def test_a_brain_is_its_own_brain_and_trains_as_a_loop_by_hand(config: dict[str, Any], data: Data) -> None:
    config["mode"] = "train"
    config["dataset"][0]["shuffle"] = False
    context = GeneralTrainer(with_brain(config, model_args={"width": 4})).run()
    torch.manual_seed(0)
    net, head = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.1)
    for x, y in 2 * list(zip(*(each.split(4) for each in data(10, 1).tensors), strict=True)):
        optimizer.zero_grad()
        (2 * head(net(x)) - y).square().mean().backward()
        optimizer.step()
    entry = context["model"]["line"]
    assert entry["model"] is entry["brain"]
    assert torch.equal(entry["brain"].modules.net.weight, net.weight)
    assert torch.equal(entry["brain"].modules.head.bias, head.bias)


def test_a_models_parameters_come_by_name_from_hyper_parameters_and_model_args_win(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    config["hyper_parameters"] |= {"width": 5, "depth": 2, "unrelated": 9}
    context = GeneralTrainer(with_brain(config, model_args={"depth": 3})).run()
    assert context["model"]["line"]["model"].arguments == (5, 3, 1.0)


def test_a_parameter_that_nothing_fills_is_refused_with_where_to_add_it(config: dict[str, Any]) -> None:
    message = "phase.line.model: Ranker: missing a required argument: 'width'; mend hyper_parameters or model_args"
    with pytest.raises(ConfigError, match=message):
        GeneralTrainer(with_brain(config)).run()


def test_what_is_no_model_is_refused_with_what_may_stand_there(config: dict[str, Any]) -> None:
    config["phase"][0]["model"] = lambda: [1, 2]
    with pytest.raises(ConfigError, match=r"phase.line.model: <lambda> made a list; name a Module or a Brain"):
        GeneralTrainer(config).run()


def test_a_build_model_of_ones_own_that_returns_nothing_is_refused_by_its_name(config: dict[str, Any]) -> None:
    class Network(stages.Network):
        def build_model(self, phase: Any, context: Context) -> Any:
            super().build_model(phase, context)

    config["runner"][0]["network_class_path"] = Network
    said = "Network.build_model: returned a NoneType; return a module or a Brain"
    with pytest.raises(StageError, match=said):
        GeneralTrainer(config).run()


def test_a_plain_module_without_a_loss_is_refused(config: dict[str, Any]) -> None:
    del config["phase"][0]["loss"]
    with pytest.raises(
        ConfigError, match=r"phase.line.loss: Sequential is a plain module and needs a loss; add `loss:`"
    ):
        GeneralTrainer(config).run()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loss", ["torch.nn.MSELoss", nn.MSELoss, "torch.nn.functional.mse_loss"])
def test_a_loss_may_be_a_function_or_a_module_class(config: dict[str, Any], loss: Any, data: Data) -> None:
    config["phase"][0]["loss"] = loss
    context = GeneralTrainer(config).run()
    x, y = data(7, 2).tensors
    expected = nn.functional.mse_loss(context["model"]["line"]["model"].eval()(x), y).item()
    assert context["metrics"]["line"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_batch_is_made_by_the_collate_fn_of_its_dataset(config: dict[str, Any]) -> None:
    def double(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), 2 * torch.stack([y for _, y in samples])

    config["dataset"][1]["collate_fn"] = double
    loader = GeneralTrainer(config).run()["dataset"]["valid_data"]
    assert torch.equal(next(iter(loader))[1], 2 * loader.dataset.tensors[1][:4])


def test_the_optimizer_may_be_a_class(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    config["hyper_parameters"]["optimizer"] = {"class": torch.optim.AdamW, "learning_rate": 0.5}
    scheduler = GeneralTrainer(config).run()["model"]["line"]["optim_schedulers"]["main"]
    assert type(scheduler.optimizer) is torch.optim.AdamW
    assert scheduler.get_lr() == 0.5


def test_a_file_that_fails_on_import_is_refused_at_the_line_of_the_config_that_names_it(
    config: dict[str, Any], workspace: Any
) -> None:
    config["workspace"] = str(
        workspace({"model.py": "import torch\nraise OSError('no table')\nclass Model(torch.nn.Module): pass\n"})
    )
    config["phase"][0]["model"] = "{workspace}/model.py"
    with pytest.raises(ClassPathError, match=r"phase.line.model: .*model.py:2: OSError: no table"):
        GeneralTrainer(config).run()


class HalfRegistered(Brain):
    def __init__(self) -> None:
        super().__init__({"net": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 1)
        self.teacher = nn.Linear(3, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"opt_class": torch.optim.SGD}, "opt_class"),
        ({"run_opts": {"precision": "bf16", "device": "cpu"}}, "precision"),
        ({"hparams": {"max_grad_norm": 1.0, "width": 3}}, "max_grad_norm"),
    ],
)
def test_what_a_brain_is_made_with_and_the_config_says_is_refused(
    config: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    class Model(Brain):
        def __init__(self) -> None:
            super().__init__({"net": nn.Linear(3, 1)}, **given)

    config["phase"][0] |= {"model": Model, "loss": None}
    with pytest.raises(
        ConfigError, match=f"phase.line.model: Model is made with {named}, which would be ignored: in a"
    ):
        GeneralTrainer(config).run()


def test_a_brain_that_keeps_a_trained_module_outside_its_modules_is_refused() -> None:
    assert unregistered_modules(HalfRegistered()) == ["head"]
    assert unregistered_modules(Brain({"net": nn.Linear(3, 3)})) == []


def test_a_run_with_such_a_brain_ends_before_it_trains(linear: Path) -> None:
    lines = ["super().__init__({'net': nn.Linear(1, 1)})", "self.head = nn.Linear(1, 1)"]
    text = "from torch import nn\nfrom pipeline import Brain\n\nclass Model(Brain):\n    def __init__(self):\n"
    rest = "    def compute_forward(self, batch, stage): ...\n    def compute_objectives(self, predictions, batch, stage): ...\n"
    (linear.parent / "net.py").write_text(text + "".join(f"        {line}\n" for line in lines) + rest)
    overrides = ["phase.line.model={workspace}/net.py", "phase.line.model_args={}", "phase.line.loss=null"]
    with pytest.raises(ConfigError, match=r"Model keeps head outside its modules, .*; register it: super"):
        GeneralTrainer(linear, overrides).run()


class Encoded(Brain):
    """Of the modules that the config names."""

    def __init__(self, modules: dict[str, nn.Module], scale: float = 1.0) -> None:
        super().__init__(modules)
        self.scale = scale

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.scale * self.modules.head(self.modules.encoder(batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return (predictions - batch[1]).square().mean()


def with_modules(config: dict[str, Any], model: Any = Encoded, head: Any = "Linear") -> dict[str, Any]:
    modules = {
        "encoder": {"class": "Linear", "args": {"in_features": 3, "out_features": 4}},
        "head": {"class": head, "args": {"in_features": 4, "out_features": 1}},
    }
    return with_brain(config, model=model, modules=modules)


def test_the_modules_of_the_config_reach_the_brain_and_train_as_in_a_loop_by_hand(
    config: dict[str, Any], data: Data
) -> None:
    config["mode"] = "train"
    config["dataset"][0]["shuffle"] = False
    config["hyper_parameters"]["scale"] = 2.0
    brain = GeneralTrainer(with_modules(config)).run()["model"]["line"]["brain"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in 2 * list(zip(*(each.split(4) for each in data(10, 1).tensors), strict=True)):
        optimizer.zero_grad()
        (2 * model(x) - y).square().mean().backward()
        optimizer.step()
    assert torch.equal(brain.modules.encoder.weight, model[0].weight)
    assert torch.equal(brain.modules.head.bias, model[1].bias)


def test_a_module_may_be_made_by_a_function(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    context = GeneralTrainer(with_modules(config, head=lambda in_features, out_features: nn.LazyLinear(1))).run()
    assert context["model"]["line"]["brain"].modules.head.weight.shape == (1, 4)


def as_one(modules: dict[str, nn.Module]) -> nn.Module:
    return nn.ModuleDict(modules)


@pytest.mark.parametrize(
    ("model", "head", "message"),
    [
        (Encoded, lambda **arguments: 5, "phase.line.modules.head: <lambda> made a int; name a Module"),
        (Ranker, "Linear", "phase.line.model: Ranker: got an unexpected keyword argument 'modules'; mend hyper_parameters or model_args"),
        (as_one, "Linear", "phase.line.model: as_one made a ModuleDict; name a Brain"),
    ],
)  # fmt: skip
def test_modules_that_do_not_fit_together_are_refused(
    config: dict[str, Any], model: Any, head: Any, message: str
) -> None:
    config["hyper_parameters"]["width"] = 4
    with pytest.raises(ConfigError, match=message):
        GeneralTrainer(with_modules(config, model, head)).run()


class Counting(UpdaterBase):
    """Trains as the default does, and keeps what it was given."""

    def __init__(self, brain: Brain, loader: Any, optim_schedulers: Any, factor: int = 1) -> None:
        super().__init__()
        self.given = (brain, loader, optim_schedulers, factor)
        self.batches = 0

    def update(self, batch: Any) -> Tensor:
        self.batches += 1
        return self.given[0].fit_batch(batch)


def test_an_updater_gets_what_its_constructor_names_and_its_arguments(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    config["phase"][0]["updater"] = {"class_path": Counting, "args": {"factor": 3}}
    context = GeneralTrainer(config).run()
    entry = context["model"]["line"]
    brain, loader, optim_schedulers, factor = entry["updater"].given
    assert brain is entry["brain"]
    assert loader is context["dataset"]["train_data"]
    assert optim_schedulers is entry["optim_schedulers"]
    assert (factor, entry["updater"].batches) == (3, 2 * 3)


class OfTheModel(Counting):
    def __init__(self, model: nn.Module, brain: Brain) -> None:
        super().__init__(brain, None, None)
        self.model = model


def test_the_model_that_an_updater_gets_is_the_object_that_the_config_names(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    config["phase"][0]["updater"] = {"class_path": OfTheModel}
    entry = GeneralTrainer(config).run()["model"]["line"]
    assert entry["updater"].model is entry["model"] is entry["brain"].modules.model


def test_an_infer_runner_builds_no_updater_of_ones_own(config: dict[str, Any]) -> None:
    config["phase"][0]["updater"] = {"class_path": Counting}
    assert type(GeneralTrainer(config).run()["model"]["line"]["updater"]) is Updater


@pytest.mark.parametrize(
    ("updater", "error", "message"),
    [
        (type("Asking", (Counting,), {"__init__": lambda self, brain, rate: None}), ConfigError,
         "phase.line.updater: Asking: missing a required argument: 'rate'; mend updater.args"),
        (nn.Linear, ClassPathError, "phase.line.updater.class_path: 'torch.nn.*Linear does not derive from pipeline.updater.updater:UpdaterBase"),
    ],
)  # fmt: skip
def test_an_updater_that_cannot_be_built_is_refused(
    config: dict[str, Any], updater: Any, error: type[Exception], message: str
) -> None:
    config["phase"][0]["updater"] = {"class_path": updater}
    with pytest.raises(error, match=message):
        GeneralTrainer(config).run()


def shared(config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """With a phase that comes first and trains the model of ``line`` on the other data."""
    config["phase"].insert(0, {"name": "again", "model_of": "line", "dataset_name": "valid_data", **keys})
    return config


def test_a_phase_with_the_model_of_another_has_the_same_objects_and_an_updater_of_its_own(
    config: dict[str, Any],
) -> None:
    config["mode"] = "train"
    context = GeneralTrainer(shared(config, updater={"class_path": Counting})).run()
    line, again = context["model"]["line"], context["model"]["again"]
    assert all(again[key] is line[key] for key in ("model", "brain", "optim_schedulers"))
    assert (type(line["updater"]), type(again["updater"])) == (Updater, Counting)
    assert again["updater"].given[1] is context["dataset"]["valid_data"]


def test_two_phases_with_one_model_train_it_in_turn_as_a_loop_by_hand(config: dict[str, Any], data: Data) -> None:
    config["mode"] = "train"
    config["dataset"][0]["shuffle"] = False
    config["phase"][0]["model"] = lambda: nn.Linear(3, 1)
    model = GeneralTrainer(shared(config)).run()["model"]["again"]["model"]
    torch.manual_seed(0)
    expected = nn.Linear(3, 1)
    for x, y in [
        part
        for _ in range(2)
        for samples in ((7, 2), (10, 1))
        for part in zip(*(each.split(4) for each in data(*samples).tensors), strict=True)
    ]:
        expected.zero_grad()
        nn.functional.mse_loss(expected(x), y).backward()
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter.sub_(0.1 * parameter.grad)
    torch.testing.assert_close(model.weight, expected.weight, rtol=1e-6, atol=1e-7)


def test_an_infer_runner_evaluates_a_phase_with_the_model_of_another(config: dict[str, Any]) -> None:
    context = GeneralTrainer(shared(config)).run()
    assert context["model"]["again"]["brain"] is context["model"]["line"]["brain"]
    assert context["metrics"]["again"] == context["metrics"]["line"]


@pytest.mark.parametrize("checks", [False, True])
def test_every_scheduler_is_told_whether_to_look_at_gradients(config: dict[str, Any], checks: bool) -> None:
    config["mode"] = "train"
    config["runner"][0]["check_gradients"] = checks
    one = {"class": "constant", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}}
    config["phase"][0]["optim_schedulers"] = {
        "a": {**one, "args": {**one["args"], "updated_modules": "model.0"}},
        "b": {**one, "args": {**one["args"], "updated_modules": "model.2"}},
    }
    del config["hyper_parameters"]["optimizer"]
    built = GeneralTrainer(config).run()["model"]["line"]["optim_schedulers"]
    assert [each.check_gradients for each in built.values()] == [checks, checks]


def test_the_short_form_is_told_too(config: dict[str, Any]) -> None:
    config["mode"] = "train"
    config["runner"][0]["check_gradients"] = True
    assert GeneralTrainer(config).run()["model"]["line"]["optim_schedulers"]["main"].check_gradients


def test_classes_of_modules_and_updaters_may_stand_in_files_beside_the_config(linear: Path) -> None:
    text = (
        "import torch\nfrom pipeline import Brain, Updater as Default\nclass Net(torch.nn.Linear): pass\n"
        "class Updater(Default): pass\nclass Model(Brain):\n"
        "    def compute_forward(self, batch, stage): return self.modules.net(batch[0])\n"
        "    def compute_objectives(self, predictions, batch, stage): return (predictions - batch[1]).square().mean()\n"
    )
    (linear.parent / "net.py").write_text(text, encoding="utf-8")
    module = "{class: '{workspace}/net.py:Net', args: {in_features: 1, out_features: 1}}"
    overrides = ["phase.line.model={workspace}/net.py", "phase.line.model_args={}", "phase.line.loss=null",
                 f"phase.line.modules={{net: {module}}}", 'phase.line.updater={class_path: "{workspace}/net.py"}']  # fmt: skip
    context = GeneralTrainer(linear, overrides).run()
    assert type(context["model"]["line"]["brain"].modules.net).__name__ == "Net"
    again = GeneralTrainer(context["run_dir"] / "config.yaml").run()
    assert type(again["model"]["line"]["updater"]).__module__.endswith(".net")
