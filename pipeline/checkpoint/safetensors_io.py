"""The format of tensors on disk: written here, out of buffers that stay; read by the library that defines it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.parameter import is_lazy

from pipeline.checkpoint.header import DTYPES, MAX_HEADER, MAX_TENSORS, METADATA, read_header
from pipeline.checkpoint.storage import Buffer, at_path
from pipeline.errors import CheckpointError

_NAMES: dict[torch.dtype, str] = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}

# The metadata that lists, as JSON, the tensors of this type, which the format has no name for: they are pairs of F64.
COMPLEX = "complex128"

# The metadata that lists, as JSON, the buffers whose shape or type has changed since the model was built.
RESIZED = "resized_buffers"


def pack(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, buffer: Callable[[int], Tensor] | None = None
) -> Callable[[], list[Buffer]]:
    """Order tensors as the format requires; tensors that share memory are each written.

    Args:
        tensors: name -> tensor.
        metadata: texts that the header keeps, if there are any.
        buffer: a size in bytes -> a tensor of so many bytes, or more, into which all are copied; None: those that lie
            in the memory of the CPU as they are written are used where they are, and must not change meanwhile.

    Returns:
        What makes the content of the file.

    Raises:
        CheckpointError: it is no dense tensor, its type has no name in the format, or there are too many.
    """
    plain = {name: _plain(name, value) for name, value in tensors.items()}
    if len(plain) > MAX_TENSORS:
        raise CheckpointError(f"{len(plain)} tensors are more than {MAX_TENSORS}; join small ones")
    texts = dict(metadata or {})
    if pairs := [name for name, value in tensors.items() if value.dtype == torch.complex128]:
        texts[COMPLEX] = json.dumps(pairs)
    header: dict[str, dict[str, Any]] = {METADATA: texts} if texts else {}
    # Wide types come first, so that every tensor lies at a multiple of the width of its numbers.
    ordered = dict(sorted(plain.items(), key=lambda item: -item[1].element_size()))
    end = 0
    for name, value in ordered.items():
        start, end = end, end + value.nbytes
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    values = list(ordered.values())
    if buffer:
        return partial(_content, header, [_copied(values, buffer(end))[:end]])
    # Lazy conjugates and negatives are computed.
    data = [bytes_of(value.cpu().resolve_conj().resolve_neg().contiguous()) for value in values]
    return partial(_content, header, data)


def _content(header: dict[str, dict[str, Any]], data: Sequence[Buffer]) -> list[Buffer]:
    """The content of a file; the header must not be larger than what is read again."""
    text = json.dumps(header).encode()
    # The numbers begin at a multiple of 64 bytes, where the fastest instructions want them.
    text += b" " * (-(8 + len(text)) % 64)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"its header has {len(text)} bytes, more than {MAX_HEADER}; keep long lists in tensors")
    return [len(text).to_bytes(8, "little"), text, *data]


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
    """A view of the memory of a contiguous tensor on the CPU."""
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(array).cast("B")


def encode_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file; arguments and errors are those of ``pack``."""
    return b"".join(pack(tensors, metadata)())


def _plain(name: str, value: Any) -> Tensor:
    """The tensor without gradient; complex128 as pairs of numbers."""
    if is_lazy(value):
        what = f"'{name}' belongs to a lazy module that was never called, and has no shape yet"
        raise CheckpointError(f"{what}; call the module before the first save, or remove it")
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        what = "a tensor that is sparse or has no data" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise CheckpointError(f"'{name}' is {what}, which cannot be saved; use dense tensors, e.g. register_buffer")
    if value.dtype == torch.complex128:
        return torch.view_as_real(value.detach().resolve_conj())
    if value.dtype not in _NAMES:
        remedy = "convert it, or register it with persistent=False"
        raise CheckpointError(f"'{name}' has dtype {value.dtype}, which cannot be saved; {remedy}")
    return value.detach()


class TensorFile(NamedTuple):
    """What a file holds."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_tensors(path: Path) -> TensorFile:
    """Read a whole safetensors file, after ``header`` has looked at its header, of which the library checks the rest.

    Raises:
        CheckpointError: it is damaged, or something else.
        StorageError: the storage refuses for a reason that may pass.
    """
    header = read_header(path)
    with at_path(path):
        try:
            check_memory(path.stat().st_size)
            with safe_open(path, framework="pt") as file:
                # The library shows memory of the file, which is to be free to go.
                tensors = {name: file.get_tensor(name).clone() for name in header.entries}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read ({error}); use another") from error
        for name in complex_names(header.metadata):
            if name not in tensors or tensors[name].dtype != torch.float64 or tensors[name].shape[-1:] != (2,):
                raise CheckpointError(f"is damaged: '{name[:60]}' is said to be complex, and is none; use another")
            tensors[name] = torch.view_as_complex(tensors[name])
    return TensorFile(tensors, header.metadata)


def check_memory(size: int) -> None:
    """Refuse a file of so many bytes if it cannot fit, before the system ends the process for it.

    Raises:
        CheckpointError: the machine has not so much memory.
    """
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > most:
        raise CheckpointError(f"has {size} bytes, and this machine has {most} of memory; use another")


def resized_buffers(metadata: Mapping[str, str]) -> list[str]:
    """Return the buffers whose shape or type is not that of a new model.

    Raises:
        CheckpointError: the list of them is damaged.
    """
    try:
        return TypeAdapter(list[str]).validate_json(metadata.get(RESIZED, "[]"))
    except ValueError as error:
        raise CheckpointError("is damaged: its list of resized buffers is none; use another") from error


def complex_names(metadata: dict[str, str]) -> list[str]:
    """The tensors that the format holds as pairs of numbers.

    Raises:
        CheckpointError: the list of them is damaged.
    """
    try:
        return list(dict.fromkeys(TypeAdapter(list[str]).validate_json(metadata.get(COMPLEX, "[]"))))
    except ValueError as error:
        raise CheckpointError("is damaged: its list of complex tensors is none; use another") from error
