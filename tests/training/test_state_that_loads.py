"""Models whose tensors change shape while they train: what is saved can be loaded."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations

from pipeline import Context, GeneralTrainer, load
from pipeline.errors import CheckpointError
from tests.training.conftest import Kill, KilledError, linear_config, mse, table


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def quantized() -> nn.Module:
    """Quantization-aware training; the observer of each weight has a number for each channel."""
    stubs = quantization.QuantStub(), quantization.DeQuantStub()
    model = nn.Sequential(stubs[0], *network(), stubs[1]).train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantization.prepare_qat(model)


def orthogonal() -> nn.Module:
    model = network()
    parametrizations.orthogonal(model[0])
    return model


class Buffers(nn.Module):
    """A network and the buffers ``a`` and ``b``."""

    a: Tensor | None
    b: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.prepare()

    def prepare(self) -> None:
        """Register the buffers."""

    def observe(self, x: Tensor) -> None:
        """Change them."""

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.observe(x.detach())
        factor = 1.0
        for value in (self.a, self.b):
            factor += 0.0 if value is None or not value.numel() else float(value.float().mean())
        return self.net(x) * factor


class NoneAtFirst(Buffers):
    def prepare(self) -> None:
        self.register_buffer("a", None)
        self.register_buffer("b", None)

    def observe(self, x: Tensor) -> None:
        self.a = x.amin(0) if self.a is None else torch.minimum(self.a, x.amin(0))


class Grows(Buffers):
    def prepare(self) -> None:
        self.register_buffer("a", torch.zeros(1))
        self.register_buffer("b", None)

    def observe(self, x: Tensor) -> None:
        self.a = torch.cat([self.a, x.mean(0)])


class Vanishes(Buffers):
    def prepare(self) -> None:
        self.register_buffer("a", torch.ones(1))
        self.register_buffer("b", torch.ones(2))

    def observe(self, x: Tensor) -> None:
        self.a = None
        self.b = torch.zeros(0)


class OtherType(Buffers):
    def prepare(self) -> None:
        self.register_buffer("a", torch.zeros((), dtype=torch.long))
        self.register_buffer("b", None)

    def observe(self, x: Tensor) -> None:
        self.a = self.a + 0.5


class SameZeros(Buffers):
    """Both buffers are one tensor until the first batch."""

    def prepare(self) -> None:
        zeros = torch.zeros(3)
        self.register_buffer("a", zeros)
        self.register_buffer("b", zeros)

    def observe(self, x: Tensor) -> None:
        self.a = self.a + x.mean(0)
        self.b = self.b + 0.1


class SameMemory(SameZeros):
    """One buffer shows a part of the other until the first batch."""

    def prepare(self) -> None:
        zeros = torch.zeros(6)
        self.register_buffer("a", zeros[:3])
        self.register_buffer("b", zeros[1:])


MODELS = [
    quantized, orthogonal, NoneAtFirst, Grows, Vanishes, OtherType, SameZeros, SameMemory,
]  # fmt: skip


def data() -> Any:
    return table(10)


def config(model: Callable[[], nn.Module], **keys: Any) -> dict[str, Any]:
    """Two epochs of 3 batches with the phase ``line``, saved after each epoch."""
    made = linear_config(save_interval=1, **keys.pop("runner", {}))
    made["dataset"][0]["class_path"] = data
    made["phase"][0] |= {"model": model, **keys}
    made["plugins"].append(Kill)
    return made


def weights_of(context: Context) -> dict[str, Tensor]:
    state: dict[str, Tensor] = context["model"]["line"]["model"].state_dict()
    return state


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def _no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", -1)


def resumed(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Context:
    """Run a config, end it in the second epoch, and resume it."""
    made = {**made, "name": "resumed"}
    monkeypatch.setattr(Kill, "at", 4)
    with pytest.raises(KilledError):
        GeneralTrainer(made).run()
    monkeypatch.setattr(Kill, "at", -1)
    return GeneralTrainer(made, resume="auto").run()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Context]:
    """Run the config of a model, once for all tests."""

    @functools.cache
    def run(model: Any) -> Context:
        folder = str(tmp_path_factory.mktemp("finished"))
        return GeneralTrainer({**config(model), "output_dir": folder}).run()

    return run


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", MODELS)
def test_state_that_changes_shape_is_resumed(
    model: Any, finished: Callable[[Any], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = finished(model)
    assert_same(weights_of(resumed(config(model), monkeypatch)), weights_of(straight))


@pytest.mark.parametrize("model", MODELS)
def test_state_that_changes_shape_is_loaded(model: Any, finished: Callable[[Any], Context]) -> None:
    """``pipeline.load`` builds a new model and loads the last checkpoint."""
    context = finished(model)
    assert_same(load(context["run_dir"], "last").model.state_dict(), weights_of(context))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("model", "more"), [*((model, {}) for model in MODELS), *((model, {"init_modules": ["*"]}) for model in MODELS[:3])]
)
def test_state_that_changes_shape_gives_first_weights(
    model: Any, more: dict[str, Any], finished: Callable[[Any], Context]
) -> None:
    """A file of weights is enough. A validation may change observers, but no parameters."""
    context = finished(model)
    path = str(context["checkpointer"].newest() / "line.safetensors")
    made = config(model)
    made["runner"] = [{"name": "i", "class": "infer", "device": "cpu", "init_model_path": path, **more}]
    parameters = dict(context["model"]["line"]["model"].named_parameters())
    found = weights_of(GeneralTrainer(made).run())
    assert_same({name: found[name] for name in parameters}, parameters)


def test_weights_of_another_program_fill_observers(tmp_path: Any) -> None:
    """A plain PyTorch script saves its ``state_dict``; the observers of a new model are empty."""
    torch.manual_seed(1)
    trained = quantized()
    trained(torch.randn(8, 3))
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    made = config(quantized, runner={"init_model_path": str(tmp_path / "weights.pt"), "max_steps": 1})
    made["hyper_parameters"]["optimizer"]["lr"] = 0.0
    found = weights_of(GeneralTrainer(made).run())
    name = "1.weight_fake_quant.activation_post_process.min_val"
    torch.testing.assert_close(found[name], trained.state_dict()[name])


def test_buffers_of_another_shape_are_refused(tmp_path: Any) -> None:
    """Nothing says that the buffer of another program may replace the model's."""
    wrong = {**Grows().state_dict(), "a": torch.zeros(7)}
    torch.save(wrong, tmp_path / "weights.pt")
    made = config(Grows, runner={"init_model_path": str(tmp_path / "weights.pt")})
    with pytest.raises(CheckpointError, match=r"'a' has shape \(7,\), the model's has \(1,\)"):
        GeneralTrainer(made).run()


class Observed(nn.Module):
    """A loss with a buffer that is None at first."""

    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, predictions: Tensor, target: Tensor) -> Tensor:
        if self.training:
            now = target.detach().abs().mean()
            self.scale = now if self.scale is None else 0.9 * self.scale + 0.1 * now
        return mse(predictions, target) * (1.0 if self.scale is None else self.scale)


def test_loss_with_an_observer_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(network, loss=Observed)
    straight = GeneralTrainer(made).run()
    assert_same(weights_of(resumed(made, monkeypatch)), weights_of(straight))


class Unused(Buffers):
    def prepare(self) -> None:
        self.register_buffer("a", None)
        self.register_buffer("b", None)
        self.unused = nn.LazyLinear(2)


class Parted(nn.Module):
    """Has two parameters where a new model has one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        if self.training and self.two.weight is self.one.weight:
            self.two.weight = nn.Parameter(self.one.weight.detach().clone())
        return self.head(self.two(self.one(x)))


@pytest.mark.parametrize(
    ("model", "message"),
    [(Unused, "unused.weight.* never called"), (Parted, "one.weight, two.weight were one parameter")],
)
def test_state_that_cannot_be_loaded_is_not_saved(model: Any, message: str) -> None:
    made = config(model)
    made["hyper_parameters"] = {"optimizer": {"class": "SGD", "lr": 0.1}}
    with pytest.raises(CheckpointError, match=message):
        GeneralTrainer(made).run()
