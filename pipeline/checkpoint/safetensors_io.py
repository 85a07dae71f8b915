"""The format of tensors on disk: written, read, and hashed on the way."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.checkpoint import listing
from pipeline.checkpoint.listing import MAX_HEADER, MAX_TENSORS, METADATA
from pipeline.checkpoint.storage import CHUNK
from pipeline.errors import CheckpointError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


COMPLEX = "complex128"

"""The metadata that lists, as JSON, the tensors of this type, which the format has no name for: they are pairs of F64."""


class Packed(NamedTuple):
    """A file of tensors in memory: its entries, and the numbers in the order in which they are written."""

    entries: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    data: list[bytes | memoryview]

    def parts(self) -> list[bytes | memoryview]:
        """The content of the file.

        Raises:
            CheckpointError: the header is larger than what is read again.
        """
        header = {**self.entries, METADATA: self.metadata} if self.metadata else self.entries
        text = json.dumps(header).encode()
        # The numbers begin at a multiple of 64 bytes, where the fastest instructions want them.
        text += b" " * (-(8 + len(text)) % 64)
        if len(text) > MAX_HEADER:
            raise CheckpointError(
                f"the names and plain values of a state take {len(text)} bytes, more than {MAX_HEADER}; keep long lists in tensors"
            )
        return [len(text).to_bytes(8, "little"), text, *self.data]


def pack(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    buffer: Callable[[int], Tensor] | None = None,
) -> Packed:
    """Lay tensors out as the format wants them; tensors that share memory are each written out.

    Args:
        tensors: name -> tensor.
        metadata: texts that the header keeps.
        buffer: a size in bytes -> a tensor of so many bytes, or more, into which all are copied; None: those that lie
            in the memory of the CPU as they are written are used where they are, and must not change meanwhile.

    Raises:
        CheckpointError: it is no dense tensor, its type has no name in the format, or there are too many.
    """
    plain = {name: _plain(name, value) for name, value in tensors.items()}
    if len(plain) > MAX_TENSORS:
        raise CheckpointError(f"{len(plain)} tensors are more than {MAX_TENSORS}; join small ones")
    kept = dict(metadata or {})
    if pairs := [name for name, value in tensors.items() if value.dtype == torch.complex128]:
        kept[COMPLEX] = json.dumps(pairs)
    entries: dict[str, dict[str, Any]] = {
        name: {"dtype": DTYPES[value.dtype], "shape": list(value.shape)} for name, value in plain.items()
    }
    # Wide types come first, so that every tensor lies at a multiple of the width of its numbers.
    ordered = sorted(plain.items(), key=lambda each: -each[1].element_size())
    end = 0
    for name, value in ordered:
        start, end = end, end + value.nbytes
        entries[name]["data_offsets"] = [start, end]
    values = [value for _, value in ordered]
    data = [_copied(values, buffer(end))[:end]] if buffer else [bytes_of(_on_cpu(value)) for value in values]
    return Packed(entries, kept, list(data))


def _on_cpu(value: Tensor) -> Tensor:
    """The numbers of a tensor in one piece; a conjugate or a negative may be a view that is not worked out yet."""
    return value.cpu().resolve_conj().resolve_neg().contiguous()


def _copied(values: Sequence[Tensor], memory: Tensor) -> memoryview:
    """Copy tensors into memory, one after the other."""
    view, end = bytes_of(memory), 0
    for value in values:
        start, end = end, end + value.nbytes
        if value.device.type == "cpu" and value.is_contiguous() and not value.is_conj() and not value.is_neg():
            # One thread copies faster than torch's threads do, which wait for each other at every tensor.
            view[start:end] = bytes_of(value)
        elif value.nbytes:
            memory[start:end].view(value.dtype).view(value.shape).copy_(value, non_blocking=memory.is_pinned())
    for device in {value.device for value in values if value.device.type == "cuda"}:
        # The copies from this device are under way: what they copy may change only after them.
        torch.cuda.current_stream(device).synchronize()
    return view


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which lives as long as this view."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(array).cast("B")


def encode_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file.

    Args:
        tensors: name -> tensor.
        metadata: texts that the header keeps; beside them stands the ``checksum`` of the file, as ``crc32``.

    Raises:
        CheckpointError: as ``pack``.
    """
    packed = pack(tensors, metadata)
    if metadata is not None:
        header = {**packed.entries, METADATA: packed.metadata}
        packed.metadata["crc32"] = checksum(header, packed.data)
    return b"".join(packed.parts())


def checksum(header: Mapping[str, Any], numbers: Iterable[bytes | memoryview]) -> str:
    """The CRC-32, in hex, of a header without its own checksum, and of the numbers after it."""
    value = zlib.crc32(json.dumps({**header, METADATA: {**header[METADATA], "crc32": ""}}).encode())
    for part in numbers:
        value = zlib.crc32(part, value)
    return f"{value:08x}"


def _plain(name: str, value: Any) -> Tensor:
    """The tensor without gradient; a complex128 one as pairs of numbers."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        what = "a tensor that is sparse or has no data" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise CheckpointError(
            f"'{name}' is {what}, which cannot be saved; keep what is saved in dense tensors, e.g. with register_buffer"
        )
    if value.dtype == torch.complex128:
        return torch.view_as_real(value.detach().resolve_conj())
    if value.dtype not in DTYPES:
        raise CheckpointError(
            f"'{name}' has dtype {value.dtype}, which cannot be saved; convert it, or register it with persistent=False"
        )
    return value.detach()


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


def read_tensors(file: Readable, size: int) -> TensorFile:
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


def read_header(source: Source) -> listing.Header:
    """Read what a file holds, and check that this is as long as the file.

    Raises:
        CheckpointError: it is damaged, or something else.
    """
    if source.left < 8:
        raise CheckpointError(f"is no safetensors data (it has {source.left} bytes); use another")
    length = int.from_bytes(source.take(8), "little")
    if length > min(listing.MAX_HEADER, source.left):
        most = min(listing.MAX_HEADER, source.left)
        raise CheckpointError(
            f"is no safetensors data (its header would have {length} bytes, of at most {most}); use another"
        )
    return listing.parse_header(source.take(length), source.left)


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
