"""The header of a safetensors file, read without torch; that the tensors fill the file, the library checks."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoint import storage
from pipeline.errors import CheckpointError

METADATA = "__metadata__"

# Bytes of a header.
MAX_HEADER = 16 * 2**20

MAX_TENSORS = 100_000

# The types of numbers -> their names in torch.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip

# Values in a header; more are lists in lists, which would take a multiple of its size.
MAX_VALUES = 3_000_000


class Entry(NamedTuple):
    """The type, shape and place of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """The header of a file: its entries, in the order of their places, and its texts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def _parse_header(content: bytes) -> Header:
    """Read the JSON of a header.

    Raises:
        ValueError, RecursionError: it is not what the format says.
    """
    if sum(map(content.count, b"[{,")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    header = json.loads(content.decode(), object_pairs_hook=_unique)
    metadata = header.pop(METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("it is no object, or its metadata is none of texts")
    if len(header) > MAX_TENSORS:
        raise ValueError(f"more than {MAX_TENSORS} tensors")
    entries = sorted(((name, _entry(name, value)) for name, value in header.items()), key=lambda item: item[1][2:])
    return Header(dict(entries), metadata)


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a header with these members; ``json`` takes the last of two of one name."""
    members = dict(items)
    if len(members) < len(items):
        [(name, _)] = Counter(name for name, _ in items).most_common(1)
        raise ValueError(f"'{name}' twice")
    return members


def _entry(name: str, saved: Any) -> Entry:
    if not isinstance(saved, dict) or saved.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"'{name}' is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = saved["dtype"], saved["shape"], saved["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"'{name}' has the unknown dtype {str(dtype)[:20]!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"'{name}' has a shape or offsets that are no counts")
    # Sizes that no memory has would overflow, also beside a 0.
    if len(shape) > 64 or math.prod(size or 1 for size in shape) >= 2**60:
        raise ValueError(f"'{name}' has an impossible shape")
    return Entry(dtype, tuple(shape), *offsets)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int and 0 <= count < 2**60 for count in value)


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: it is missing or damaged.
        StorageError: the storage refuses for a reason that may pass.
    """
    size = storage.size_of(path) or 0
    with storage.open_regular(path) as file:
        length = int.from_bytes(file.read(8) or b"", "little")
        if length > min(MAX_HEADER, size - 8):
            what = f"a header of {length} bytes in a file of {size}"
            raise CheckpointError(f"{path}: is no safetensors data ({what}); use another")
        content = file.read(length) or b""
    try:
        return _parse_header(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged: its header makes no sense ({error}); use another") from error
