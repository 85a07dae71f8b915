"""Tensors -> the safetensors format: the header's length, a JSON header, then the raw numbers, one tensor after the other.

Written here because the library's own writer needs numpy; the library reads it.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

METADATA = "__metadata__"


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file; tensors that share memory are each written out.

    Args:
        tensors: name -> tensor.
        metadata: texts that the header keeps; beside them stands the ``checksum`` of the file, as ``crc32``.

    Raises:
        CheckpointError: it is no dense tensor, or its type has no name in the format.
    """
    header: dict[str, dict[str, Any]] = {}
    buffers: list[bytes] = []
    end = 0
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            what = (
                "a tensor that is sparse or has no data" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise CheckpointError(
                f"'{name}' is {what}, which cannot be saved; keep what is saved in dense tensors, e.g. with register_buffer"
            )
        if value.dtype not in _DTYPES:
            raise CheckpointError(
                f"'{name}' has dtype {value.dtype}, which cannot be saved; convert it, or register it with persistent=False"
            )
        # A conjugate or a negative may be a view that is not worked out yet.
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        buffers.append(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    if metadata is not None:
        header[METADATA] = dict(metadata)
        header[METADATA]["crc32"] = checksum(header, buffers)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *buffers])


def checksum(header: Mapping[str, Any], numbers: Iterable[bytes | memoryview]) -> str:
    """The CRC-32, in hex, of a header without its own checksum, and of the numbers after it."""
    value = zlib.crc32(json.dumps({**header, METADATA: {**header[METADATA], "crc32": ""}}).encode())
    for part in numbers:
        value = zlib.crc32(part, value)
    return f"{value:08x}"
