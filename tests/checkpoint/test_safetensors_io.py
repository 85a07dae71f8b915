"""Tensors on disk: what we write, read by the library that defines the format; what is refused, with a reason."""

from __future__ import annotations

import json
import struct
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


def read(content: bytes) -> dict[str, Tensor]:
    """What we read."""
    Path("file").write_bytes(content)
    return safetensors_io.read_tensors(Path("file")).tensors


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
    assert same(read(content)["value"], value)


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


def test_texts_in_the_header_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors_io.encode_tensors({"a": torch.ones(2)}, {"made by": 'us, "é"'}))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"made by": 'us, "é"'} == safetensors_io.read_tensors(path).metadata


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
        ({"a": 1}, "'value' is a dict, which cannot be saved; use dense tensors"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_with_its_name_and_what_to_do(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        safetensors_io.encode_tensors({"value": value})


def test_complex_numbers_of_128_bits_are_pairs_for_other_programs() -> None:
    value = torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex128).conj()
    content = safetensors_io.encode_tensors({"value": value, "real": torch.ones(1)})
    assert safetensors.torch.load(content)["value"].tolist() == [[[1, -2], [3, 4]]]
    assert torch.equal(read(content)["value"], value.resolve_conj())


def test_each_tensor_has_memory_of_its_own() -> None:
    first, second = read(safetensors_io.encode_tensors({"a": torch.ones(3), "b": torch.ones(5)})).values()
    assert (first.untyped_storage().nbytes(), second.untyped_storage().nbytes()) == (12, 20)


def test_every_tensor_lies_at_a_multiple_of_the_width_of_its_numbers_and_the_first_at_64() -> None:
    values = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(1)}
    content = safetensors_io.encode_tensors(values)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 64 == 0
    assert {name: header[name]["data_offsets"][0] for name in header} == {"a": 12, "b": 0, "c": 8}


def described(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode() + data


ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    "text",
    [f' {{ "a" : {ONE} }}  ', f'{{"__metadata__":{{}},"a":{ONE}}}', f'{{"a":{ONE},"__metadata__":{{"b":"}}"}}}}'],
)
def test_white_space_and_order_do_not_matter(text: str) -> None:
    content = described(text, struct.pack("<f", 1.5))
    assert read(content)["a"].tolist() == [1.5] == safetensors.torch.load(content)["a"].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "it is no object"),
        ('{"a":' + ONE, "Expecting ',' delimiter"),
        ('{"a":' + "[]," * 1_600_000 + ONE + "}", "more than 3000000 values"),
        (f'{{"a":{ONE},"a":{ONE}}}', "'a' twice"),
        ('{"__metadata__":{},"__metadata__":{}}', "'__metadata__' twice"),
        ('{"__metadata__":{"a":"1","a":"2"}}', "'a' twice"),
        ('{"__metadata__":{"a":1}}', "its metadata is none of texts"),
        (f'{{"a":{ONE}}} x', "Extra data"),
        ('{"a":{"dtype":"F32","shape":[1]}}', "'a' is not described by dtype, shape and data_offsets"),
        ('{"a":{"dtype":"object","shape":[1],"data_offsets":[0,4]}}', "'a' has the unknown dtype 'object'"),
        ('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', "'a' has a shape or offsets that are no counts"),
        ('{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', "'a' has a shape or offsets that are no counts"),
        (f'{{"a":{{"dtype":"F32","shape":[{2**62},0],"data_offsets":[0,0]}}}}', "no counts"),
        (f'{{"a":{{"dtype":"F32","shape":[{2**40},{2**40},0],"data_offsets":[0,0]}}}}', "'a' has an impossible shape"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"is damaged: its header makes no sense .*{message}.*; use another"):
        read(described(text, bytes(4)))


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[2,2]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', "invalid offset for tensor `a`"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "invalid offset for tensor `a`"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "invalid shape, data type, or offset for tensor"),
        (f'{{"a":{ONE},"b":{ONE}}}', "invalid offset for tensor `[ab]`"),
        (f'{{"a":{ONE},"b":{EMPTY}}}', "invalid offset for tensor `b`"),
        ("{}", "incomplete metadata, file not fully covered"),
    ],
)
def test_tensors_that_do_not_fill_the_file_are_refused_as_the_library_does(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"file: cannot be read .*{message}.*; use another"):
        read(described(text, bytes(4)))


@pytest.mark.parametrize("names", ['["b"]', '["a"]', "[1]", "{", '{"a": 1}'])
def test_complex_names_that_make_no_sense_are_refused(names: str) -> None:
    text = json.dumps({"__metadata__": {"complex128": names}, "a": json.loads(ONE)})
    with pytest.raises(CheckpointError, match=r"is damaged: .*complex.*; use another"):
        read(described(text, bytes(4)))


def test_more_tensors_or_names_than_can_be_read_again_are_not_written() -> None:
    one = torch.empty(0)
    with pytest.raises(CheckpointError, match="100001 tensors are more than 100000; join small ones"):
        safetensors_io.encode_tensors({str(index): one for index in range(100_001)})
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, more than 16777216; keep long lists in tensors"):
        safetensors_io.encode_tensors({"x" * 2**24: one})


def test_more_bytes_than_the_machine_has_memory_are_refused() -> None:
    with pytest.raises(CheckpointError, match=rf"has {2**60} bytes, and this machine has \d+ of memory; use"):
        safetensors_io.check_memory(2**60)
