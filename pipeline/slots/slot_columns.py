"""A parser that reads many lines of slots, or of delimited text, at once, with numpy and pyarrow.

The text is an array of bytes. A position is an index of this array. Slots have numbers: the slots
that are read come first, in the order of ``Slots.names``, and then the ignored ones.
"""

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

# The text starts with a newline, so there is a blank before every field.
_FRONT = b"\n"

# The text ends with zeros, so that three words of eight bytes can be read from any position.
_BACK = b"\0" * 24

# A number with this many digits is always below 2**64.
_DIGITS = 19

# How many bytes a word may have that is hashed together with others.
_LONG = 1000

# The powers of 10 from 10**0 to 10**8.
_POWERS = np.array([10**count for count in range(9)], np.uint64)


class ColumnParser:
    """A parser that reads all lines of a text at once.

    It returns the same values as ``pipeline.slots.slot_lines.LineParser``, and is much faster. It
    returns None for lines that it cannot read, and ``LineParser`` reads them. Lines that have the
    same names in the same order are fastest. Where the values of each slot are is then computed
    only once.

    Args:
        slots: the slots that the lines may have.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        # The names by slot number. Ignored slots come last.
        self._names = [name.encode() for name in (*slots.names, *sorted(slots.ignored))]
        self._array = pa.array(self._names, pa.binary())
        # Whether the values of each slot are hashed, and to how many ids.
        self._hashed = np.array([name in slots.hash_sizes for name in (*slots.names, *slots.ignored)])
        self._sizes = np.array([slots.hash_sizes.get(name, 1) for name in (*slots.names, *slots.ignored)], np.uint64)
        # The slot number of each column of delimited text, and the byte before each field of a
        # line.
        self._columns = np.array([self._names.index(name.encode()) for name in slots.columns], np.int32)
        self._marks = np.frombuffer(b"\n" + slots.delimiter.encode() * (len(slots.columns) - 1), np.uint8)
        # The columns of each slot that is read.
        self._of_slots = [np.flatnonzero(self._columns == number) for number in range(len(slots.names))]
        # For each column, whether an empty field counts as a value, which is padding. Only a sparse
        # slot with more than one column has no value in an empty field.
        keeps_empty = [
            len(columns) == 1 or name in slots.dense for name, columns in zip(slots.names, self._of_slots, strict=True)
        ]
        self._keeps_empty = np.array([*keeps_empty, *[True] * len(slots.ignored)])[self._columns]
        # The names in each line of an earlier text whose lines all had the same names, and their
        # slot numbers.
        self._known: tuple[_Names, Any] | None = None
        # The slot numbers of the fields in each line of the last such text, and its layout.
        self._made: tuple[Any, _Layout] | None = None

    def __call__(self, text: bytes) -> tuple[dict[str, Tensor | SparseSlot], dict[str, int]] | None:
        """Read lines.

        Args:
            text: the lines, each with a newline.

        Returns:
            The fields of a batch, and how many lines lack each slot; None if the lines must be read
            one by one.
        """
        # Many editors leave blanks at the end of lines.
        for blanks in (b"\r\n", b" \n"):
            if not self.slots.columns and text[: text.index(b"\n") + 1].endswith(blanks):
                text = text.replace(blanks, b"\n")
        if self.slots.columns and b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        data = np.frombuffer(bytearray().join((_FRONT, text, _BACK)), np.uint8)
        # A text with the names of an earlier text is read fastest.
        found = self._find_columns(data) if self.slots.columns else self._find_known(data)
        if not found and not self.slots.columns:
            found = self._find(data)
        if not found:
            return None
        fields, layout = found
        floats = self._read(_floats, data, *fields.at(layout.dense))
        if floats is None:
            return None
        ids = self._read(_ids, data, *fields.at(layout.ids))
        if ids is None:
            return None
        if len(layout.words):
            hashed = self._read(_hash, data, *fields.at(layout.words), layout.sizes)
            if hashed is None:
                return None
            ids = np.concatenate([ids, hashed])
        return self._parsed(_sorted(floats, layout.dense_order), _sorted(ids, layout.sparse_order), layout)

    def _parsed(self, floats: Any, ids: Any, layout: _Layout) -> tuple[dict[str, Tensor | SparseSlot], dict[str, int]]:
        """Return the fields of a batch, and how many lines lack each slot.

        Lacking values are filled with padding.

        Args:
            floats: the values of the dense slots, slot by slot.
            ids: the values of the sparse slots, slot by slot.
            layout: the layout of the lines.
        """
        slots = self.slots
        lines = layout.lines
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
        """Return the fields of lines with the names of earlier lines; None if one has others."""
        if not self._known:
            return None
        names, numbers = self._known
        fields = names.find(data)
        if not fields:
            return None
        layout = self._same_layout(numbers, len(fields.ends) // len(numbers))
        return (fields, layout) if layout else None

    def _find_columns(self, data: Any) -> tuple[_Fields, _Layout] | None:
        """Return the fields of delimited text.

        Returns:
            The fields; None if a line has too few or too many, or lacks the target.
        """
        slots = self.slots
        count = len(self._columns)
        # The positions of all delimiters and newlines.
        marks = _positions((data == self._marks[-1]) | (data == _NEWLINE))
        before = marks[:-1].reshape(-1, count) if len(marks) % count == 1 else None
        if before is None or (data.take(before) != self._marks).any():
            return None
        fields = _Fields(before.ravel() + 1, marks[1:])
        lines = len(before)
        empty = (fields.starts == fields.ends).reshape(before.shape)
        kept = ~empty | self._keeps_empty
        if kept.all():
            layout = self._same_layout(self._columns, lines)
        else:
            fields = _Fields(*fields.at(np.flatnonzero(kept)))
            layout = self._make_layout(np.tile(self._columns, lines)[kept.ravel()], kept.sum(axis=1))
        if not layout or not empty.any():
            return (fields, layout) if layout else None
        # The layout counts padding as a value. A line lacks a slot if all its fields are empty.
        lacking = [int(empty[:, columns].all(axis=1).sum()) for columns in self._of_slots]
        layout = layout._replace(lacking=dict(zip(slots.names, lacking, strict=True)))
        return None if layout.lacking[slots.target] else (fields, layout)

    def _read(self, read: Callable[..., Any], data: Any, starts: Any, ends: Any, *others: Any) -> Any:
        """Read values; an empty field of delimited text has padding as its value.

        Args:
            read: the function that reads them: ``_floats``, ``_ids`` or ``_hash``.
            data: the text.
            starts: the position of each value.
            ends: the position behind each value.
            others: further arguments of ``read``, with one element for each value.

        Returns:
            The values; None if ``read`` cannot read one.
        """
        if not self.slots.columns:
            return read(data, starts, ends, *others)
        filled = starts != ends
        if filled.all():
            return read(data, starts, ends, *others)
        found = read(data, starts[filled], ends[filled], *(other[filled] for other in others))
        if found is None:
            return None
        values = np.full(len(starts), self.slots.padding, found.dtype)
        values[filled] = found
        return values

    def _find(self, data: Any) -> tuple[_Fields, _Layout] | None:
        """Return the fields of any lines.

        Returns:
            The fields; None if the lines are not plain ``name:value name:value …``, or have wrong
            names.
        """
        blanks = _positions(data <= _SPACE)
        colons = _positions(data == _COLON)
        starts = blanks[:-1] + 1
        ends = blanks[1:]
        # Each field must have exactly one colon, with something before and behind it.
        if len(ends) != len(colons) or (colons <= starts).any() or (colons >= ends).any():
            return None
        # Each field must end with a space or a newline.
        after = data[ends]
        newlines = np.flatnonzero(after == _NEWLINE)
        if np.count_nonzero(after == _SPACE) + len(newlines) != len(ends):
            return None
        per_line = np.diff(newlines, prepend=-1)
        names = _strings(data, starts, colons, pa.binary())
        unknown = len(self._names)
        numbers = np.frombuffer(pc.index_in(names, self._array).fill_null(unknown).buffers()[1], np.int32)[::2]
        if (numbers == unknown).any():
            return None
        layout = self._make_layout(numbers, per_line)
        if not layout:
            return None
        first = numbers[: per_line[0]]
        if (per_line == len(first)).all() and (numbers.reshape(-1, len(first)) == first).all():
            self._known = _Names([self._names[number] for number in first]), first
            self._made = first, layout
        return _Fields(colons + 1, ends), layout

    def _same_layout(self, numbers: Any, lines: int) -> _Layout | None:
        """Return the layout of lines that all have the same slots in the same order.

        Args:
            numbers: the slot numbers of the fields in each line.
            lines: the number of lines.
        """
        if self._made and self._made[0] is numbers and self._made[1].lines == lines:
            return self._made[1]
        layout = self._make_layout(np.tile(numbers, lines), np.full(lines, len(numbers)))
        if layout:
            self._made = numbers, layout
        return layout

    def _make_layout(self, numbers: Any, per_line: Any) -> _Layout | None:
        """Return the layout of fields; None if a line has too many or too few values of a slot.

        Args:
            numbers: the slot number of each field.
            per_line: how many fields each line has.
        """
        slots = self.slots
        lines = len(per_line)
        line = np.repeat(np.arange(lines), per_line)
        is_read = numbers < len(slots.names)
        # How many values of each slot each line has, (slots, lines).
        counts = np.bincount(numbers[is_read] * lines + line[is_read], minlength=len(slots.names) * lines)
        counts = counts.reshape(len(slots.names), lines)
        widths = [math.prod(shape) for shape in slots.dense.values()]
        for row, width in zip(counts, widths, strict=False):
            if not np.isin(row, (0, width)).all():
                return None
        if (counts[slots.names.index(slots.target)] != 1).any():
            return None
        is_dense = numbers < len(slots.dense)
        is_hashed = self._hashed[numbers] & is_read
        dense = np.flatnonzero(is_dense)
        ids = np.flatnonzero(is_read & ~is_dense & ~is_hashed)
        words = np.flatnonzero(is_hashed)
        sparse = np.concatenate([ids, words])
        # A line that lacks a sparse slot gets one id, which is padding.
        filled = np.maximum(counts[len(widths) :], 1)
        return _Layout(
            dense=dense,
            ids=ids,
            words=words,
            dense_order=_order(numbers[dense]),
            sparse_order=_order(numbers[sparse]),
            dense_gaps=_gaps(counts[: len(widths)], widths),
            sparse_gaps=_gaps(counts[len(widths) :], [1] * len(slots.sparse)),
            sizes=self._sizes[numbers[words]],
            counts=filled.sum(axis=1).tolist(),
            offsets=None if (filled == 1).all() else filled.cumsum(axis=1) - filled,
            lines=lines,
            lacking=dict(zip(slots.names, (counts == 0).sum(axis=1).tolist(), strict=True)),
        )


class _Fields(NamedTuple):
    """Where the values of the fields are, in the order of the text.

    Attributes:
        starts: the position of the first byte of each value.
        ends: the position behind the last byte of each value.
    """

    starts: Any
    ends: Any

    def at(self, which: Any) -> tuple[Any, Any]:
        """Return the starts and the ends of some fields."""
        return self.starts.take(which), self.ends.take(which)


class _Layout(NamedTuple):
    """Which fields have the values of which slots.

    Attributes:
        dense: the fields with numbers of dense slots.
        ids: the fields with ids.
        words: the fields with words that are hashed to ids.
        dense_order: sorts the values of ``dense`` by slot; None if they are sorted.
        sparse_order: sorts the values of ``ids``, followed by those of ``words``, by slot; None if
            they are sorted.
        dense_gaps: before which of the sorted dense values padding is inserted.
        sparse_gaps: before which of the sorted sparse values padding is inserted.
        sizes: to how many ids each of ``words`` is hashed.
        counts: how many ids each sparse slot has in all lines, including padding.
        offsets: where the ids of each line start, (sparse slots, lines); None if each line has one
            id of each slot.
        lines: the number of lines.
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
    """The names of the fields of a line, to find lines that have the same names in the same order.

    Args:
        names: the names in the order of the line.
    """

    def __init__(self, names: Sequence[bytes]) -> None:
        keys = [b" %s:" % name for name in names]
        # Before the first field is the end of the previous line.
        keys[0] = b"\n" + keys[0][1:]
        self._lengths = np.array(list(map(len, keys)))
        # Names are compared eight bytes at a time. A part is: the place in the name, the names that
        # are long enough to have bytes there, these bytes as a word for each name, and a mask of
        # the bits that count.
        self._parts = []
        for place in range(0, max(self._lengths), 8):
            longer = np.flatnonzero(self._lengths > place)
            parts = [keys[number][place : place + 8] for number in longer]
            words = np.frombuffer(b"".join(part.ljust(8, b"\0") for part in parts), "<u8")
            masks = np.frombuffer(b"".join((b"\xff" * len(part)).ljust(8, b"\0") for part in parts), "<u8")
            self._parts.append((place, longer, words, masks))

    def find(self, data: Any) -> _Fields | None:
        """Return the fields of lines that have only these names; None if a line has others."""
        blanks = _positions(data <= _SPACE)
        count = len(self._lengths)
        if (len(blanks) - 1) % count:
            return None
        before = blanks[:-1].reshape(-1, count)
        for place, longer, words, masks in self._parts:
            where = before[:, longer] + place if place else before
            found = _words(data, where.ravel(), 1).reshape(where.shape)
            found &= masks
            if (found != words).any():
                return None
        return _Fields((before + self._lengths).ravel(), blanks[1:])


def _positions(found: Any) -> Any:
    """Return the positions where something was found, without the zeros behind the text."""
    return np.flatnonzero(found[: -len(_BACK)])


def _order(numbers: Any) -> Any:
    """Return the order that sorts slot numbers; None if they are sorted."""
    return np.argsort(numbers, kind="stable") if (numbers[1:] < numbers[:-1]).any() else None


def _sorted(values: Any, order: Any) -> Any:
    return values if order is None else values.take(order)


def _words(data: Any, positions: Any, count: int) -> Any:
    """Return ``count`` words of eight bytes from each position on, (positions, count).

    The first byte of a word is the lowest.
    """
    # For words that are not aligned, numpy is slower than torch.
    parts = torch.from_numpy(data).as_strided((len(data) - 8 * count + 1, 8 * count), (1, 1))
    return parts.index_select(0, torch.from_numpy(positions)).numpy().view("<u8")


def _strings(data: Any, starts: Any, ends: Any, kind: Any) -> Any:
    """Return parts of a text as an array of pyarrow, without a copy.

    Between two parts there is a null.

    Args:
        data: the text.
        starts: the position of each part; parts are in the order of the text and do not overlap.
        ends: the position behind each part.
        kind: the type of the array.
    """
    # The nulls are the text between the parts. So the validity bits are 1, 0, 1, 0, …
    offsets = np.empty(2 * len(starts), np.int32)
    offsets[::2] = starts
    offsets[1::2] = ends
    valid = pa.py_buffer(b"\x55" * (len(offsets) // 8 + 1))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [valid, pa.py_buffer(offsets), pa.py_buffer(data)])


def _floats(data: Any, starts: Any, ends: Any) -> Any:
    """Return numbers as float32; None if a value is not a finite number.

    Args:
        data: the text.
        starts: the position of each number.
        ends: the position behind each number.
    """
    if not len(starts):
        return np.empty(0, np.float32)
    try:
        numbers = _strings(data, starts, ends, pa.string()).cast(pa.float64())
    except pa.ArrowInvalid:
        return None
    with np.errstate(over="ignore"):
        floats = np.frombuffer(numbers.buffers()[1], np.float64)[: len(numbers) : 2].astype(np.float32)
    return floats if np.isfinite(floats).all() else None


def _ids(data: Any, starts: Any, ends: Any) -> Any:
    """Return whole numbers; None if a value is not 1 to 19 digits, or is out of range.

    Args:
        data: the text.
        starts: the position of each number.
        ends: the position behind each number.
    """
    lengths = ends - starts
    if not len(lengths):
        return lengths
    longest = lengths.max()
    if longest > _DIGITS or not lengths.min():
        return None
    # As many words as the longest number needs, rounded up.
    words = _words(data, starts, -(-longest // 8))
    ids = np.zeros(len(starts), np.uint64)
    for place in range(0, longest, 8):
        longer = np.flatnonzero(lengths > place) if place else slice(None)
        count = np.minimum(lengths[longer] - place, 8) if longest > 8 else lengths
        digits = _eight_digits(words[longer, place // 8], count)
        if digits is None:
            return None
        ids[longer] = ids[longer] * _POWERS[count] + digits if place else digits
    return None if longest == _DIGITS and (ids >= 2**63).any() else ids.view(np.int64)


def _eight_digits(words: Any, lengths: Any) -> Any:
    """Return numbers of up to eight digits; None if a byte is not a digit.

    Args:
        words: the digits, the first one in the lowest byte.
        lengths: how many digits each number has, 0 to 8.
    """
    # Turn the digits "0" to "9" into 0 to 9, and put zeros before them. A shift by all 64 bits
    # gives 0 in numpy.
    digits = words ^ 0x3030303030303030
    digits <<= (64 - 8 * lengths).view(np.uint64)
    # A byte above 9 sets its highest bit.
    wrong = digits + 0x7676767676767676
    wrong |= digits
    if np.bitwise_or.reduce(wrong) & 0x8080808080808080:
        return None
    # Join neighbours: first single digits to pairs, then pairs to four digits, then fours to eight.
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
    """Return before which values padding is inserted, once for each value that a line lacks.

    Args:
        counts: how many values each line has of each slot, (slots, lines).
        widths: how many values of each slot are inserted in a line that lacks it.
    """
    before = counts.cumsum() - counts.ravel()
    missing = np.flatnonzero(counts.ravel() == 0)
    return np.repeat(before[missing], np.repeat(np.array(widths, int), counts.shape[1])[missing])


def _hash(data: Any, starts: Any, ends: Any, sizes: Any) -> Any:
    """Return the ``fnv1a`` hash of words, modulo the sizes; None if a word is empty or long.

    Args:
        data: the text.
        starts: the position of each word.
        ends: the position behind each word.
        sizes: to how many ids each word is hashed.
    """
    lengths = ends - starts
    if not len(lengths):
        return lengths
    shortest = lengths.min()
    # With a long word, all words would be looked at once for each of its bytes.
    if not shortest or lengths.max() > _LONG:
        return None
    hashed = np.full(len(starts), 0xCBF29CE484222325, np.uint64)
    for place in range(lengths.max()):
        if place < shortest:
            hashed ^= data.take(starts + place)
            hashed *= np.uint64(0x100000001B3)
        else:
            longer = np.flatnonzero(lengths > place)
            hashed[longer] = (hashed[longer] ^ data[starts[longer] + place]) * np.uint64(0x100000001B3)
    return (hashed % sizes).view(np.int64)
