"""Layers in plain Python containers, which torch neither trains nor saves, are refused before the first step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from torch import Tensor, nn, randn
from torch.optim import SGD

from pipeline import Brain, Context, GeneralTrainer, Stage, StandardUpdater
from pipeline.errors import ConfigError, ExitCode
from pipeline.experiment.experiment import ExperimentBase
from pipeline.stages.base import NetworkBase
from tests.training.conftest import linear_config, mse, table

Fill = Callable[[Any], object]


class Net(nn.Module):
    """A model to whose constructor each test adds something."""

    def __init__(self, fill: Fill) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output


def train(fill: Fill) -> Context:
    config = linear_config(epochs=1)
    config["phase"][0]["model"] = lambda: Net(fill)
    return GeneralTrainer(config).run()


def keep(value: Any) -> Fill:
    """Set the attribute ``stem``."""
    return lambda net: setattr(net, "stem", value)


def layer() -> nn.Linear:
    return nn.Linear(3, 3)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layer()]


class Table(nn.Module):
    """A module with a buffer that is saved, and nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class OfClass(nn.Module):
    blocks = (layer(), layer())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([layer()], "Net.stem is a list of 1 module; use nn.ModuleList"),
        ((layer(), nn.ReLU()), "Net.stem is a tuple of 2 modules; use nn.ModuleList"),
        ({layer()}, "Net.stem is a set of 1 module; use nn.ModuleList"),
        ({"a": layer(), "b": layer()}, "Net.stem is a dict of 2 modules; use nn.ModuleDict"),
        (OrderedDict(a=layer()), "Net.stem is an OrderedDict of 1 module; use nn.ModuleDict"),
        ([[layer()], {"deep": (layer(),)}], "Net.stem is a list of 2 modules; use nn.ModuleList"),
        ([layer().weight], "Net.stem is a list of 1 parameter; use nn.ParameterList"),
        ({"a": layer().weight}, "Net.stem is a dict of 1 parameter; use nn.ParameterDict"),
        ([nn.Sequential(nn.ReLU(), layer())], "Net.stem is a list of 1 module; use nn.ModuleList"),
        ([nn.Dropout()], "Net.stem is a list of 1 module; use nn.ModuleList"),
        ([nn.BatchNorm1d(3, affine=False)], "Net.stem is a list of 1 module; use nn.ModuleList"),
        ([Table()], "Net.stem is a list of 1 module; use nn.ModuleList"),
        (Inner(), "Inner.blocks is a list of 1 module; use nn.ModuleList"),
        ([Inner()], "Inner.blocks is a list of 1 module; use nn.ModuleList"),
        (OfClass(), "OfClass.blocks is a tuple of 2 modules; use nn.ModuleList"),
    ],
)
def test_layers_in_a_plain_container_are_an_error(value: Any, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        train(keep(value))
    assert f"phase.line.model: {fault}" in str(raised.value)


def test_each_container_is_named_once() -> None:
    def fill(net: Any) -> None:
        net.stem, net.tail = [layer()], {"a": layer()}
        net.inner = nn.ModuleList([Inner(), Inner()])

    with pytest.raises(ConfigError) as raised:
        train(fill)
    names = [line.split(" is ")[0] for line in str(raised.value).splitlines()]
    assert names == [f"phase.line.model: {name}" for name in ("Net.stem", "Net.tail", "Inner.blocks")]


def registered_elsewhere(net: Any) -> None:
    net.layers = [net.head]
    net.parameters_of_head = [*net.head.parameters()]
    net.wrapper = nn.Sequential(net.head)


def with_cycles(net: Any) -> None:
    net.own = [net]
    net.own.append(net.own)
    net.numbers = list(range(100_000))


class Loud(nn.Module):
    """A module whose property must not be read."""

    @property
    def layers(self) -> list[nn.Module]:
        raise AssertionError("read")


def frozen_teacher(net: Any) -> None:
    net.teacher = [nn.Sequential(layer(), nn.BatchNorm1d(3)).requires_grad_(False).eval()]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "fill",
    [
        registered_elsewhere,
        with_cycles,
        frozen_teacher,
        keep([nn.ReLU(), nn.Flatten(), nn.CrossEntropyLoss(randn(3))]),
        keep([randn(3)]),
        keep([Loud()]),
        keep(nn.LSTM(3, 3)),
    ],
)
def test_containers_that_lose_nothing_are_no_fault(fill: Fill) -> None:
    assert train(fill)["train_state"]["iteration"] == 3


def test_model_with_all_layers_in_a_list_is_told_so() -> None:
    def fill(net: Any) -> None:
        net.stem = [net.head]
        del net.head

    with pytest.raises(ConfigError, match=r"Net.stem is a list of 1 module; use nn.ModuleList"):
        train(fill)


class Listed(Brain):
    """A Brain that keeps some layers in a list of its own."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__({"net": nn.Linear(3, 1)}, **keywords)
        self.extra = [layer()]

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules["net"](self.extra[0](batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


def test_layers_in_a_list_of_a_brain_are_an_error() -> None:
    config = linear_config()
    config["phase"][0] |= {"model": Listed, "loss": None}
    fault = r"Listed.extra is a list of 1 module; pass it to super\(\).__init__\(\{'extra': nn.ModuleList"
    with pytest.raises(ConfigError, match=f"phase.line.model: {fault}"):
        GeneralTrainer(config).run()
    brain = Listed(opt_class=lambda parameters: SGD(parameters, 0.1))
    with pytest.raises(ConfigError, match=fault):
        brain.fit(range(1), [table(4).tensors])


class WithTable(Listed):
    """A Brain whose own list has a module that is saved with the Brain, and has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = [Table()]


def test_a_list_of_a_brain_may_have_modules_without_parameters() -> None:
    config = linear_config(epochs=1)
    config["phase"][0] |= {"model": WithTable, "loss": None}
    assert GeneralTrainer(config).run()["train_state"]["iteration"] == 3


class OwnNetwork(NetworkBase):
    """Builds its model itself."""

    writes = ("dataset", "model")

    def build_network(self, context: Context) -> None:
        context["dataset"] = {}
        context["model"] = {"line": {"model": Net(keep([layer()]))}}


def test_model_of_an_own_network_stage_is_checked_too() -> None:
    config = linear_config(network_class_path=OwnNetwork)
    with pytest.raises(ConfigError, match=r"phase.line: Net.stem is a list of 1 module"):
        GeneralTrainer(config).run()


class Experiment(ExperimentBase):
    def setup_dataloader(self) -> None:
        self.train_loader = [table(4).tensors]

    def setup_model(self) -> None:
        self.model = Net(keep([layer()]))
        self.optimizer = SGD(self.model.parameters(), 0.1)

    def train_batch(self) -> None:
        raise AssertionError("trained")

    def valid(self) -> None: ...


def test_model_of_an_experiment_is_checked(tmp_path: Path) -> None:
    training = {"max_iteration": 1, "valid_interval": None, "save_interval": None}
    args = {"device": "cpu", "nprocs": 1, "output": str(tmp_path), "checkpoint_path": None}
    experiment = Experiment({"training": training}, args)
    with pytest.raises(ConfigError, match=r"Experiment.setup_model: Net.stem is a list of 1 module"):
        experiment.setup()
    experiment.close()


def test_model_of_a_standard_updater_is_checked() -> None:
    model = Net(keep([layer()]))
    updater = StandardUpdater(model, SGD(model.parameters(), 0.1), [table(4).tensors])
    with pytest.raises(ConfigError, match=r"Net.stem is a list of 1 module; use nn.ModuleList"):
        updater.update()


def test_check_build_reports_layers_in_a_list(pipeline: Callable[..., Result], linear: Path) -> None:
    code = "from torch import nn\n\nclass TinyCNN(nn.Module):\n    def __init__(self):\n"
    body = "        super().__init__()\n        self.stem = [nn.Linear(1, 1)]\n"
    (linear.parent / "net.py").write_text(code + body)
    overrides = ["phase.line.model={workspace}/net.py:TinyCNN", "phase.line.model_args={}"]
    done = pipeline("check", "--build", linear, *overrides)
    assert done.exit_code == ExitCode.USAGE
    assert "TinyCNN.stem is a list of 1 module; use nn.ModuleList" in done.output + done.stderr
