"""A nested state <-> tensors and JSON."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint import safetensors_io, storage
from pipeline.checkpoint.header import METADATA
from pipeline.errors import CheckpointError

FORMAT = "1"

# Levels of a state: what is deeper holds itself.
MAX_DEPTH = 64

# Plain values of a state; there may be as many numbers in tensors as the memory holds.
MAX_VALUES = 2_000_000


_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}

# The types of what can be saved; numpy's numbers become some of these.
_KINDS = frozenset({type(None), bool, str, int, float, bytes, Tensor, nn.Parameter, list, tuple, *_MAPPINGS.values()})

_PLAIN = "numbers, strings, lists, tuples, dicts and tensors"


def flatten(state: Any) -> safetensors_io.TensorFile:
    """The tensors of a state by their place in it, and the rest as the texts of a header.

    Raises:
        CheckpointError: something in it cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_flatten(state, "state", tensors), allow_nan=False, separators=(",", ":"))
    if _count(structure) > MAX_VALUES:
        raise CheckpointError(f"state: has more than {MAX_VALUES} plain values; keep long lists in tensors")
    return safetensors_io.TensorFile(tensors, {"state_format": FORMAT, "state": structure})


def check(state: Any, where: str) -> None:
    """See that a state can be saved, without saving it.

    Raises:
        CheckpointError: something in it cannot; the message begins with ``where``.
    """
    _flatten(state, where, {})


def split(state: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> safetensors_io.TensorFile:
    """The tensors of a module's state by name, and everything else in it as texts of the header.

    That is what ``get_extra_state`` returned, a sparse buffer, and one with the name of the header's own texts.

    Args:
        state: of the module.
        metadata: other texts of the header.

    Raises:
        CheckpointError: something in it cannot be saved.
    """
    plain = {name: value for name, value in state.items() if _is_plain(value) and name != METADATA}
    if len(plain) == len(state):
        return safetensors_io.TensorFile(plain, dict(metadata or {}))
    tensors, texts = flatten({name: value for name, value in state.items() if name not in plain})
    return safetensors_io.TensorFile({**plain, **tensors}, {**(metadata or {}), **texts})


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.layout is not torch.sparse_coo or value.is_meta)


def join(tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """The reverse of ``split``; for weights of other programs, the tensors.

    Raises:
        CheckpointError: these are damaged.
    """
    if metadata.get("state_format") != FORMAT:
        return dict(tensors)
    plain = {name: value for name, value in tensors.items() if not name.startswith("state[")}
    rest = unflatten({name: value for name, value in tensors.items() if name not in plain}, metadata)
    if not isinstance(rest, dict):
        raise CheckpointError("is damaged: its structure is no state of a module; use another")
    return {**plain, **rest}


def unflatten(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Any:
    """The reverse of ``flatten``.

    Raises:
        CheckpointError: these are damaged, or something else made them.
    """
    if "state" not in metadata:
        raise CheckpointError("holds tensors, but no state that save_state wrote; load it as weights, or use another")
    if (form := metadata.get("state_format")) != FORMAT:
        raise CheckpointError(f"its format {form!r} is not {FORMAT}; use the version that wrote it")
    if _count(metadata["state"]) > MAX_VALUES:
        raise CheckpointError(f"is damaged: its structure has more than {MAX_VALUES} values; use another")
    unused = dict(tensors)
    try:
        state = _restore(json.loads(metadata["state"]), unused)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"is damaged: its structure makes no sense ({error}); use another") from error
    if unused:
        raise CheckpointError(f"is damaged: nothing in it uses the tensor {min(unused)}; use another")
    return state


def _count(structure: str) -> int:
    """An upper bound of the number of values in this JSON, without parsing it."""
    return sum(map(structure.count, "[{,"))


def _flatten(value: Any, where: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """A value as JSON; each tensor in it is put into ``tensors`` under its place."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where[:60]}…: more than {MAX_DEPTH} levels, or a value that holds itself; save less")
    if type(value) not in _KINDS:
        value = storage.without_numpy(value)
    kind = type(value)
    if value is None or kind in {bool, str}:
        return value
    if kind is int:
        return value if value.bit_length() < 64 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in {Tensor, nn.Parameter} and value.layout is torch.sparse_coo:
        tensor = value.detach()
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        parts |= {"shape": list(tensor.shape), "is_coalesced": tensor.is_coalesced()}
        return {"sparse": [_flatten(part, f"{where}.{name}", tensors, depth + 1) for name, part in parts.items()]}
    if kind in {Tensor, nn.Parameter}:
        tensors[where] = value
        return {"tensor": where}
    if kind in {list, tuple}:
        items = [_flatten(item, f"{where}[{index}]", tensors, depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _MAPPINGS.values():
        return _flatten_mapping(value, where, tensors, depth)
    raise CheckpointError(f"{where}: is {_named(kind)}, which cannot be saved; keep the state in {_PLAIN}")


def _flatten_mapping(value: dict[Any, Any], where: str, tensors: dict[str, Tensor], depth: int) -> dict[str, Any]:
    items = []
    for key, item in value.items():
        plain = storage.without_numpy(key)
        if type(plain) not in {str, int}:
            what = f"has the key {key!r}, {_named(type(key))}, which cannot be saved"
            raise CheckpointError(f"{where}: {what}; use strings and integers as keys")
        items.append([_flatten(plain, where, tensors), _flatten(item, f"{where}[{plain!r}]", tensors, depth + 1)])
    attributes = getattr(value, "__dict__", {})
    if not attributes:
        return {type(value).__name__: items}
    if attributes.keys() != {"_metadata"}:
        raise CheckpointError(f"{where}: has attributes ({', '.join(attributes)}), which cannot be saved; use a dict")
    return {"state_dict": [items, _flatten(attributes["_metadata"], f"{where}._metadata", tensors, depth + 1)]}


def _named(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


_SCALARS: dict[str, Callable[[str], Any]] = {"int": lambda text: int(text, 16), "float": float, "bytes": bytes.fromhex}


def _restore(saved: Any, tensors: dict[str, Tensor]) -> Any:
    """The reverse of ``_flatten``; tensors are taken from ``tensors``."""
    if isinstance(saved, list):
        return [_restore(item, tensors) for item in saved]
    if not isinstance(saved, dict):
        return saved
    [(kind, content)] = saved.items()
    if kind == "tensor":
        return tensors.pop(content)
    if kind == "tuple":
        return tuple(_restore(item, tensors) for item in content)
    if kind in _SCALARS:
        return _SCALARS[kind](content)
    if kind == "sparse":
        indices, values, shape, is_coalesced = (_restore(item, tensors) for item in content)
        # Whatever a file says: indices beyond the shape would be memory of others.
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=True)
    if kind == "state_dict":
        # What torch's modules put beside their tensors: the version of each, from which older states are converted.
        items, metadata = content
        value: Any = _restore({"OrderedDict": items}, tensors)
        value._metadata = _restore(metadata, tensors)
        return value
    return _MAPPINGS[kind]({_restore(key, tensors): _restore(item, tensors) for key, item in content})


def save_state(path: str | Path, state: Any) -> None:
    """Replace a file with a state, durably.

    Args:
        path: the file; the folders above it are made.
        state: None, truth values, integers, floats, strings, bytes, tensors (dense, or sparse as COO), and lists, tuples,
            dicts with keys that are strings or integers, OrderedDicts and Counters of them. NumPy numbers,
            bools and strings are saved as Python values.

    Raises:
        CheckpointError: something in it is of another type.
        StorageError: the storage refuses; what was there is there still.
    """
    storage.replace_durably(Path(path), safetensors_io.encode_tensors(*flatten(state)), "use another path")


def load_state(path: str | Path) -> Any:
    """The state that ``save_state`` wrote, with the same types, except numpy's; tensors are on the CPU.

    Raises:
        CheckpointError: there is no such file, it is damaged, or something else wrote it.
    """
    file = safetensors_io.read_tensors(Path(path).resolve())
    with storage.at_path(path):
        return unflatten(*file)
