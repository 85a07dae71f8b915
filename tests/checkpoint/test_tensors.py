"""Tensors on disk, read by the library that defines the format."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.checkpoint import safetensors_io
from pipeline.errors import CheckpointError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in type, shape and every bit, nan included."""
    bits = [each.contiguous().flatten().view(torch.uint8) if each.numel() else each.flatten() for each in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def opened(path: Path, content: bytes) -> dict[str, Tensor]:
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 5)], ids=str)
def test_a_tensor_of_every_type_and_shape_is_read_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    random = torch.Generator().manual_seed(0)
    value = (torch.rand(shape, generator=random) * 9 - (0 if dtype in INTEGERS else 4)).to(dtype)
    content = safetensors_io.encode_tensors({"value": value})
    assert same(opened(tmp_path / "file.safetensors", content)["value"], value)
    assert same(safetensors.torch.load(content)["value"], value)


BASE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "value",
    [
        BASE.T,
        BASE[:, ::2],
        BASE[1:3, 2:],
        BASE[0].expand(3, 6),
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        nn.Parameter(BASE),
    ],
    ids=["transposed", "strided", "window", "expanded", "special", "conjugate", "negative", "parameter"],
)
def test_a_view_is_saved_as_the_numbers_that_it_shows(tmp_path: Path, value: Tensor) -> None:
    read = opened(tmp_path / "file.safetensors", safetensors_io.encode_tensors({"value": value}))["value"]
    assert same(read, value.detach().clone().resolve_conj().resolve_neg())


def test_many_tensors_of_odd_sizes_are_read_back_bit_for_bit_in_any_order(tmp_path: Path) -> None:
    values = {
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "double": torch.tensor([0.1, 0.2], dtype=torch.float64),
        "flag": torch.tensor(True),
        "none": torch.empty(0),
        "long": torch.tensor(-(2**62)),
        'ünïcode/"name"': torch.tensor([1.5], dtype=torch.bfloat16),
    }
    read = opened(tmp_path / "file.safetensors", safetensors_io.encode_tensors(values))
    assert read.keys() == values.keys()
    assert all(same(read[name], values[name]) for name in values)


def test_tied_weights_are_each_written_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    read = opened(tmp_path / "file.safetensors", safetensors_io.encode_tensors(model.state_dict()))
    assert list(read) == ["0.weight", "1.weight"]
    assert all(same(value, model[0].weight.detach()) for value in read.values())


def test_texts_in_the_header_are_read_back_with_the_checksum_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors_io.encode_tensors({"a": torch.ones(2)}, {"made by": 'us, "é"'}))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata.pop("made by") == 'us, "é"'
    assert [*metadata] == ["crc32"]


def test_the_checksum_is_that_of_the_header_without_it_and_of_the_numbers() -> None:
    content = safetensors_io.encode_tensors({"a": torch.ones(2), "b": torch.zeros(3)}, {"x": "y"})
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    kept, header["__metadata__"]["crc32"] = header["__metadata__"]["crc32"], ""
    assert int(kept, 16) == zlib.crc32(json.dumps(header).encode() + content[start:])


def test_the_header_lies_as_the_format_says() -> None:
    content = safetensors_io.encode_tensors({"a": torch.zeros(2, 2), "b": torch.zeros(3, dtype=torch.int8)})
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["a"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    assert header["b"] == {"dtype": "I8", "shape": [3], "data_offsets": [16, 19]}
    assert len(content) == 8 + length + 19


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), r"'value' has dtype torch.float8_e4m3fnuz, .*; convert it"),
        (torch.eye(3).to_sparse(), "'value' is a tensor that is sparse or has no data, .* dense tensors"),
        (torch.empty(3, device="meta"), "'value' is a tensor that is sparse or has no data, .* dense tensors"),
        ({"a": 1}, "'value' is a dict, which cannot be saved; keep what is saved in dense tensors"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_with_its_name_and_what_to_do(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        safetensors_io.encode_tensors({"value": value})
