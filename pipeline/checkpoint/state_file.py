"""A state on disk, such as an optimizer's ``state_dict()``: plain values and tensors in one safetensors file, no pickle.

The tensors are stored under their place in the state, ``state['model']['weight']``; the rest is JSON in the header's
metadata, where whatever JSON has no form of its own for is a mapping from its kind to its content: ``{"tuple": [0.9]}``.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

from pipeline.checkpoint import files, tensor_file, tensors
from pipeline.checkpoint.state_tree import flatten, restore
from pipeline.errors import CheckpointError, StorageError


def save_state(path: str | Path, state: Any) -> None:
    """Write a state to a file, in the place of what it was, and wait until the disk has it.

    Args:
        path: the file; the folders above it are made.
        state: None, truth values, integers, floats, strings, bytes, tensors (dense, or sparse as COO), and lists, tuples,
            dicts with keys that are strings or integers, OrderedDicts and Counters of them.

    Raises:
        CheckpointError: something in it is of another type.
        StorageError: the storage refuses; what was there is there still.
    """
    content = encode(state)
    try:
        files.replace(Path(path), content)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be saved: {error.strerror}; free or repair the storage, or use another path"
        ) from error


def load_state(path: str | Path) -> Any:
    """The state that ``save_state`` wrote, every value of the type that it had, tensors on the CPU.

    Raises:
        CheckpointError: there is no such file, it is damaged, or something else wrote it.
    """
    try:
        return decode(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def encode(state: Any) -> bytes:
    """The bytes of a state file. Parameters become tensors, views and tied tensors are each written out.

    Raises:
        CheckpointError: something in it cannot be saved.
    """
    found, metadata = flatten(state)
    return tensors.encode(found, metadata)


def decode(content: bytes) -> Any:
    """The state that ``encode`` made these bytes of; only plain values and tensors come from them, whatever they hold.

    Raises:
        CheckpointError: they are damaged, or something else made them.
    """
    try:
        found = tensor_file.read(BytesIO(content), len(content))
    except CheckpointError as error:
        if other := _what_else(content):
            raise CheckpointError(other) from error
        raise CheckpointError(f"is damaged, or no state file ({error})") from error
    _check(content, found.metadata)
    return restore(found.tensors, found.metadata)


def _what_else(content: bytes) -> str:
    """What to say of bytes that are a known format, but not this one."""
    if content.startswith((b"PK\x03\x04", b"\x80")):
        return (
            "is a pickle, which can run code; load it with torch.load(weights_only=True), and save_state what it holds"
        )
    return "" if content else "is empty; use another"


def _check(content: bytes, metadata: dict[str, str]) -> None:
    """Compare the checksum with the one that was written, where a state is said to be in it."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    if "state" in metadata and metadata.get("crc32") != tensors.checksum(header, [memoryview(content)[start:]]):
        raise CheckpointError("is damaged: its checksum is not the one that was written; use another")
