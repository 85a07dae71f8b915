"""What a checkpoint holds, as plain data to show; of tensors shape and type alone, which are all that is read of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint import listing, manifest, state_tree
from pipeline.checkpoint.header import Entry, Header
from pipeline.checkpoint.layout import SUFFIX, TRAINING
from pipeline.checkpoint.tensors import COMPLEX
from pipeline.errors import CheckpointError


def describe(path: Path) -> dict[str, Any]:
    """Counters, numbers, files with their bytes, weights with their types and shapes, and what else it goes on with.

    Raises:
        CheckpointError: the manifest, a size or a header is damaged; nothing else is verified.
        StorageError: the storage refuses for a reason that may pass.
    """
    files = manifest.listed(path)
    found = listing.described(path)
    if found.problem:
        raise CheckpointError(found.problem)
    headers = {name: listing.read_header(path / name) for name in files if name.endswith(SUFFIX)}
    weights = {name.removesuffix(SUFFIX): _tensors(path / name, headers[name]) for name in headers if name != TRAINING}
    return {
        "checkpoint": str(path),
        "counters": found.counters,
        "metrics": found.metrics,
        "iterations": found.iterations,
        "bytes": {name: entry.size for name, entry in files.items()},
        "weights": weights,
        "training": _training(path / TRAINING, headers[TRAINING]) if TRAINING in headers else None,
    }


def _tensors(path: Path, found: Header) -> dict[str, str]:
    """Name -> ``F32 [64, 3]``."""
    try:
        # The format holds these as pairs of numbers.
        pairs = set(json.loads(found.metadata.get(COMPLEX, "[]")))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its list of complex tensors makes no sense ({error}); use another") from error
    return {name: _tensor(entry, name in pairs) for name, entry in sorted(found.entries.items())}


def _tensor(entry: Entry, is_complex: bool) -> str:
    return f"C128 {list(entry.shape[:-1])}" if is_complex else f"{entry.dtype} {list(entry.shape)}"


def _training(path: Path, found: Header) -> dict[str, Any]:
    """The parts of the state, each with what is in it."""
    # Where the tensors would be, there are the entries of the header.
    entries: dict[str, Any] = dict(found.entries)
    try:
        state = state_tree.restore(entries, found.metadata)
        schedulers = {
            phase: {name: f"{one['class']}, {_amount(one['state'])}" for name, one in some.items()}
            for phase, some in state.get("optim_schedulers", {}).items()
        }
        return {**{name: _part(each) for name, each in state.items()}, "optim_schedulers": schedulers}
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is no training state ({error}); use another checkpoint") from error


def _part(value: Any) -> Any:
    return {str(name): _amount(each) for name, each in value.items()} if isinstance(value, Mapping) else _amount(value)


def _amount(value: Any) -> str:
    """``2 tensors, 14 values``."""
    leaves = list(_leaves(value))
    tensors = sum(isinstance(each, Entry) for each in leaves)
    counts = {"tensor": tensors, "value": len(leaves) - tensors}
    return ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count) or "nothing"


def _leaves(value: Any) -> Iterator[Any]:
    """What a nested state is made of."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple) and not isinstance(value, Entry):
        for each in value:
            yield from _leaves(each)
    elif value is not None:
        yield value
