"""Lines of slots read all at once, by numpy and pyarrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.config.slots import Slots
from pipeline.data.batch import SparseSlot

_SPACE, _COLON, _NEWLINE, _ZERO, _X = b" :\n0x"

# In front of the text, so that there are eight bytes before the end of every name.
_FRONT = b"\0" * 8

# The last bytes of a word that holds so many of a name: the word is read as little-endian.
_MASKS = np.array([0, *(2**64 - 2 ** (64 - 8 * count) for count in range(1, 9))], dtype=np.uint64)


class _Fields(NamedTuple):
    """Where the fields ``name:value`` of a text are, in its order.

    Attributes:
        starts, colons, ends: of each field the place of its first byte, its colon, and the byte behind it.
        per_line: how many each line has.
    """

    starts: Any
    colons: Any
    ends: Any
    per_line: Any


class _Layout(NamedTuple):
    """Which fields have the values of which slots.

    Attributes:
        dense, ids, words: which fields have numbers, which have ids, and which have what is hashed.
        dense_order, sparse_order: the order of these, slot by slot; ids before words.
        counts: (slots, lines): how many values of each slot a line has.
        sizes: for each of ``words``, how many ids there are.
    """

    dense: Any
    ids: Any
    words: Any
    dense_order: Any
    sparse_order: Any
    counts: Any
    sizes: Any


class ColumnParser:
    """Reads the values that ``pipeline.data.slots.LineParser`` reads, much faster; what it cannot make out is left to that.

    Lines with the same names at the same places are fastest: it is found out once where the values of each slot are.

    Args:
        slots: what the lines may have.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        # The ignored ones come last.
        self._names = pa.array([name.encode() for name in (*slots.names, *sorted(slots.ignored))], pa.binary())
        self._hashed = np.array([name in slots.hash_sizes for name in (*slots.names, *slots.ignored)])
        self._sizes = np.array([slots.hash_sizes.get(name, 1) for name in (*slots.names, *slots.ignored)], np.uint64)
        # The layout of the lines before, if all had the same names: (how many lines, the names), and the layout.
        self._known: tuple[tuple[int, bytes], _Layout] | None = None

    def __call__(self, text: bytes) -> tuple[dict[str, Tensor | SparseSlot], dict[str, int]] | None:
        """The fields of lines, each with its newline, and how many lines lack each slot; None: read them one by one."""
        # As many editors leave them.
        for blanks in (b"\r\n", b" \n"):
            if text[: text.index(b"\n") + 1].endswith(blanks):
                text = text.replace(blanks, b"\n")
        text = _FRONT + text
        data = np.frombuffer(text, np.uint8)
        if not (fields := _find_fields(data)) or not (layout := self._layout(data, text, fields)):
            return None
        before = fields.colons[layout.ids]
        # Signs; and what pyarrow reads as a hexadecimal number: 0x…
        if (data[before + 1] < _ZERO).any() or ((data[before + 2] | 32) == _X).any():
            return None
        try:
            with np.errstate(over="ignore"):
                floats = _numbers(text, fields, layout.dense, pa.float64()).astype(np.float32)
            ids = _numbers(text, fields, layout.ids, pa.int64())
        except pa.ArrowInvalid:
            return None
        if not np.isfinite(floats).all():
            return None
        if len(layout.words):
            hashed = hash_parts(data, fields.colons[layout.words] + 1, fields.ends[layout.words]) % layout.sizes
            ids = np.concatenate([ids, hashed.astype(np.int64)])
        return self._parsed(floats[layout.dense_order], ids[layout.sparse_order], layout.counts)

    def _parsed(self, floats: Any, ids: Any, counts: Any) -> tuple[dict[str, Tensor | SparseSlot], dict[str, int]]:
        """The values of slots, one slot after the other, as fields; those that a line lacks are filled in."""
        slots, dense = self.slots, len(self.slots.dense)
        fields: dict[str, Tensor | SparseSlot] = {}
        lengths = [math.prod(shape) for shape in slots.dense.values()]
        floats = _filled(floats, counts[:dense], slots.padding, lengths)
        ids = _filled(ids, counts[dense:], slots.padding, [1] * len(slots.sparse))
        lines = counts.shape[1]
        parts = torch.split(torch.from_numpy(floats), [length * lines for length in lengths])
        for (name, shape), part in zip(slots.dense.items(), parts, strict=True):
            fields[name] = part.view(-1, *shape)
        filled = np.maximum(counts[dense:], 1)
        offsets = torch.from_numpy(filled.cumsum(axis=1) - filled)
        of_slots = torch.split(torch.from_numpy(ids), filled.sum(axis=1).tolist())
        fields |= {name: SparseSlot(*pair) for name, *pair in zip(slots.sparse, of_slots, offsets, strict=True)}
        lacking = zip(slots.names, (counts == 0).sum(axis=1).tolist(), strict=True)
        return fields, dict(lacking)

    def _layout(self, data: Any, text: bytes, fields: _Fields) -> _Layout | None:
        """The layout of the fields; None where there is a fault with the names."""
        first = int(fields.per_line[0])
        one = text[len(_FRONT) : int(fields.ends[first - 1])] if _same_names(data, fields, first) else b""
        key = len(fields.per_line), b" ".join(field.partition(b":")[0] for field in one.split(b" "))
        if one and self._known and self._known[0] == key:
            return self._known[1]
        names = _strings(text, fields.starts, fields.colons, pa.binary())
        places = np.frombuffer(pc.index_in(names, self._names).fill_null(len(self._names)).buffers()[1], np.int32)[::2]
        if (places == len(self._names)).any() or not (layout := self._make_layout(places, fields)):
            return None
        if one:
            self._known = key, layout
        return layout

    def _make_layout(self, places: Any, fields: _Fields) -> _Layout | None:
        """The layout of fields of these slots; None where a line has too many or too few values of one."""
        slots, lines = self.slots, len(fields.per_line)
        line = np.repeat(np.arange(lines), fields.per_line)
        read = places < len(slots.names)
        counts = np.bincount(places[read] * lines + line[read], minlength=len(slots.names) * lines)
        counts = counts.reshape(len(slots.names), lines)
        for row, shape in zip(counts, slots.dense.values(), strict=False):
            if not np.isin(row, (0, math.prod(shape))).all():
                return None
        if (counts[slots.names.index(slots.target)] != 1).any():
            return None
        is_dense, hashed = places < len(slots.dense), self._hashed[places] & read
        dense, words = np.flatnonzero(is_dense), np.flatnonzero(hashed)
        ids = np.flatnonzero(read & ~is_dense & ~hashed)
        sparse = np.concatenate([ids, words])
        dense_order, sparse_order = (np.argsort(places[which], kind="stable") for which in (dense, sparse))
        return _Layout(dense, ids, words, dense_order, sparse_order, counts, self._sizes[places[words]])


def _find_fields(data: Any) -> _Fields | None:
    """Where the fields are; None where lines are not just ``name:value name:value``."""
    separators = np.flatnonzero((data == _SPACE) | (data == _COLON) | (data == _NEWLINE))
    kinds = data[separators]
    between = kinds[1::2]
    if len(kinds) % 2 or (kinds[::2] != _COLON).any() or (between == _COLON).any():
        return None
    colons, ends = separators[::2], separators[1::2]
    starts = np.empty_like(ends)
    starts[0], starts[1:] = len(_FRONT), ends[:-1] + 1
    if (ends - colons == 1).any() or (starts == colons).any():
        return None
    lines = np.flatnonzero(between == _NEWLINE)
    # Or there are other blanks.
    only = np.count_nonzero(data < _SPACE) == len(lines) + len(_FRONT)
    return _Fields(starts, colons, ends, np.diff(lines, prepend=-1)) if only else None


def _same_names(data: Any, fields: _Fields, count: int) -> bool:
    """Whether all lines have as many fields as the first, and the same names at the same places."""
    if (fields.per_line != count).any():
        return False
    colons = fields.colons.reshape(-1, count)
    lengths = colons - fields.starts.reshape(-1, count)
    if (lengths != lengths[0]).any():
        return False
    # Eight bytes at each place.
    words = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
    found, masks = words[colons - 8], _MASKS[np.minimum(lengths[0], 8)]
    if ((found ^ found[0]) & masks).any():
        return False
    # Those are the last eight of each name; of longer ones the others too.
    for begin in range(0, int(lengths[0].max()) - 8, 8):
        longer = fields.starts.reshape(-1, count)[:, lengths[0] > begin + 8]
        found = words[longer + begin]
        if (found != found[0]).any():
            return False
    return True


def _strings(text: bytes, starts: Any, ends: Any, kind: Any) -> Any:
    """Parts of a text, which do not overlap and are in its order; each other one is null: what lies between two of them."""
    offsets = np.stack([starts, ends], axis=1).astype(np.int32).ravel()
    valid = pa.py_buffer(b"\x55" * (len(offsets) // 8 + 1))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [valid, pa.py_buffer(offsets), pa.py_buffer(text)])


def _numbers(text: bytes, fields: _Fields, which: Any, kind: Any) -> Any:
    """The values of some fields."""
    dtype = kind.to_pandas_dtype()
    if not len(which):
        return np.empty(0, dtype)
    numbers = _strings(text, fields.colons[which] + 1, fields.ends[which], pa.string()).cast(kind)
    return np.frombuffer(numbers.buffers()[1], dtype)[: len(numbers) : 2]


def _filled(values: Any, counts: Any, padding: int, lengths: Sequence[int]) -> Any:
    """The values, slot by slot and line by line, with as many of ``padding`` as a slot has where a line lacks it."""
    if counts.all():
        return values
    before = counts.cumsum() - counts.ravel()
    missing = np.flatnonzero(counts.ravel() == 0)
    times = np.repeat(np.array(lengths), counts.shape[1])[missing]
    return np.insert(values, np.repeat(before[missing], times), padding)


def hash_parts(data: Any, starts: Any, ends: Any) -> Any:
    """``fnv1a`` of parts of bytes, of which there is at least one."""
    hashed = np.full(len(starts), 0xCBF29CE484222325, np.uint64)
    for place in range(int((ends - starts).max())):
        longer = np.flatnonzero(ends - starts > place)
        hashed[longer] = (hashed[longer] ^ data[starts[longer] + place]) * np.uint64(0x100000001B3)
    return hashed
