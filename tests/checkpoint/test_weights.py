"""Loading a part of what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.errors import CheckpointError


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


@pytest.mark.parametrize(("only", "frozen"), [(["encodr"], []), (["encoder"], ["encodr"])])
def test_a_pattern_that_names_nothing_is_an_error_and_nothing_changes(
    path: Path, only: list[str], frozen: list[str]
) -> None:
    model = net()
    with pytest.raises(
        CheckpointError, match="step-000000000001: 'encodr' names nothing in it; did you mean 'encoder'"
    ):
        Checkpointer(path.parent).load_part(path, entries(main=model), only, frozen)
    assert ones(model) == set()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_where_nothing_can_be_loaded_it_is_an_error(path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nothing in it can be loaded \(2 not saved .*other.*; name modules that both"
    ):
        Checkpointer(path.parent).load_part(path, entries(main=nn.ModuleDict({"other": nn.Linear(1, 1)})), ["other"])


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
