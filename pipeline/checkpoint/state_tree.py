"""A nested state <-> its tensors by their place in it, and the rest as JSON.

Whatever JSON has no form of its own for is a mapping from its kind to its content: ``{"tuple": [0.9]}``.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pipeline.errors import CheckpointError

FORMAT = "1"
MAX_DEPTH = 64
"""Levels of a state: what is deeper holds itself."""
MAX_VALUES = 2_000_000
"""Plain values of a state; there may be as many numbers in tensors as the memory holds."""

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KINDS = {kind: name for name, kind in _MAPPINGS.items()}
_PLAIN = "numbers, strings, lists, tuples, dicts and tensors"


def flatten(state: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state by their place in it, and the rest as the texts of a header.

    Raises:
        CheckpointError: something in it cannot be saved.
    """
    found: dict[str, Tensor] = {}
    structure = json.dumps(_flatten(state, "state", found), allow_nan=False, separators=(",", ":"))
    if _count(structure) > MAX_VALUES:
        raise CheckpointError(f"state: has more than {MAX_VALUES} plain values; keep long lists in tensors")
    return found, {"state_format": FORMAT, "state": structure}


def restore(found: dict[str, Tensor], metadata: dict[str, str]) -> Any:
    """The state that ``flatten`` took apart.

    Raises:
        CheckpointError: these are damaged, or something else made them.
    """
    left = dict(found)
    structure = _structure(metadata)
    try:
        state = _restore(structure, left)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"is damaged: its structure makes no sense ({error}); use another") from error
    if left:
        raise CheckpointError(f"is damaged: nothing in it uses the tensor {min(left)}; use another")
    return state


def _structure(metadata: dict[str, str]) -> Any:
    """The JSON of the state."""
    if "state" not in metadata:
        raise CheckpointError("holds tensors, but no state that save_state wrote; load it as weights, or use another")
    if metadata.get("state_format") != FORMAT:
        raise CheckpointError(
            f"its format {metadata.get('state_format')!r} is not {FORMAT}; use the version that wrote it"
        )
    if _count(metadata["state"]) > MAX_VALUES:
        raise CheckpointError(f"is damaged: its structure has more than {MAX_VALUES} values; use another")
    try:
        return json.loads(metadata["state"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is damaged: its structure is no JSON ({error}); use another") from error


def _count(structure: str) -> int:
    """At least as many values as this JSON has; it is not read for it."""
    return sum(map(structure.count, "[{,"))


def _flatten(value: Any, where: str, found: dict[str, Tensor], depth: int = 0) -> Any:
    """A value as JSON, each tensor in it put into ``found`` under its place."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where[:60]}…: more than {MAX_DEPTH} levels, or a value that holds itself; save less")
    kind = type(value)
    if value is None or kind in {bool, str}:
        return value
    if kind is int:
        return value if value.bit_length() < 64 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in {Tensor, nn.Parameter}:
        found[where] = value
        return {"tensor": where}
    if kind in {list, tuple}:
        items = [_flatten(each, f"{where}[{index}]", found, depth + 1) for index, each in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _KINDS:
        return _flatten_mapping(value, where, found, depth)
    raise CheckpointError(f"{where}: is {_named(kind)}, which cannot be saved; keep the state in {_PLAIN}")


def _flatten_mapping(value: dict[Any, Any], where: str, found: dict[str, Tensor], depth: int) -> dict[str, Any]:
    for key in value:
        if type(key) not in {str, int}:
            what = f"has the key {key!r}, {_named(type(key))}, which cannot be saved"
            raise CheckpointError(f"{where}: {what}; use strings and integers as keys")
    items = [
        [_flatten(key, where, found), _flatten(each, f"{where}[{key!r}]", found, depth + 1)]
        for key, each in value.items()
    ]
    attributes = getattr(value, "__dict__", {})
    if not attributes:
        return {_KINDS[type(value)]: items}
    if attributes.keys() != {"_metadata"}:
        raise CheckpointError(f"{where}: has attributes ({', '.join(attributes)}), which cannot be saved; use a dict")
    return {"state_dict": [items, _flatten(attributes["_metadata"], f"{where}._metadata", found, depth + 1)]}


def _named(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
}


def _restore(saved: Any, found: dict[str, Tensor]) -> Any:
    """The value that ``_flatten`` made this JSON of; its tensors are taken out of ``found``."""
    if isinstance(saved, list):
        return [_restore(each, found) for each in saved]
    if not isinstance(saved, dict):
        return saved
    [(kind, content)] = saved.items()
    if kind == "tensor":
        return found.pop(content)
    if kind == "tuple":
        return tuple(_restore(each, found) for each in content)
    if kind in _SCALARS:
        return _SCALARS[kind](content)
    if kind == "state_dict":
        # What torch's modules put beside their tensors: the version of each, from which older states are converted.
        items, metadata = content
        value: Any = _restore({"OrderedDict": items}, found)
        value._metadata = _restore(metadata, found)
        return value
    return _MAPPINGS[kind]({_restore(key, found): _restore(each, found) for key, each in content})
