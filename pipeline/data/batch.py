"""What a batch is: (inputs, target), or a mapping; and how it gets to a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import groupby, islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pipeline.config.schema import TARGETS
from pipeline.errors import DataError

# Parts of a value, and samples of a batch, that a message lists.
MAX_LISTED = 8

# Parts of a value that are looked at for a message.
MAX_EXAMINED = 256

# Equal parts in a row that a message lists one by one; more are listed once, with their number.
MAX_REPEATED = 3


class EmptySlice(NamedTuple):
    """What a loader gives a rank whose slice of a global batch has no sample.

    Attributes:
        batch: stands in for it, with weight 0: the first sample of the global batch, or the last batch of a stream.
    """

    batch: Any


class SparseSlot(NamedTuple):
    """The ids of one slot, as torch's EmbeddingBag takes them: ``bag(*slot)``.

    Attributes:
        values: int64 (ids,), those of each line after those of the line before.
        offsets: int64 (batch,), where those of each line begin; other slots may have the same tensor.
    """

    values: Tensor
    offsets: Tensor

    @property
    def ids(self) -> Tensor:
        """The ids, int64 (batch,), of a slot of which each line has one.

        Raises:
            DataError: some line has more.
        """
        if len(self.values) != len(self.offsets):
            what = f"{len(self.offsets)} lines have {len(self.values)} ids of a slot"
            raise DataError(f"{what}, and .ids is for one each; use an EmbeddingBag: bag(*slot)")
        return self.values


class SlotBatch(Mapping[str, Any]):
    """Lines of slots: a mapping of the slot's name to its values, whose ``len`` is the number of lines.

    Args:
        fields: a dense slot is float32 (batch, …), a sparse one a ``SparseSlot``; ``target`` is float32 (batch,).
    """

    def __init__(self, fields: Mapping[str, Tensor | SparseSlot]) -> None:
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> Any:
        """The values of a slot."""
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the slots."""
        return iter(self._fields)

    def __len__(self) -> int:
        """How many lines there are."""
        first = next(iter(self._fields.values()))
        return len(first.offsets if isinstance(first, SparseSlot) else first)

    def to(self, *args: Any, **keywords: Any) -> SlotBatch:
        """The same on a device, in three copies however many slots there are, and one for each tensor that is not float32."""
        layout, *parts = self._packed()
        return _unpacked(layout, *(part.to(*args, **keywords) for part in parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """From a worker, three tensors come rather than one or two for each slot."""
        return _unpacked, self._packed()

    def _packed(self) -> tuple[Any, ...]:
        """What each slot is; all numbers, all ids, all offsets; and the tensors that are not float32.

        A slot is (name, shape) of numbers, (name, how many) of ids, or (name, None).
        """
        sparse = [field for field in self._fields.values() if isinstance(field, SparseSlot)]
        tensors = [field for field in self._fields.values() if not isinstance(field, SparseSlot)]
        dense = [field.flatten() for field in tensors if field.dtype is torch.float32]
        layout = [
            (name, len(field.values) if isinstance(field, SparseSlot) else _shape(field))
            for name, field in self._fields.items()
        ]
        ids = [
            torch.cat([slot[part] for slot in sparse]) if sparse else torch.empty(0, dtype=torch.int64)
            for part in (0, 1)
        ]
        others = [field for field in tensors if field.dtype is not torch.float32]
        return layout, torch.cat(dense) if dense else torch.empty(0), *ids, *others


def _shape(field: Tensor) -> torch.Size | None:
    return field.shape if field.dtype is torch.float32 else None


def _unpacked(layout: list[Any], floats: Tensor, values: Tensor, offsets: Tensor, *others: Tensor) -> SlotBatch:
    """What ``SlotBatch._packed`` has packed."""
    sparse = [size for _, size in layout if isinstance(size, int)]
    shapes = [shape for _, shape in layout if isinstance(shape, torch.Size)]
    ids = map(SparseSlot, torch.split(values, sparse), offsets.chunk(len(sparse)) if sparse else ())
    dense, rest = map(Tensor.view, torch.split(floats, [shape.numel() for shape in shapes]), shapes), iter(others)
    kinds: dict[type, Any] = {int: ids, torch.Size: dense, type(None): rest}
    return SlotBatch({name: next(kinds[type(size)]) for name, size in layout})


def split(batch: Any) -> tuple[Any, Any]:
    """(inputs, target) of a batch: a pair, or a mapping with one of ``TARGETS``.

    Raises:
        DataError: it is neither.
    """
    match batch:
        # Unlike isinstance and len, a pattern calls nothing; this stands in the training loop.
        case [inputs, target]:
            return inputs, target
    if isinstance(batch, Mapping):
        for name in TARGETS:
            if name in batch:
                inputs = {key: value for key, value in batch.items() if key != name}
                return SlotBatch(inputs) if type(batch) is SlotBatch else inputs, batch[name]
        keys = ", ".join(map(str, batch))
        none = f"a batch with the keys {keys} has none of {', '.join(map(repr, TARGETS))}"
        raise DataError(f"{none}; name one so, or write a Brain")
    what = f"a batch is {shape_of(batch)}, not (inputs, target) and not a mapping"
    raise DataError(f"{what}; return a pair from the dataset, or write a Brain with its own target()")


def is_unlabelled(batch: Any) -> bool:
    """Whether a batch is inputs alone: a tensor, a list or tuple of one part, or a mapping without any of ``TARGETS``."""
    if isinstance(batch, Mapping):
        return not any(name in batch for name in TARGETS)
    return isinstance(batch, Tensor) or (isinstance(batch, list | tuple) and len(batch) == 1)


def count_samples(batch: Any) -> int:
    """How many samples a batch holds: the length of the first tensor in it, else of an object with ``to``; 0 for none.

    Of such an object without a length it is that of the first tensor in its attributes.
    """
    first = batch
    # The usual case, without a call: this stands in the training loop.
    while (type(first) is list or type(first) is tuple) and first:
        first = first[0]
    if type(first) is Tensor and first.ndim:
        return first.shape[0]
    if type(batch) is SlotBatch:
        return len(batch)
    if samples := next(filter(None, lengths(batch)), 0):
        return samples
    if isinstance(batch, Tensor | Mapping) or not hasattr(batch, "to"):
        return 0
    return len(batch) if isinstance(batch, Sized) else next(filter(None, lengths(getattr(batch, "__dict__", {}))), 0)


def count_targets(batch: Any) -> int:
    """Return how many samples a batch of a plain module holds: the length of its target.

    A target that is no tensor, or a single number, has no length. Then it is ``count_samples``.
    """
    match batch:
        # Unlike isinstance and len, a pattern calls nothing; this stands in the training loop.
        case [_, target]:
            pass
        case SlotBatch():
            return len(batch)
        case _:
            target = target_in(batch)
    if (type(target) is Tensor or isinstance(target, Tensor)) and target.ndim:
        return target.shape[0]
    return count_samples(batch)


def target_in(batch: Any) -> Any:
    """Return the target of a pair or of a mapping; None if there is none."""
    match batch:
        case [_, target]:
            return target
    if type(batch) is dict or isinstance(batch, Mapping):
        for name in TARGETS:
            if name in batch:
                return batch[name]
    return None


def is_countable(batch: Any) -> bool:
    """Return whether something in a batch says how many samples it holds, even if it is none."""
    if isinstance(batch, Tensor):
        return batch.ndim > 0
    if isinstance(batch, Mapping):
        return any(map(is_countable, batch.values()))
    if isinstance(batch, list | tuple) and any(map(is_countable, batch)):
        return True
    if not hasattr(batch, "to"):
        return False
    return isinstance(batch, Sized) or is_countable(getattr(batch, "__dict__", {}))


def differing_lengths(batch: Any) -> str:
    """Describe the first input and the target of a batch if they differ in their first dimension.

    Returns:
        ``""`` if they do not differ, or if one of them is no tensor with a dimension.
    """
    target = target_in(batch)
    if not isinstance(target, Tensor) or not target.ndim or isinstance(batch, SlotBatch):
        return ""
    inputs, _ = split(batch)
    name, first = _first_tensor(inputs)
    if first is None or first.shape[0] == target.shape[0]:
        return ""
    named = f" '{name}'" if name else ""
    shapes = f"shape {tuple(first.shape)}, and the target {tuple(target.shape)}"
    return f"the first input{named} of a batch has {shapes}"


def _first_tensor(inputs: Any) -> tuple[str, Tensor | None]:
    """Return the first tensor in the inputs that has a dimension, and its key in a mapping."""
    if isinstance(inputs, Tensor):
        return "", inputs if inputs.ndim else None
    if isinstance(inputs, Mapping):
        parts = [(str(name), part) for name, part in inputs.items()]
    elif isinstance(inputs, list | tuple):
        parts = [("", part) for part in inputs]
    else:
        return "", None
    for name, part in parts:
        inner, first = _first_tensor(part)
        if first is not None:
            return name or inner, first
    return "", None


def lengths(batch: Any) -> Iterator[int]:
    """The length of each tensor in a batch, however deep in lists, tuples and mappings; of a single number, 0."""
    if isinstance(batch, Tensor):
        yield batch.shape[0] if batch.ndim else 0
    parts = batch if isinstance(batch, list | tuple) else batch.values() if isinstance(batch, Mapping) else ()
    for part in parts:
        yield from lengths(part)


def raise_no_samples(batch: Any) -> NoReturn:
    """Refuse a batch without a sample in it, which would count nothing in any mean."""
    what = f"a batch is {shape_of(batch)} with no tensor to count samples by"
    remedy = "define count_samples in the Brain, or name a function in count_samples of the phase"
    raise DataError(f"{what}; {remedy}")


def shape_of(value: Any, depth: int = 0) -> str:
    """What a value is, for messages, with what it holds, so many levels deep."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    kind = f"a {type(value).__name__}"
    if not isinstance(value, Mapping | list | tuple):
        return kind
    if not depth or not value:
        return f"{kind} of {len(value)}"
    if isinstance(value, Mapping):
        texts = (f"{name}: {shape_of(part, depth - 1)}" for name, part in value.items())
    else:
        texts = (shape_of(part, depth - 1) for part in value)
    return f"{kind} of {len(value)} ({listed(texts)})"


def listed(texts: Iterable[str]) -> str:
    """Join texts with commas for a message, as far as it needs them.

    A text that is repeated in a row is given once: ``64 times a str``.
    """
    remaining = iter(texts)
    parts: list[str] = []
    for text, group in groupby(islice(remaining, MAX_EXAMINED)):
        count = len(list(group))
        parts += [text] * count if count <= MAX_REPEATED else [f"{count} times {text}"]
    is_cut = len(parts) > MAX_LISTED or next(remaining, None) is not None
    return ", ".join([*parts[:MAX_LISTED], *(["…"] if is_cut else [])])


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it, however deep in tuples, lists and mappings, on ``device``.

    So is whatever has a method ``to(device)`` (a PackedSequence, a graph, a class of the user's own), by that method.
    Anything else stays as it is.
    """
    if isinstance(batch, Tensor):
        # A copy to the CPU is read at once.
        return batch.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def on_device(loader: Iterable[Any], device: torch.device) -> Iterable[Any]:
    """The batches of a loader on a device; the loader itself if they are there already."""
    return loader if device.type == "cpu" else (to_device(batch, device) for batch in loader)
