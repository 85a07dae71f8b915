"""Parsers for lines of slots and for delimited text, which say what is wrong with a bad line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64
from functools import cache, partial
from itertools import accumulate, chain
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, NamedTuple

import torch
from loguru import logger
from torch import Tensor
from torch.utils.data import get_worker_info

from pipeline.config.slots import Slots
from pipeline.data.batch import SparseSlot
from pipeline.data.fetch import in_worker
from pipeline.errors import DataError, nearest

if TYPE_CHECKING:
    from pipeline.slots.slot_columns import ColumnParser

# A number of this size or above is infinite as float32: half a step above the largest.
_TOO_LARGE = 2.0**128 - 2.0**103


class SlotReader:
    """A parser of lines that treats bad lines as ``on_bad_line`` says.

    Args:
        slots: see ``SlotFiles``.
        on_bad_line: see ``SlotFiles``.
        where: see ``SlotFiles``.
    """

    def __init__(self, slots: Slots, on_bad_line: str, where: str) -> None:
        self.on_bad_line = on_bad_line
        self.where = where
        self._lines = LineParser(slots)
        self._columns = _column_parser(slots)
        # How many lines this process and each worker have left out, in memory that they share.
        self._bad = RawArray(c_int64, 256)

    def parse(
        self,
        text: bytes,
        place: Callable[[int], str],
        report: Callable[[str], None] | None = None,
    ) -> Parsed | None:
        """Return the values of lines, without the bad lines; None if all are bad.

        Args:
            text: the lines, each with a newline.
            place: returns the file and the number of a line of the text, which is counted from 0.
            report: called with a message about each line that is left out. By default it is
                ``self.report``.

        Raises:
            DataError: a line is bad, and bad lines are not left out.
        """
        if self._columns and (fields := self._columns(text)):
            return Parsed(*fields)
        parser = self._lines
        try:
            return parser(text)
        except BadLineError:
            good = []
            for number, line in enumerate(text[:-1].split(b"\n")):
                try:
                    good.append(parser.read(line))
                except BadLineError as error:
                    what = f"{self.where}: {place(number)}: {error}"
                    if self.on_bad_line == "error":
                        raise DataError(f"{what}; mend the line, or set on_bad_line: skip") from None
                    (report or self.report)(what)
            return parser.fields(good) if good else None

    def report(self, what: str) -> None:
        """Count a line that is left out, and warn about it as ``on_bad_line`` says."""
        info = get_worker_info()
        cell = (info.id + 1) % len(self._bad) if info else 0
        self._bad[cell] += 1
        if self.on_bad_line == "skip":
            logger.warning(f"{what}; it is left out{in_worker()}")
        elif re.fullmatch("10*", str(self._bad[cell])):
            logger.warning(f"{what}; so far {sum(self._bad)} bad lines were left out, each as often as it was read")


def _column_parser(slots: Slots) -> ColumnParser | None:
    """Return a parser that reads all lines at once; None if its packages are not installed."""
    try:
        from pipeline.slots.slot_columns import ColumnParser  # noqa: PLC0415 - imports numpy and pyarrow, an extra
    except ImportError as error:
        _say_how_to_read_faster(str(error.name))
        return None
    return ColumnParser(slots)


@cache
def _say_how_to_read_faster(missing: str) -> None:
    """Log it once, even if there are multiple datasets."""
    remedy = "pip install 'five-stage-pipeline[rec]' has them read many times as fast"
    logger.info(f"lines of slots are read one by one, since {missing} is not installed; {remedy}")


class BadLineError(Exception):
    """A description of what is wrong with a line."""


class Parsed(NamedTuple):
    """The values of lines.

    Attributes:
        fields: slot -> dense values float32 (batch, …), or a ``SparseSlot``.
        lacking: slot -> how many of the lines lack it.
    """

    fields: dict[str, Tensor | SparseSlot]
    lacking: Mapping[str, int]


class LineParser:
    """A parser that reads lines one by one, and says what is wrong with a bad line.

    Args:
        slots: the slots that the lines may have.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        # Name -> the name as text, and the function that reads a value.
        self._readers: dict[bytes, tuple[str, Callable[[bytes], float]]] = {
            **{name.encode(): (name, _float) for name in slots.dense},
            **{name.encode(): (name, _id) for name in slots.sparse},
            **{name.encode(): (name, partial(_hashed, size=size)) for name, size in slots.hash_sizes.items()},
        }
        self._ignored = {name.encode() for name in slots.ignored}
        # Slot -> how many values a line that has the slot must have.
        self._widths = {name: math.prod(shape) for name, shape in slots.dense.items()} | {slots.target: 1}
        # (name, number from 1) of each column of delimited text.
        self._columns = [(name.encode(), number) for number, name in enumerate(slots.columns, 1)]
        self._dense = {name.encode() for name in slots.dense}
        self._padding = b"%d" % slots.padding

    def __call__(self, text: bytes) -> Parsed:
        """Return the values of lines, each with a newline.

        Raises:
            BadLineError: a line cannot be read.
        """
        return self.fields([self.read(line) for line in text[:-1].split(b"\n")])

    def read(self, line: bytes) -> dict[str, list[float]]:
        """Return the values of each slot that a line has.

        Raises:
            BadLineError: the line cannot be read.
        """
        values: dict[str, list[float]] = {}
        readers = self._readers
        # (name, colon, value) of each field; in delimited text, the number of the column instead of
        # a colon.
        parts = self._split(line) if self._columns else [field.partition(b":") for field in line.split()]
        for name, colon, value in parts:
            if name not in readers or not colon:
                self._check_unread(name, colon)
                continue
            slot, read = readers[name]
            try:
                number = read(value)
            except ValueError as error:
                column = f", column {colon}" if isinstance(colon, int) else ""
                raise BadLineError(f"slot {slot}{column}: {as_text(value)!r} {error}") from None
            if slot in values:
                values[slot].append(number)
            else:
                values[slot] = [number]
        if not values and not self._columns:
            raise BadLineError("has no slot of those in the config")
        for slot, width in self._widths.items():
            if slot in values and len(values[slot]) != width:
                which = ", the target," if slot == self.slots.target else ""
                raise BadLineError(f"slot {slot}{which} has {len(values[slot])} values, and not {width}")
        if self.slots.target not in values:
            raise BadLineError(f"has no slot {self.slots.target}, the target")
        return values

    def fields(self, read: Sequence[Mapping[str, list[float]]]) -> Parsed:
        """Return the values of lines as fields of a batch.

        A slot that a line lacks is filled with padding.

        Args:
            read: what ``read`` has returned for each line.
        """
        slots = self.slots
        fields: dict[str, Tensor | SparseSlot] = {}
        lacking = {}
        for name in slots.names:
            fill = [slots.padding] * math.prod(slots.dense.get(name, (1,)))
            values = [line.get(name, fill) for line in read]
            lacking[name] = sum(part is fill for part in values)
            flat = list(chain.from_iterable(values))
            if name in slots.dense:
                fields[name] = torch.tensor(flat, dtype=torch.float32).view(-1, *slots.dense[name])
            else:
                offsets = torch.tensor([0, *accumulate(map(len, values))][:-1], dtype=torch.int64)
                fields[name] = SparseSlot(torch.tensor(flat, dtype=torch.int64), offsets)
        return Parsed(fields, lacking)

    def _split(self, line: bytes) -> list[tuple[bytes, int, bytes]]:
        """Return (name, column, value) of each field of delimited text that is not empty.

        An empty field of a dense slot has padding as its value if another field of the slot is not
        empty.

        Raises:
            BadLineError: the line has too few or too many fields.
        """
        cells = line.removesuffix(b"\r").split(self.slots.delimiter.encode())
        if len(cells) != len(self._columns):
            raise BadLineError(f"has {len(cells)} fields, and not {len(self._columns)}")
        fields = [(*column, cell) for column, cell in zip(self._columns, cells, strict=True)]
        if b"" not in cells:
            return fields
        filled = {name for name, _, cell in fields if cell} & self._dense
        return [(name, column, cell or self._padding) for name, column, cell in fields if cell or name in filled]

    def _check_unread(self, name: bytes, colon: bytes | int) -> None:
        """Raise an error about a field that is not read, unless its slot is ignored.

        Raises:
            BadLineError: the field is not ``slot:value``, or the config does not name its slot.
        """
        if not colon:
            raise BadLineError(f"{as_text(name)!r} is no slot:value")
        if name not in self._ignored:
            remedy = "add it to sparse_slots, dense_slots or ignored_slots"
            meant = nearest(as_text(name), [*self.slots.names, *self.slots.ignored])
            raise BadLineError(f"slot {as_text(name)} is not in the config{meant}; {remedy}")


def _float(value: bytes) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    # float() accepts underscores: it reads 1_0 as 10.
    if not -_TOO_LARGE < number < _TOO_LARGE or b"_" in value:
        raise ValueError("is no finite number of a dense slot")
    return number


def _id(value: bytes) -> int:
    # isdigit() of bytes accepts only 0 to 9. A number of 18 digits or fewer is in range.
    if value.isdigit() and len(value) < 19:
        return int(value)
    if not value.removeprefix(b"-").isdigit():
        raise ValueError("is no id, a whole number; hash_size makes ids of words")
    number = int(value)
    if not 0 <= number < 2**63:
        raise ValueError("is out of range: ids are from 0 to 2**63 - 1; hash_size makes such ids of others")
    return number


def _hashed(value: bytes, size: int) -> int:
    if not value:
        raise ValueError("is no value")
    return fnv1a(value) % size


def fnv1a(value: bytes) -> int:
    """Return the 64-bit FNV-1a hash of bytes (Fowler, Noll and Vo; RFC 9923).

    It is the same in every process and version, and it is not secret.

    Example:
        >>> from pipeline.slots.slot_lines import fnv1a
        >>> hex(fnv1a(b"foobar"))
        '0x85944171f73967e8'
    """
    hashed = 0xCBF29CE484222325
    for byte in value:
        hashed = (hashed ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return hashed


def as_text(value: bytes) -> str:
    """Return bytes as text for a message. Bytes that are not UTF-8 become escapes."""
    return value.decode(errors="backslashreplace")
