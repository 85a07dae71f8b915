"""Loading a part of what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.weights import freeze
from pipeline.errors import CheckpointError, ConfigError
from pipeline.training.schedules import Constant


def net(outputs: int = 2, fill: float = 0.0) -> nn.ModuleDict:
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, outputs)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


def entries(**models: nn.Module) -> dict[str, dict[str, nn.Module]]:
    return {phase: {"model": model} for phase, model in models.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint whose weights are all 1."""
    return Checkpointer(tmp_path / "c").save(entries(main=net(fill=1)), {"iteration": 1}, {})


def ones(model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if bool((value == 1).all())}


ENCODER = {"encoder.weight", "encoder.bias"}


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        (["encoder"], ENCODER),
        (["*.bias"], {"encoder.bias", "head.bias"}),
        (["encoder", "head.bias"], {*ENCODER, "head.bias"}),
        (["*"], {*ENCODER, "head.weight", "head.bias"}),
    ],
)
def test_modules_and_patterns_choose_what_is_loaded(path: Path, only: list[str], wanted: set[str]) -> None:
    model = net()
    report = Checkpointer(path.parent).load_part(path, entries(main=model), only)
    assert ones(model) == wanted == set(report.loaded)


def test_what_was_not_loaded_is_reported_with_the_reason(path: Path, log_lines: list[str]) -> None:
    model = net(outputs=5)
    model["extra"] = nn.Linear(1, 1)
    report = Checkpointer(path.parent).load_part(path, entries(main=model))
    assert set(report.loaded) == ENCODER
    assert report.missing == ["extra.weight", "extra.bias"]
    assert report.reshaped == {"head.weight": ((2, 3), (5, 3)), "head.bias": ((2,), (5,))}
    [line] = [line for line in log_lines if "loaded" in line]
    assert "2 of another shape (head.weight is (2, 3) there and (5, 3) here, head.bias is" in line


def test_what_no_model_has_is_reported(path: Path) -> None:
    report = Checkpointer(path.parent).load_part(path, entries(main=nn.ModuleDict({"encoder": nn.Linear(3, 3)})))
    assert report.unused == ["head.weight", "head.bias"]


def test_frozen_parts_are_not_trained(path: Path) -> None:
    model = net()
    report = Checkpointer(path.parent).load_part(path, entries(main=model), ["encoder"], frozen=["encoder"])
    assert {name for name, each in model.named_parameters() if not each.requires_grad} == ENCODER == set(report.frozen)


@pytest.mark.parametrize(
    ("only", "frozen", "kind", "message"),
    [
        (
            ["head", "encodr"],
            [],
            CheckpointError,
            "'encodr' names nothing in it or in the models; did you mean 'encoder'",
        ),
        (["encoder"], ["encodr"], ConfigError, "'encodr' names no parameter of the models; did you mean 'encoder'"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error_and_nothing_changes(
    path: Path, only: list[str], frozen: list[str], kind: type[Exception], message: str
) -> None:
    model = net()
    with pytest.raises(kind, match=f"step-000000000001: {message}"):
        Checkpointer(path.parent).load_part(path, entries(main=model), only, frozen)
    assert ones(model) == set()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_where_nothing_can_be_loaded_it_is_an_error(path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"nothing that 'other' names can be loaded \(2 not saved .*other.*; name modules that both",
    ):
        Checkpointer(path.parent).load_part(path, entries(main=nn.ModuleDict({"other": nn.Linear(1, 1)})), ["other"])


def test_each_pattern_has_to_give_something(path: Path) -> None:
    model = net(outputs=5)
    with pytest.raises(
        CheckpointError, match=r"nothing that 'head' names .*2 loaded \(encoder.*\); 2 of another shape"
    ):
        Checkpointer(path.parent).load_part(path, entries(main=model), ["encoder", "head"])
    assert ones(model) == set()


def test_with_several_phases_a_name_begins_with_the_phase(tmp_path: Path) -> None:
    saved = entries(left=net(fill=1), right=net(fill=1))
    path = Checkpointer(tmp_path).save(saved, {"iteration": 1}, {})
    left, right = net(), net()
    Checkpointer(tmp_path).load_part(path, entries(left=left, right=right), ["left.encoder", "right.head.bias"])
    assert (ones(left), ones(right)) == (ENCODER, {"head.bias"})


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied(fill: float) -> nn.Module:
        model = nn.ModuleDict({"in": nn.Embedding(4, 3), "out": nn.Linear(3, 4, bias=False)})
        model["out"].weight = model["in"].weight
        nn.init.constant_(model["in"].weight, fill)
        return model

    path = Checkpointer(tmp_path).save(entries(main=tied(1)), {"iteration": 1}, {})
    model = tied(0)
    Checkpointer(tmp_path).load_part(path, entries(main=model), ["out"])
    assert model["out"].weight is model["in"].weight
    assert ones(model) == {"in.weight", "out.weight"}


# Parts that are not trained


def trained(model: nn.Module, **more: Any) -> dict[str, Any]:
    """What the network stage builds of a model, as far as it matters here."""
    return {"model": model, "optim_schedulers": {"main": Constant("SGD", {"lr": 0.1}, model, **more)}}


def test_what_is_frozen_is_asked_for_no_gradient_any_more() -> None:
    model = net()
    entry = trained(model)
    assert freeze({"main": entry}, ["encoder", "*.bias"], "x") == ["encoder.weight", "encoder.bias", "head.bias"]
    model["head"](model["encoder"](torch.ones(1, model["encoder"].in_features))).sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is not None] == ["head.weight"]
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["head.weight"]


def test_to_freeze_all_that_an_optimizer_trains_is_an_error_and_nothing_changes() -> None:
    model = net()
    entry = trained(model, updated_modules="encoder")
    with pytest.raises(ConfigError, match="x: leaves nothing for 'main' of phase 'main' to train; freeze less"):
        freeze({"main": entry}, ["encoder"], "x")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_with_several_phases_what_is_frozen_is_named_with_the_phase() -> None:
    left, right = net(), net()
    assert freeze({"left": trained(left), "right": trained(right)}, ["left.encoder"], "x") == [
        "left.encoder.weight",
        "left.encoder.bias",
    ]
    assert all(parameter.requires_grad for parameter in right.parameters())


def test_phases_that_share_a_model_count_as_one(path: Path) -> None:
    shared = trained(net())
    models = {"main": shared, "other": {**shared}}
    Checkpointer(path.parent).load_part(path, models, ["encoder"])
    assert ones(shared["model"]) == ENCODER
    assert freeze(models, ["encoder"], "x") == ["encoder.weight", "encoder.bias"]


def test_a_tied_parameter_is_frozen_by_either_of_its_names() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(4, 3), "out": nn.Linear(3, 4)})
    model["out"].weight = model["in"].weight
    freeze({"main": trained(model)}, ["out.weight"], "x")
    assert not model["in"].weight.requires_grad


def test_phases_that_share_a_module_are_saved_once_and_loaded_into_it(tmp_path: Path) -> None:
    module, other = nn.Linear(2, 1), nn.Linear(2, 1)
    path = Checkpointer(tmp_path).save({"one": {"model": module}, "same": {"model": module}}, {"iteration": 1}, {})
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "one.safetensors", "state.json"]
    Checkpointer(tmp_path).load_weights(path, {"one": {"model": other}, "same": {"model": other}})
    assert torch.equal(other.weight, module.weight)
