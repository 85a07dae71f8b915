"""What reads lines of slots, and of delimited text, and says what is wrong with one."""

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

# From here on a number is infinite as float32: half a step above the largest.
_TOO_LARGE = 2.0**128 - 2.0**103


class BadLineError(Exception):
    """What is wrong with a line."""


class Parsed(NamedTuple):
    """Lines whose values were read.

    Attributes:
        fields: name -> dense values float32 (batch, …), or a SparseSlot.
        lacking: name -> how many of the lines lack it.
    """

    fields: dict[str, Tensor | SparseSlot]
    lacking: Mapping[str, int]


def fnv1a(value: bytes) -> int:
    """The 64-bit FNV-1a hash of bytes (Fowler, Noll and Vo; RFC 9923): the same everywhere, and not secret."""
    hashed = 0xCBF29CE484222325
    for byte in value:
        hashed = (hashed ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return hashed


class LineParser:
    """Reads lines one by one, and says what is wrong with one.

    Args:
        slots: what they may have.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        # name -> the same as text, and what reads a value.
        self._readers: dict[bytes, tuple[str, Callable[[bytes], float]]] = {
            **{name.encode(): (name, _float) for name in slots.dense},
            **{name.encode(): (name, _id) for name in slots.sparse},
            **{name.encode(): (name, partial(_hashed, size=size)) for name, size in slots.hash_sizes.items()},
        }
        self._ignored = {name.encode() for name in slots.ignored}
        self._widths = {name: math.prod(shape) for name, shape in slots.dense.items()} | {slots.target: 1}
        self._columns = [(name.encode(), number) for number, name in enumerate(slots.columns, 1)]
        self._dense, self._padding = {name.encode() for name in slots.dense}, b"%d" % slots.padding

    def __call__(self, text: bytes) -> Parsed:
        """Read lines.

        Raises:
            BadLineError: one cannot be read.
        """
        return self.fields([self.read(line) for line in text[:-1].split(b"\n")])

    def read(self, line: bytes) -> dict[str, list[float]]:
        """The values of each slot that a line has.

        Raises:
            BadLineError: it cannot be read.
        """
        values: dict[str, list[float]] = {}
        readers = self._readers
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

    def _split(self, line: bytes) -> list[tuple[bytes, int, bytes]]:
        """(name, column, value) of each field of delimited text that is not empty; padding for those of a dense slot that has some."""
        cells = line.removesuffix(b"\r").split(self.slots.delimiter.encode())
        if len(cells) != len(self._columns):
            raise BadLineError(f"has {len(cells)} fields, and not {len(self._columns)}")
        fields = [(*column, cell) for column, cell in zip(self._columns, cells, strict=True)]
        if b"" not in cells:
            return fields
        filled = {name for name, _, cell in fields if cell} & self._dense
        return [(name, column, cell or self._padding) for name, column, cell in fields if cell or name in filled]

    def _check_unread(self, name: bytes, colon: bytes | int) -> None:
        if not colon:
            raise BadLineError(f"{as_text(name)!r} is no slot:value")
        if name not in self._ignored:
            remedy = "add it to sparse_slots, dense_slots or ignored_slots"
            meant = nearest(as_text(name), [*self.slots.names, *self.slots.ignored])
            raise BadLineError(f"slot {as_text(name)} is not in the config{meant}; {remedy}")

    def fields(self, read: Sequence[Mapping[str, list[float]]]) -> Parsed:
        """The values of lines, those that one lacks filled in."""
        slots, lacking = self.slots, {}
        fields: dict[str, Tensor | SparseSlot] = {}
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


def _float(value: bytes) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    # Python reads 1_0 as 10.
    if not -_TOO_LARGE < number < _TOO_LARGE or b"_" in value:
        raise ValueError("is no finite number of a dense slot")
    return number


def _id(value: bytes) -> int:
    # Of bytes, these are 0 to 9 alone.
    if value.isdigit() and len(value) < 19:
        return int(value)
    if not value.removeprefix(b"-").isdigit():
        raise ValueError("is no id, a whole number; hash_size makes ids of words")
    if not 0 <= (number := int(value)) < 2**63:
        raise ValueError("is out of range: ids are from 0 to 2**63 - 1; hash_size makes such ids of others")
    return number


def _hashed(value: bytes, size: int) -> int:
    if not value:
        raise ValueError("is no value")
    return fnv1a(value) % size


def as_text(value: bytes) -> str:
    """Bytes for a message, those that are no text as escapes."""
    return value.decode(errors="backslashreplace")


class SlotReader:
    """Reads lines, and does with bad ones what ``on_bad_line`` says.

    Args:
        slots, on_bad_line, where: see ``SlotFiles``.
    """

    def __init__(self, slots: Slots, on_bad_line: str, where: str) -> None:
        self.on_bad_line, self.where = on_bad_line, where
        self._lines, self._columns = LineParser(slots), _column_parser(slots)
        # How many were left out by this process, and by each worker: memory that they share.
        self._bad = RawArray(c_int64, 256)

    def parse(
        self,
        text: bytes,
        place: Callable[[int], str],
        report: Callable[[str], None] | None = None,
    ) -> Parsed | None:
        """The values of lines, without those that are bad; None if that leaves none.

        Args:
            text: the lines.
            place: file and number of each.
            report: called with what is wrong with one that is left out; None warns of it, as ``on_bad_line`` says.

        Raises:
            DataError: one is bad, and not left out.
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
        """Say of a line that it is left out."""
        info = get_worker_info()
        cell = (info.id + 1) % len(self._bad) if info else 0
        self._bad[cell] += 1
        if self.on_bad_line == "skip":
            logger.warning(f"{what}; it is left out{in_worker()}")
        elif re.fullmatch("10*", str(self._bad[cell])):
            logger.warning(f"{what}; so far {sum(self._bad)} bad lines were left out, each as often as it was read")


def _column_parser(slots: Slots) -> ColumnParser | None:
    """What reads lines all at once; None where what it needs is not installed."""
    try:
        from pipeline.slots.slot_columns import ColumnParser  # noqa: PLC0415 - imports numpy and pyarrow, an extra
    except ImportError as error:
        _say_how_to_read_faster(str(error.name))
        return None
    return ColumnParser(slots)


@cache
def _say_how_to_read_faster(missing: str) -> None:
    """Once, for however many datasets."""
    remedy = "pip install 'five-stage-pipeline[rec]' has them read many times as fast"
    logger.info(f"lines of slots are read one by one, since {missing} is not installed; {remedy}")
