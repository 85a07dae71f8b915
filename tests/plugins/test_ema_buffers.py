"""``ema``: which tensors are averaged, and of which the averages have the newest value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pipeline import Context, GeneralTrainer, hookimpl
from pipeline.errors import ConfigError
from tests.training.conftest import Kill, KilledError, linear_config, mse, table

Weights = dict[str, Tensor]
DECAY = 0.9


def config(model: Any, *plugins: Any, **ema: Any) -> dict[str, Any]:
    """Two epochs of 3 batches of the phase ``line``, saved after each batch and validated."""
    inference = {"save_inference_interval": 1, "save_interval": "1 iteration"}
    made = linear_config(**inference)
    made["phase"][0] |= {"model": model, "valid_dataset_name": "valid"}
    made["dataset"].append({"name": "valid", "class_path": lambda: table(10, seed=2), "batch_size": 10})
    made["plugins"] += [{"ema": {"decay": DECAY, **ema}}, *plugins]
    return made


def exported(context: Context, iteration: int) -> Weights:
    name = f"line-{iteration:012d}.safetensors"
    return load_file(context["run_dir"] / "train" / "inference" / name)


def saved(context: Context) -> Weights:
    return load_file(context["checkpointer"].newest() / "line.safetensors")


def plain_loop(model: Any) -> tuple[list[Weights], nn.Module]:
    """Return the state after each update of a plain loop, and its model."""
    torch.manual_seed(0)
    network = model()
    x, y = table(10).tensors
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    states = []
    for _ in range(2):
        for indices in torch.arange(10).split(4):
            optimizer.zero_grad()
            mse(network(x[indices]), y[indices]).backward()
            optimizer.step()
            state = network.state_dict()
            states.append({name: value.clone() for name, value in state.items()})
    return states, network


def average(states: list[Weights], name: str) -> Tensor:
    """Return the exponential average of a tensor over the states."""
    value = states[0][name]
    for state in states[1:]:
        value = DECAY * value + (1 - DECAY) * state[name]
    return value


def new_spectral_norm() -> nn.Module:
    layer = parametrizations.spectral_norm(nn.Linear(3, 4))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 1))


def old_spectral_norm() -> nn.Module:
    layer = nn.utils.spectral_norm(nn.Linear(3, 4))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 1))


def largest_singular_value(model: nn.Module) -> float:
    """Return that of the first layer, as the layer computes in evaluation mode."""
    layer = model.eval()[0]
    with torch.no_grad():
        matrix = layer(torch.eye(3)) - layer.bias
    return float(torch.linalg.svdvals(matrix)[0])


class Validated:
    """Notes the norm of the first layer in each validation."""

    norms: list[float]

    @hookimpl
    def after_validation(self, context: Context) -> None:
        self.norms.append(largest_singular_value(context["model"]["line"]["model"]))


@pytest.mark.parametrize("model", [new_spectral_norm, old_spectral_norm])
def test_spectral_norm_of_the_averages_is_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Validated, "norms", [], raising=False)
    made = config(model, Validated)
    # Averages of the vectors u and v are far from unit vectors here: the norm is 1.6 with them.
    made["hyper_parameters"]["optimizer"]["lr"] = 0.3
    made["runner"][0]["epochs"] = 6
    context = GeneralTrainer(made).run()
    loaded = []
    for weights in (saved(context), exported(context, 18)):
        network = model()
        network.load_state_dict(weights)
        loaded.append(largest_singular_value(network))
    assert [Validated.norms[-1], *loaded] == pytest.approx([1.0] * 3, abs=0.05)


class Codebook(nn.Module):
    """A codebook as that of a VQ-VAE, a BatchNorm, and a count."""

    codes: Tensor
    center: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.line = nn.Linear(3, 1)
        self.register_buffer("codes", torch.zeros(2, 3))
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.codes[int(self.count) % 2] = x.detach()[0]
            self.center = x.detach().mean(0)
            self.count += 1
        return self.line(self.norm(x) + self.center)


AVERAGED = {"line.weight", "line.bias", "norm.weight", "norm.bias"}
STATISTICS = {"norm.running_mean", "norm.running_var"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("ema", "expected"),
    [
        ({}, AVERAGED | STATISTICS),
        ({"use_buffers": False}, AVERAGED),
        ({"include": ["cent*"]}, AVERAGED | STATISTICS | {"center"}),
        ({"include": ["c*"], "exclude": ["codes"]}, AVERAGED | STATISTICS | {"center"}),
        ({"exclude": ["norm"]}, {"line.weight", "line.bias"}),
        ({"use_buffers": False, "include": ["*.running_mean"]}, AVERAGED | {"norm.running_mean"}),
    ],
)
def test_parameters_and_statistics_are_averaged(ema: dict[str, Any], expected: set[str]) -> None:
    """Of everything else the averages have the newest value."""
    states, _ = plain_loop(Codebook)
    found = saved(GeneralTrainer(config(Codebook, **ema)).run())
    for name, value in found.items():
        right = average(states, name) if name in expected else states[-1][name]
        torch.testing.assert_close(value, right)
    changed = [name for name in expected if not torch.equal(found[name], states[-1][name])]
    assert set(changed) == expected


class Tied(Codebook):
    """The codebook has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.line.register_buffer("table", self.codes)


def test_exclude_may_name_a_tied_tensor_by_any_name() -> None:
    states, _ = plain_loop(Tied)
    ema = {"include": ["codes"], "exclude": ["line.table"]}
    found = saved(GeneralTrainer(config(Tied, **ema)).run())
    assert torch.equal(found["codes"], states[-1]["codes"])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", [new_spectral_norm, Codebook])
@pytest.mark.parametrize("at", [1, 4])
def test_run_with_newest_buffers_is_resumed(model: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"exclude": ["line.bias"]} if model is Codebook else {}
    made = {**config(model, Kill, **more), "name": "resumed"}
    monkeypatch.setattr(Kill, "at", -1)
    straight = GeneralTrainer({**made, "output_dir": "straight"}).run()
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        GeneralTrainer(made).run()
    monkeypatch.setattr(Kill, "at", -1)
    resumed = GeneralTrainer(made, resume="auto").run()
    for name in ("line", "training"):
        files = [run["checkpointer"].newest() / f"{name}.safetensors" for run in (straight, resumed)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert resumed["metrics"] == straight["metrics"]


@pytest.mark.parametrize(
    ("ema", "message"),
    [
        ({"include": ["cods"]}, "include: 'cods' names no buffer.*did you mean 'codes'"),
        ({"include": ["count"]}, "include: 'count' names no buffer of floating point"),
        ({"include": ["norm"]}, "include: 'norm' names no buffer .* that is not averaged anyway"),
        ({"exclude": ["codes"]}, "exclude: 'codes' names nothing that is averaged"),
        ({"exclude": "codes"}, "exclude is 'codes'; write a list"),
    ],
)
def test_pattern_without_effect_is_an_error(ema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GeneralTrainer(config(Codebook, **ema)).run()


class Growing(Codebook):
    def forward(self, x: Tensor) -> Any:
        self.center = torch.zeros(3)
        result = super().forward(x)
        self.codes = torch.zeros(len(self.codes) + self.training, 3)
        return result


def test_average_of_a_growing_buffer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="have other shapes than at first"):
        GeneralTrainer(config(Growing, include=["codes"])).run()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(1))


class Recorded:
    """Notes the training weights after each update."""

    states: list[Weights]

    @hookimpl
    def after_batch(self, context: Context) -> None:
        state = context["model"]["line"]["model"].state_dict()
        self.states.append({name: value.clone() for name, value in state.items()})


def test_lazy_modules_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "states", [], raising=False)
    found = saved(GeneralTrainer(config(lazy, Recorded)).run())
    for name in ("0.weight", "1.running_mean", "2.bias"):
        torch.testing.assert_close(found[name], average(Recorded.states, name))
