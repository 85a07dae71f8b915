"""Tensors with several names: what their names in a file have to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Checkpointer, GeneralTrainer, load
from pipeline.errors import CheckpointError, ConfigError
from tests.training.conftest import Kill, KilledError, linear_config, table

Weights = dict[str, Tensor]


class TiedParameter(nn.Module):
    """A parameter with the names ``a.weight`` and ``b.weight``."""

    order: tuple[str, ...] = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        for name in self.order:
            self.add_module(name, nn.Linear(3, 3, bias=False))
        first, *others = self.order
        for name in others:
            self.get_submodule(name).weight = self.get_submodule(first).weight
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.get_submodule(name)(x)
        return self.head(x)


class ThreeNames(TiedParameter):
    order = ("a", "b", "c")


class OtherOrder(TiedParameter):
    order = ("b", "a")


class TiedModule(TiedParameter):
    """A module with the names ``a`` and ``b``."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self.a


class TiedMemory(TiedParameter):
    """Two parameters that show the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = nn.Parameter(self.a.weight.data)


class TiedBuffer(TiedParameter):
    """A buffer with the names ``a.weight`` and ``b.weight``."""

    def __init__(self) -> None:
        super().__init__()
        del self.a.weight, self.b.weight
        shared = torch.eye(3)
        self.a.register_buffer("weight", shared)
        self.b.register_buffer("weight", shared)


TIED = [TiedParameter, TiedModule, TiedMemory, TiedBuffer]


def config(model: Callable[[], nn.Module], **runner: Any) -> dict[str, Any]:
    """Two epochs of 3 batches with the phase ``line``."""
    made = linear_config(**runner)
    made["phase"][0]["model"] = model
    return made


def start(weights: Weights, model: Callable[[], nn.Module], **runner: Any) -> Weights:
    """Return the weights that a training without updates has after it loads a file."""
    save_file(weights, "weights.safetensors")
    made = config(model, init_model_path=str(Path("weights.safetensors").resolve()), **runner)
    made["hyper_parameters"]["optimizer"]["lr"] = 0.0
    state: Weights = GeneralTrainer(made).run()["model"]["line"]["model"].state_dict()
    return state


def head() -> Weights:
    return {"head.weight": torch.ones(1, 3), "head.bias": torch.ones(1)}


def matrix(fill: float = 2.0) -> Tensor:
    return torch.full((3, 3), fill)


@pytest.mark.parametrize("model", TIED)
def test_tied_names_with_different_tensors_are_refused(model: Any) -> None:
    different = {"a.weight": matrix(), "b.weight": matrix(3), **head()}
    with pytest.raises(CheckpointError, match=r"'a\.weight' and 'b\.weight'"):
        start(different, model)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("model", TIED)
@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_one_of_the_tied_names_is_enough(model: Any, name: str) -> None:
    """Libraries that write safetensors keep a shared tensor under one name."""
    loaded = start({name: matrix(), **head()}, model)
    assert torch.equal(loaded["a.weight"], matrix())
    assert torch.equal(loaded["b.weight"], matrix())


def test_tied_names_with_equal_nans_are_loaded() -> None:
    weight = matrix()
    weight[0, 0] = torch.nan
    save_file({"a.weight": weight, "b.weight": weight.clone(), **head()}, "weights.safetensors")
    made = config(TiedParameter)
    path = str(Path("weights.safetensors").resolve())
    made["runner"] = [{"name": "i", "class": "infer", "device": "cpu", "init_model_path": path}]
    loaded = GeneralTrainer(made).run()["model"]["line"]["model"].a.weight
    assert torch.equal(loaded.nan_to_num(7), weight.nan_to_num(7))


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")])
def test_the_third_tied_name_must_be_equal_too(names: tuple[str, ...]) -> None:
    first, second, odd = names
    weights = {f"{first}.weight": matrix(), f"{second}.weight": matrix(), f"{odd}.weight": matrix(3)}
    with pytest.raises(CheckpointError, match=rf"'{odd}\.weight'"):
        start({**weights, **head()}, ThreeNames)


def test_rename_may_give_one_of_the_tied_names() -> None:
    loaded = start({"wte.weight": matrix(), **head()}, ThreeNames, rename={"wte.": "b."})
    assert torch.equal(loaded["c.weight"], matrix())


def test_rename_to_a_tied_name_compares_the_tensors() -> None:
    weights = {"a.weight": matrix(), "wte.weight": matrix(3), **head()}
    with pytest.raises(CheckpointError, match=r"'a\.weight' and 'b\.weight'"):
        start(weights, TiedParameter, rename={"wte.": "b."})


@pytest.mark.parametrize("part", ["a", "b"])
def test_init_modules_finds_a_tensor_under_its_tied_name(part: str) -> None:
    loaded = start({"b.weight": matrix()}, TiedParameter, init_modules=[part])
    assert torch.equal(loaded["a.weight"], matrix())


def test_init_modules_refuses_different_tied_tensors() -> None:
    weights = {"a.weight": matrix(), "b.weight": matrix(3), **head()}
    with pytest.raises(CheckpointError, match=r"'a\.weight' and 'b\.weight'"):
        start(weights, TiedParameter, init_modules=["a"])


def test_init_modules_ignores_tied_tensors_of_other_parts() -> None:
    weights = {"a.weight": matrix(), "b.weight": matrix(3), **head()}
    loaded = start(weights, TiedParameter, init_modules=["head"])
    assert torch.equal(loaded["head.weight"], torch.ones(1, 3))
    assert torch.equal(loaded["a.weight"], loaded["b.weight"])


class Untied(TiedParameter):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(3, 3, bias=False)


def killed(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a config as ``tied`` and end it before the fifth batch."""
    monkeypatch.setattr(Kill, "at", 4)
    with pytest.raises(KilledError):
        GeneralTrainer({**made, "name": "tied", "plugins": [*made["plugins"], Kill]}).run()
    monkeypatch.setattr(Kill, "at", -1)


def test_resume_refuses_to_tie_what_was_trained_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    killed(config(Untied, save_interval="1 iteration"), monkeypatch)
    made = {**config(TiedParameter, save_interval="1 iteration"), "name": "tied"}
    with pytest.raises(CheckpointError, match=r"'a\.weight' and 'b\.weight'"):
        GeneralTrainer(made, resume="auto").run()


def samples() -> TensorDataset:
    return table(10)


def test_load_refuses_to_tie_what_was_trained_apart() -> None:
    """The class of the model changes between the run and the load."""
    made = config(Untied)
    made["dataset"][0]["class_path"] = samples
    run_dir = GeneralTrainer(made).run()["run_dir"]
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("Untied", "TiedParameter"))
    with pytest.raises(CheckpointError, match=r"'a\.weight' and 'b\.weight'"):
        load(run_dir, "last")


def test_ema_resumes_with_the_tied_names_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ema`` saves a tied parameter under its first name, which a change of the code may change."""
    made = config(TiedParameter, save_interval="1 iteration")
    made["plugins"].append({"ema": {"decay": 0.5}})
    head = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "updated_modules": "model.head"}
    made["phase"][0]["optim_schedulers"] = {"main": {"class": "constant", "args": head}}
    del made["hyper_parameters"]
    monkeypatch.setattr(Kill, "at", -1)
    straight = GeneralTrainer(made).run()["checkpointer"].newest()
    killed(made, monkeypatch)
    made["phase"][0]["model"] = OtherOrder
    resumed = GeneralTrainer({**made, "name": "tied"}, resume="auto").run()["checkpointer"].newest()
    expected = load_file(straight / "line.safetensors")
    found = load_file(resumed / "line.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


class Shares(TiedParameter):
    """Two of these share ``a``."""

    shared = nn.Linear(3, 3, bias=False)

    def __init__(self) -> None:
        super().__init__()
        self.a = self.shared


def two_phases(*plugins: Any, **runner: Any) -> dict[str, Any]:
    made = config(Shares, **runner)
    made["plugins"] += plugins
    made["phase"].append({**made["phase"][0], "name": "other"})
    return made


def test_ema_refuses_models_that_share_a_parameter() -> None:
    """Each model has its averages, and one parameter cannot have two."""
    with pytest.raises(ConfigError, match=r"'line\.a\.weight' and 'other\.a\.weight'"):
        GeneralTrainer(two_phases({"ema": {"decay": 0.5}})).run()


def test_models_that_share_a_parameter_refuse_two_tensors(tmp_path: Path) -> None:
    """Each phase has a file, and both have the parameter."""
    models = {"line": {"model": Shares()}, "other": {"model": Shares()}}
    path = Checkpointer(tmp_path).save(apart(), {"iteration": 1}, {})
    with pytest.raises(CheckpointError, match=r"'line\.a\.weight' and 'other\.a\.weight'"):
        Checkpointer(tmp_path / "new").load_weights(path, models)


def apart() -> dict[str, Any]:
    """Return entries of two models that share nothing and have different weights."""
    return {"line": {"model": TiedParameter()}, "other": {"model": TiedParameter()}}
