"""What makes two batches the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.tensors import bytes_of


def digest(batch: Any) -> str:
    """The SHA-256, in hex, of the numbers in a batch, their types and shapes, and of how they stand in it."""
    hashed = hashlib.sha256()
    for part in _parts(batch):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    yield f"{type(value).__qualname__} ".encode()
    if isinstance(value, Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        yield f"{value.dtype} {list(value.shape)} ".encode()
        yield bytes_of(dense.cpu().resolve_conj().resolve_neg().contiguous())
    elif isinstance(value, Mapping):
        yield from _parts(list(value.items()))
    elif isinstance(value, list | tuple):
        yield f"{len(value)} ".encode()
        for each in value:
            yield from _parts(each)
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield f"{value!r} ".encode()
    elif hasattr(value, "tobytes"):
        yield f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')} ".encode()
        yield value.tobytes()
    else:
        # Of any other object what it holds; its repr may tell where in memory it is.
        yield from _parts(getattr(value, "__dict__", {}))
