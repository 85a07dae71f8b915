"""Lines of slots, and of delimited text, read all at once, by numpy and pyarrow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.config.slots import Slots
from pipeline.data.batch import SparseSlot

_SPACE, _COLON, _NEWLINE = b" :\n"

# Before the text: what every field has before it.
_FRONT = b"\n"

# Behind the text, so that three words of eight bytes can be read from any place of it.
_BACK = b"\0" * 24

# The most digits of a number below 2**64, whatever they are.
_DIGITS = 19

# The most bytes of a word that is hashed at once with others.
_LONG = 1000

_POWERS = np.array([10**count for count in range(9)], np.uint64)


class _Fields(NamedTuple):
    """Where the values of the fields of a text are, in its order.

    Attributes:
        begins, ends: of each field the place of its value's first byte, and of the one behind it.
    """

    begins: Any
    ends: Any

    def at(self, which: Any) -> tuple[Any, Any]:
        """Those of some fields."""
        return self.begins.take(which), self.ends.take(which)


class _Layout(NamedTuple):
    """Which fields have the values of which slots.

    Attributes:
        dense, ids, words: which fields have numbers, which have ids, and which have what is hashed.
        dense_order, sparse_order: the order of these, slot by slot; ids before words.
        dense_gaps, sparse_gaps: in that order, before which values ``padding`` belongs.
        sizes: for each of ``words``, how many ids there are.
        counts: how many ids each sparse slot has in all.
        offsets: (sparse slots, lines): where those of each line begin; None if each line has one of each.
        lines: how many there are.
        lacking: slot -> how many lines lack it.
    """

    dense: Any
    ids: Any
    words: Any
    dense_order: Any
    sparse_order: Any
    dense_gaps: Any
    sparse_gaps: Any
    sizes: Any
    counts: list[int]
    offsets: Any
    lines: int
    lacking: dict[str, int]


class _Names:
    """The names of the fields of a line, which others may have at the same places.

    Args:
        names: in the order of the line.
    """

    def __init__(self, names: Sequence[bytes]) -> None:
        keys = [b" %s:" % name for name in names]
        # The end of the line before.
        keys[0] = b"\n" + keys[0][1:]
        self._lengths = np.array(list(map(len, keys)))
        # Eight bytes of each at a time: from which place on, of which names, what is there, and which bits of it count.
        self._parts = []
        for place in range(0, max(self._lengths), 8):
            longer = np.flatnonzero(self._lengths > place)
            parts = [keys[number][place : place + 8] for number in longer]
            words = np.frombuffer(b"".join(part.ljust(8, b"\0") for part in parts), "<u8")
            masks = np.frombuffer(b"".join((b"\xff" * len(part)).ljust(8, b"\0") for part in parts), "<u8")
            self._parts.append((place, longer, words, masks))

    def find(self, data: Any) -> _Fields | None:
        """The fields of lines that all have these names; None where one has others, or anything else is between them."""
        places, count = _places(data <= _SPACE), len(self._lengths)
        if (len(places) - 1) % count:
            return None
        before = places[:-1].reshape(-1, count)
        for place, longer, words, masks in self._parts:
            where = before[:, longer] + place if place else before
            found = _words(data, where.ravel(), 1).reshape(where.shape)
            found &= masks
            if (found != words).any():
                return None
        return _Fields((before + self._lengths).ravel(), places[1:])


class ColumnParser:
    """Reads the values that ``pipeline.slots.slot_lines.LineParser`` reads, much faster; what it cannot make out is left to that.

    Lines with the same names at the same places are fastest: it is found out once where the values of each slot are.

    Args:
        slots: what the lines may have.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        # The ignored ones come last.
        self._names = [name.encode() for name in (*slots.names, *sorted(slots.ignored))]
        self._array = pa.array(self._names, pa.binary())
        self._hashed = np.array([name in slots.hash_sizes for name in (*slots.names, *slots.ignored)])
        self._sizes = np.array([slots.hash_sizes.get(name, 1) for name in (*slots.names, *slots.ignored)], np.uint64)
        self._columns = np.array([self._names.index(name.encode()) for name in slots.columns], np.int32)
        self._marks = np.frombuffer(b"\n" + slots.delimiter.encode() * (len(slots.columns) - 1), np.uint8)
        # Which have each slot that is read; and those that are a value also where they are empty.
        self._of_slots = [np.flatnonzero(self._columns == number) for number in range(len(slots.names))]
        single = [
            len(columns) == 1 or name in slots.dense for name, columns in zip(slots.names, self._of_slots, strict=True)
        ]
        self._stay = np.array([*single, *[True] * len(slots.ignored)])[self._columns]
        # If all lines before had the same names: these, and which slots they are.
        self._known: tuple[_Names, Any] | None = None
        # The last layout of lines with all the same slots, and these.
        self._made: tuple[Any, _Layout] | None = None

    def __call__(self, text: bytes) -> tuple[dict[str, Tensor | SparseSlot], dict[str, int]] | None:
        """The fields of lines, each with its newline, and how many lines lack each slot; None: read them one by one."""
        # As many editors leave them.
        for blanks in (b"\r\n", b" \n"):
            if not self.slots.columns and text[: text.index(b"\n") + 1].endswith(blanks):
                text = text.replace(blanks, b"\n")
        if self.slots.columns and b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        data = np.frombuffer(bytearray().join((_FRONT, text, _BACK)), np.uint8)
        found = self._find_columns(data) if self.slots.columns else self._find_known(data) or self._find(data)
        if not found:
            return None
        fields, layout = found
        floats = self._read(_floats, data, *fields.at(layout.dense))
        if floats is None or (ids := self._read(_ids, data, *fields.at(layout.ids))) is None:
            return None
        if len(layout.words):
            if (hashed := self._read(_hash, data, *fields.at(layout.words), layout.sizes)) is None:
                return None
            ids = np.concatenate([ids, hashed])
        return self._parsed(_sorted(floats, layout.dense_order), _sorted(ids, layout.sparse_order), layout)

    def _parsed(self, floats: Any, ids: Any, layout: _Layout) -> tuple[dict[str, Tensor | SparseSlot], dict[str, int]]:
        """The values of slots, one slot after the other, as fields; those that a line lacks are filled in."""
        slots, lines = self.slots, layout.lines
        if len(layout.dense_gaps):
            floats = np.insert(floats, layout.dense_gaps, slots.padding)
        if len(layout.sparse_gaps):
            ids = np.insert(ids, layout.sparse_gaps, slots.padding)
        fields: dict[str, Tensor | SparseSlot] = {}
        lengths = [math.prod(shape) * lines for shape in slots.dense.values()]
        parts = torch.split(torch.from_numpy(floats), lengths)
        for (name, shape), part in zip(slots.dense.items(), parts, strict=True):
            fields[name] = part.view(-1, *shape)
        if layout.offsets is None:
            offsets: Sequence[Tensor] = [torch.arange(lines)] * len(slots.sparse)
        else:
            offsets = torch.from_numpy(layout.offsets.copy()).unbind()
        of_slots = torch.split(torch.from_numpy(ids), layout.counts)
        fields |= zip(slots.sparse, map(SparseSlot, of_slots, offsets), strict=True)
        return fields, dict(layout.lacking)

    def _find_known(self, data: Any) -> tuple[_Fields, _Layout] | None:
        """The fields of lines that have the names of those before."""
        if not self._known or not (fields := self._known[0].find(data)):
            return None
        places = self._known[1]
        layout = self._same_layout(places, len(fields.ends) // len(places))
        return (fields, layout) if layout else None

    def _find_columns(self, data: Any) -> tuple[_Fields, _Layout] | None:
        """The fields of delimited text; None where a line has too few or too many, or lacks the target."""
        slots, count = self.slots, len(self._columns)
        marks = _places((data == self._marks[-1]) | (data == _NEWLINE))
        before = marks[:-1].reshape(-1, count) if len(marks) % count == 1 else None
        if before is None or (data.take(before) != self._marks).any():
            return None
        fields, lines = _Fields(before.ravel() + 1, marks[1:]), len(before)
        empty = (fields.begins == fields.ends).reshape(before.shape)
        kept = ~empty | self._stay
        if kept.all():
            layout = self._same_layout(self._columns, lines)
        else:
            fields = _Fields(*fields.at(np.flatnonzero(kept)))
            layout = self._make_layout(np.tile(self._columns, lines)[kept.ravel()], kept.sum(axis=1))
        if not layout or not empty.any():
            return (fields, layout) if layout else None
        lacking = [int(empty[:, columns].all(axis=1).sum()) for columns in self._of_slots]
        layout = layout._replace(lacking=dict(zip(slots.names, lacking, strict=True)))
        return None if layout.lacking[slots.target] else (fields, layout)

    def _read(self, read: Callable[..., Any], data: Any, begins: Any, ends: Any, *others: Any) -> Any:
        """What ``read`` reads between such places, ``padding`` where delimited text has nothing; None where it reads nothing."""
        if not self.slots.columns or (some := begins != ends).all():
            return read(data, begins, ends, *others)
        if (found := read(data, begins[some], ends[some], *(other[some] for other in others))) is None:
            return None
        values = np.full(len(begins), self.slots.padding, found.dtype)
        values[some] = found
        return values

    def _find(self, data: Any) -> tuple[_Fields, _Layout] | None:
        """The fields of any lines; None where they are not just ``name:value name:value``, or there is a fault with the names."""
        ends, colons = _places(data <= _SPACE), _places(data == _COLON)
        starts, ends = ends[:-1] + 1, ends[1:]
        if len(ends) != len(colons) or (colons <= starts).any() or (colons >= ends).any():
            return None
        after = data[ends]
        newlines = np.flatnonzero(after == _NEWLINE)
        if np.count_nonzero(after == _SPACE) + len(newlines) != len(ends):
            return None
        per_line = np.diff(newlines, prepend=-1)
        names = _strings(data, starts, colons, pa.binary())
        places = np.frombuffer(pc.index_in(names, self._array).fill_null(len(self._names)).buffers()[1], np.int32)[::2]
        if (places == len(self._names)).any() or not (layout := self._make_layout(places, per_line)):
            return None
        first = places[: per_line[0]]
        if (per_line == len(first)).all() and (places.reshape(-1, len(first)) == first).all():
            self._known, self._made = (_Names([self._names[place] for place in first]), first), (first, layout)
        return _Fields(colons + 1, ends), layout

    def _same_layout(self, places: Any, lines: int) -> _Layout | None:
        """The layout of lines that all have fields of these slots."""
        if self._made and self._made[0] is places and self._made[1].lines == lines:
            return self._made[1]
        if layout := self._make_layout(np.tile(places, lines), np.full(lines, len(places))):
            self._made = places, layout
        return layout

    def _make_layout(self, places: Any, per_line: Any) -> _Layout | None:
        """The layout of fields of these slots; None where a line has too many or too few values of one."""
        slots, lines = self.slots, len(per_line)
        line = np.repeat(np.arange(lines), per_line)
        read = places < len(slots.names)
        counts = np.bincount(places[read] * lines + line[read], minlength=len(slots.names) * lines)
        counts = counts.reshape(len(slots.names), lines)
        widths = [math.prod(shape) for shape in slots.dense.values()]
        for row, width in zip(counts, widths, strict=False):
            if not np.isin(row, (0, width)).all():
                return None
        if (counts[slots.names.index(slots.target)] != 1).any():
            return None
        is_dense, hashed = places < len(slots.dense), self._hashed[places] & read
        dense, words = np.flatnonzero(is_dense), np.flatnonzero(hashed)
        ids = np.flatnonzero(read & ~is_dense & ~hashed)
        sparse = np.concatenate([ids, words])
        dense_order, sparse_order = _order(places[dense]), _order(places[sparse])
        dense_gaps = _gaps(counts[: len(widths)], widths)
        sparse_gaps = _gaps(counts[len(widths) :], [1] * len(slots.sparse))
        filled = np.maximum(counts[len(widths) :], 1)
        offsets = None if (filled == 1).all() else filled.cumsum(axis=1) - filled
        lacking = dict(zip(slots.names, (counts == 0).sum(axis=1).tolist(), strict=True))
        sizes, sums = self._sizes[places[words]], filled.sum(axis=1).tolist()
        return _Layout(
            dense, ids, words, dense_order, sparse_order, dense_gaps, sparse_gaps, sizes, sums, offsets, lines, lacking
        )  # fmt: skip


def _places(found: Any) -> Any:
    """Where in the text something was found, what is behind it aside."""
    return np.flatnonzero(found[: -len(_BACK)])


def _order(places: Any) -> Any:
    """The order that sorts slots; None where they are in it."""
    return np.argsort(places, kind="stable") if (places[1:] < places[:-1]).any() else None


def _sorted(values: Any, order: Any) -> Any:
    return values if order is None else values.take(order)


def _words(data: Any, places: Any, count: int) -> Any:
    """(places, count): as many words of eight bytes from each place on, the first byte the lowest."""
    # Numpy takes longer for what is not aligned.
    parts = torch.from_numpy(data).as_strided((len(data) - 8 * count + 1, 8 * count), (1, 1))
    return parts.index_select(0, torch.from_numpy(places)).numpy().view("<u8")


def _strings(data: Any, starts: Any, ends: Any, kind: Any) -> Any:
    """Parts of a text, which do not overlap and are in its order; each other one is null: what lies between two of them."""
    offsets = np.empty(2 * len(starts), np.int32)
    offsets[::2], offsets[1::2] = starts, ends
    valid = pa.py_buffer(b"\x55" * (len(offsets) // 8 + 1))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [valid, pa.py_buffer(offsets), pa.py_buffer(data)])


def _floats(data: Any, begins: Any, ends: Any) -> Any:
    """The numbers between such places as float32; None if one is none, or not finite."""
    if not len(begins):
        return np.empty(0, np.float32)
    try:
        numbers = _strings(data, begins, ends, pa.string()).cast(pa.float64())
    except pa.ArrowInvalid:
        return None
    with np.errstate(over="ignore"):
        floats = np.frombuffer(numbers.buffers()[1], np.float64)[: len(numbers) : 2].astype(np.float32)
    return floats if np.isfinite(floats).all() else None


def _ids(data: Any, begins: Any, ends: Any) -> Any:
    """The whole numbers between such places; None if one is not of 1 to 19 digits alone, or out of range."""
    lengths = ends - begins
    if not len(lengths):
        return lengths
    if (longest := lengths.max()) > _DIGITS or not lengths.min():
        return None
    words = _words(data, begins, -(-longest // 8))
    ids = np.zeros(len(begins), np.uint64)
    for place in range(0, longest, 8):
        longer = np.flatnonzero(lengths > place) if place else slice(None)
        count = np.minimum(lengths[longer] - place, 8) if longest > 8 else lengths
        if (digits := _eight_digits(words[longer, place // 8], count)) is None:
            return None
        ids[longer] = ids[longer] * _POWERS[count] + digits if place else digits
    return None if longest == _DIGITS and (ids >= 2**63).any() else ids.view(np.int64)


def _eight_digits(words: Any, lengths: Any) -> Any:
    """The numbers of up to eight digits, the first in the lowest byte; None where there is another byte among them."""
    # With zeros before it; numpy shifts 64 bits out of 64.
    digits = words ^ 0x3030303030303030
    digits <<= (64 - 8 * lengths).view(np.uint64)
    wrong = digits + 0x7676767676767676
    wrong |= digits
    if np.bitwise_or.reduce(wrong) & 0x8080808080808080:
        return None
    # Two digits in each second byte, four in each fourth, all eight.
    for factor, shift, mask in (
        (1 + (10 << 8), 8, 0x00FF00FF00FF00FF),
        (1 + (100 << 16), 16, 0x0000FFFF0000FFFF),
        (1 + (10000 << 32), 32, 0xFFFFFFFF),
    ):
        digits *= factor
        digits >>= shift
        digits &= mask
    return digits


def _gaps(counts: Any, widths: Sequence[int]) -> Any:
    """Before which values, slot by slot and line by line, one belongs where a line lacks a slot: as many as that has."""
    before, missing = counts.cumsum() - counts.ravel(), np.flatnonzero(counts.ravel() == 0)
    return np.repeat(before[missing], np.repeat(np.array(widths, int), counts.shape[1])[missing])


def _hash(data: Any, begins: Any, ends: Any, sizes: Any) -> Any:
    """``fnv1a`` of what is between such places, modulo the sizes; None if that is nothing, or long."""
    lengths = ends - begins
    if not len(lengths):
        return lengths
    # A long one would have all of them looked at for each of its bytes.
    if not (shortest := lengths.min()) or lengths.max() > _LONG:
        return None
    hashed = np.full(len(begins), 0xCBF29CE484222325, np.uint64)
    for place in range(lengths.max()):
        if place < shortest:
            hashed ^= data.take(begins + place)
            hashed *= np.uint64(0x100000001B3)
        else:
            longer = np.flatnonzero(lengths > place)
            hashed[longer] = (hashed[longer] ^ data[begins[longer] + place]) * np.uint64(0x100000001B3)
    return (hashed % sizes).view(np.int64)
