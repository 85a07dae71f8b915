"""Weights that something else wrote. Hostile ones are in ``tests/faults/checkpoint_malicious.py``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint import foreign, safetensors_io
from pipeline.errors import CheckpointError


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def loaded(path: Path) -> nn.Module:
    torch.manual_seed(1)
    model = fresh()
    Checkpointer(path.parent).load_weights(path, {"main": {"model": model}})
    return model


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("wrap", [dict, OrderedDict, lambda state: {"state_dict": state, "epoch": 3}])
def test_weights_of_torch_save_load_as_they_were(tmp_path: Path, model: nn.Module, suffix: str, wrap: Any) -> None:
    torch.save(wrap(model.state_dict()), tmp_path / f"weights{suffix}")
    state = loaded(tmp_path / f"weights{suffix}").state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_parameters_saved_as_such_load_too(tmp_path: Path) -> None:
    torch.save({"weight": nn.Parameter(torch.ones(2))}, tmp_path / "weights.pt")
    assert foreign.read(tmp_path / "weights.pt")["weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint16]
)
def test_every_usual_type_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"value": torch.ones(3).to(dtype)}, tmp_path / "weights.pt")
    value = foreign.read(tmp_path / "weights.pt")["value"]
    assert (value.dtype, value.shape) == (dtype, (3,))


def test_a_large_file_with_shared_and_sliced_tensors_loads(tmp_path: Path) -> None:
    base = torch.arange(2_000_000.0).view(1000, 2000)
    torch.save({"base": base, "view": base[::2].T}, tmp_path / "weights.pt")
    found = foreign.read(tmp_path / "weights.pt")
    assert torch.equal(found["view"], base[::2].T)


def test_a_safetensors_file_loads_also_through_a_link(tmp_path: Path, model: nn.Module) -> None:
    (tmp_path / "blob").write_bytes(safetensors_io.encode_tensors(model.state_dict()))
    (tmp_path / "weights.safetensors").symlink_to("blob")
    assert torch.equal(
        loaded(tmp_path / "weights.safetensors").state_dict()["0.weight"], model.state_dict()["0.weight"]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 3}, "holds a int under 'a', not only tensors; save a state_dict"),
        ({1: torch.ones(1)}, "holds a Tensor under a key that is no string, not only tensors"),
        ([torch.ones(1)], "holds a list, and not tensors by name; save a state_dict"),
        (
            nn.Linear(1, 1),
            r"cannot be loaded as weights \(Unsupported global: GLOBAL torch.nn.modules.linear.Linear .*; save a state_dict",
        ),
        ({"a": torch.ones(4).expand(1000, 4)}, "'a' shows 16000 bytes of fewer; save contiguous tensors"),
    ],
)
def test_what_is_no_state_dict_is_refused_with_what_it_is(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=f"weights.pt: ({message})"):
        foreign.read(tmp_path / "weights.pt")


def test_an_old_file_of_torch_save_loads_too(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "weights.pt", _use_new_zipfile_serialization=False)
    assert foreign.read(tmp_path / "weights.pt")["a"].tolist() == [1]


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested", "ignore:TypedStorage"
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(2, device="meta"),
    ],
    ids=["sparse", "quantized", "nested", "meta"],
)
def test_tensors_that_are_not_dense_are_refused(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    torch.save({"a": make()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="'a' is a sparse, quantized, nested or meta tensor; save a dense one"):
        foreign.read(tmp_path / "weights.pt")
