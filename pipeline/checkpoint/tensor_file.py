"""The safetensors format -> tensors, each read straight into memory of its own, and hashed on the way.

The library reads the same; it copies what it is given in memory, and opens files by itself, where what was verified and
what is loaded may differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.checkpoint import header
from pipeline.checkpoint.files import CHUNK
from pipeline.checkpoint.tensors import COMPLEX, DTYPES, bytes_of
from pipeline.errors import CheckpointError

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class Readable(Protocol):
    """A file without a buffer, or bytes in memory."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill what can be filled; how much that was."""


class TensorFile(NamedTuple):
    """What a file held."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    sha256: str


class Source:
    """A file that is hashed while it is read.

    Args:
        file: at its beginning.
        size: how many bytes it has.
    """

    def __init__(self, file: Readable, size: int) -> None:
        self.file = file
        self.left = size
        self.digest = hashlib.sha256()

    def fill(self, view: memoryview) -> None:
        """Read as much as the view is long.

        Raises:
            CheckpointError: the file is shorter than it was.
        """
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            done = 0
            while done < len(chunk):
                count = self.file.readinto(chunk[done:])
                if not count:
                    raise CheckpointError("ends early; use another")
                done += count
            self.digest.update(chunk)
        self.left -= len(view)

    def take(self, size: int) -> bytes:
        """The next bytes."""
        content = bytearray(size)
        self.fill(memoryview(content))
        return bytes(content)


def read(file: Readable, size: int) -> TensorFile:
    """Read a whole safetensors file.

    Args:
        file: at its beginning; read without a buffer of its own where it is long.
        size: how many bytes it has.

    Raises:
        CheckpointError: it is damaged, or something else.
    """
    source = Source(file, size)
    found = read_header(source)
    check_memory(source.left)
    tensors = {}
    for name, entry in found.entries.items():
        tensors[name] = torch.empty(entry.shape, dtype=_TYPES[entry.dtype])
        source.fill(bytes_of(tensors[name]))
    for name in _complex_names(found.metadata):
        if name not in tensors or tensors[name].dtype != torch.float64 or tensors[name].shape[-1:] != (2,):
            raise CheckpointError(
                f"is damaged: '{name[:60]}' are no pairs of numbers, but said to be complex; use another"
            )
        tensors[name] = torch.view_as_complex(tensors[name])
    return TensorFile(tensors, found.metadata, source.digest.hexdigest())


def read_header(source: Source) -> header.Header:
    """Read what a file holds, and check that this is as long as the file.

    Raises:
        CheckpointError: it is damaged, or something else.
    """
    if source.left < 8:
        raise CheckpointError(f"is no safetensors data (it has {source.left} bytes); use another")
    length = int.from_bytes(source.take(8), "little")
    if length > min(header.MAX_HEADER, source.left):
        most = min(header.MAX_HEADER, source.left)
        raise CheckpointError(
            f"is no safetensors data (its header would have {length} bytes, of at most {most}); use another"
        )
    return header.parse(source.take(length), source.left)


def check_memory(size: int) -> None:
    """Refuse what cannot fit, before the system ends the process for it.

    Raises:
        CheckpointError: the machine has not so much memory.
    """
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > most:
        raise CheckpointError(f"has {size} bytes of numbers, and this machine has {most} of memory; use another")


def _complex_names(metadata: dict[str, str]) -> list[str]:
    try:
        names = json.loads(metadata.get(COMPLEX, "[]"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is damaged: its list of complex tensors is no JSON ({error}); use another") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError("is damaged: its list of complex tensors is none; use another")
    return list(dict.fromkeys(names))
