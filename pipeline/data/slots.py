"""Lines ``slot:value slot:value …``, PaddleRec's format, or delimited text: a dataset that gives batches of them."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_int64
from functools import cache, partial
from itertools import accumulate, chain, zip_longest
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from loguru import logger
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from pipeline.config.slots import PARQUET, Slots, SlotsError, make_slots, with_columns
from pipeline.data.batch import SlotBatch, SparseSlot
from pipeline.data.fetch import in_worker
from pipeline.data.file_cache import cached, content_key
from pipeline.data.lines import LineFiles, file_version, find_files, first_line, read_chunks
from pipeline.data.slot_table import VERSION, SlotTable, write_table
from pipeline.errors import ConfigError, DataError
from pipeline.signals import SHUTDOWN
from pipeline.user_code.imports import no_package

if TYPE_CHECKING:
    from pipeline.data.slot_columns import ColumnParser

# Lines that are read at the beginning, to find out which slots there are.
LOOKED_AT = 1000

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
                raise BadLineError(f"slot {slot}{column}: {_text(value)!r} {error}") from None
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
            raise BadLineError(f"{_text(name)!r} is no slot:value")
        if name not in self._ignored:
            remedy = "add it to sparse_slots, dense_slots or ignored_slots"
            raise BadLineError(f"slot {_text(name)} is not in the config; {remedy}")

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


def _text(value: bytes) -> str:
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


class SlotFiles(Dataset[SlotBatch]):
    """The lines of text files ``slot:value slot:value …``, in any order, or of delimited text, batch by batch.

    A batch is a ``SlotBatch``. A slot that a line lacks has ``padding`` there: a sparse one once, a dense one at each place.
    Each line is found by its number, so an epoch can be shuffled, divided among workers and processes, and gone on with, as
    that of any dataset with indices.

    Args:
        data_path: files, folders, patterns, or a list of these; see ``find_files``.
        sparse_slots: names of slots with ids, whole numbers from 0 to 2**63 - 1, any number of them in a line.
        dense_slots: ``name:13`` or ``name:[2,3]``: names of slots with as many numbers in each line that has them.
        ignored_slots: names of slots that the lines have and nobody reads.
        delimiter: the character between the fields of delimited text. An empty one is a slot that the line lacks, or a
            place of a dense one; quotes have no meaning.
        columns: the names of their slots in order, a dense one once for all its columns; by default the first line of each
            file is a header that names that of each column.
        padding: the value of a slot where a line lacks it.
        target: the slot that becomes ``target``, float32 (batch,); by default ``label`` or ``click``, else the first sparse one.
        hash_size: how many ids to make of the values of all sparse slots, the target aside, or ``{slot: N}``: the 64-bit
            FNV-1a hash of the value's bytes, modulo N. It is the same in every process and version.
        on_bad_line: ``error``; ``skip`` to leave such a line out with a warning; ``count`` to leave it out, with a warning at
            the 1st, 10th, 100th and so on of a worker.
        cache: whether all lines are parsed once, into tables that are mapped into memory, for all runs with the same lines and
            slots; or the folder for these, see ``cached``. Of Parquet files that is always so.
        where: what messages begin with.

    Attributes:
        slots: what the lines may have.
        paths: the files, sorted.
        hash_sizes: slot -> how many ids its values are hashed to; a loader's state has it, and refuses another.

    Raises:
        ConfigError: the slots contradict each other.
        DataError: there is no line; or among the first lines, or with ``cache`` anywhere, there is a bad one; or a slot
            occurs in no line at all.
    """

    def __init__(
        self,
        data_path: str | Sequence[str],
        *,
        sparse_slots: str = "",
        dense_slots: str = "",
        ignored_slots: str = "",
        delimiter: str | None = None,
        columns: str | None = None,
        padding: int = 0,
        target: str | None = None,
        hash_size: int | Mapping[str, int] | None = None,
        on_bad_line: str = "error",
        cache: bool | str = False,
        where: str = "dataset",
    ) -> None:
        self.where = where
        try:
            keys = sparse_slots, dense_slots, ignored_slots, padding, target, hash_size, delimiter, columns
            self.slots = make_slots(*keys)
        except SlotsError as error:
            raise ConfigError(f"{where}.{error}") from None
        self.hash_sizes = dict(self.slots.hash_sizes)
        self.paths = find_files(data_path, where)
        self._header = bool(self.slots.delimiter) and not self.slots.columns
        if self.slots.delimiter:
            self.slots = self._delimited(self.slots)
        self._reader = SlotReader(self.slots, on_bad_line, where)
        self._table: SlotTable | None = None
        if cache or any(path.suffix == PARQUET for path in self.paths):
            self._table = self._open_table(cache if isinstance(cache, str) else None)
        else:
            self.lines = LineFiles(self.paths, where, header=self._header)
            self._look()

    def _delimited(self, slots: Slots) -> Slots:
        """The slots of delimited text, whose columns may be named by the header of each file.

        Raises:
            ConfigError: there is no such text.
            DataError: a header has to do with no slots, or with others than that of the first file.
        """
        paths = [path for path in self.paths if path.suffix != PARQUET]
        if not paths:
            raise ConfigError(f"{self.where}.delimiter: would be ignored: Parquet has columns of its own; remove it")
        headers = {path: first_line(path) for path in paths} if self._header else {}
        found: tuple[Path, list[str]] | None = None
        # An empty file has none.
        for path, line in headers.items():
            if not line:
                continue
            names = line.decode("utf-8-sig", "backslashreplace").rstrip("\r\n").split(slots.delimiter)
            where = f"{self.where}: {path}, line 1: the header"
            try:
                with_columns(slots, names)
            except ValueError as error:
                raise DataError(f"{where}: {error}; of files without a header, name the columns") from None
            found = found or (path, names)
            for number, (name, first) in enumerate(zip_longest(names, found[1]), 1):
                if name != first:
                    what = f"column {number} is {name or 'none'}, and {first or 'none'} in {found[0]}"
                    raise DataError(f"{where}: {what}; give all files one header")
        return with_columns(slots, found[1]) if found else slots

    def __len__(self) -> int:
        """How many lines there are; in a table, those that are not left out."""
        return len(self.lines if self._table is None else self._table)

    def __getitem__(self, number: int) -> SlotBatch:
        """A batch of one line."""
        return self.__getitems__([number])

    def __getitems__(self, numbers: Iterable[int]) -> SlotBatch:
        """A batch of the lines of these numbers.

        Raises:
            DataError: a line is bad, or all are where they are left out.
        """
        numbers = list(numbers)
        if self._table is not None:
            return self._batch(self._table.fields(numbers))
        parsed = self._parse(numbers)
        if not parsed:
            what = f"all {len(numbers)} lines of a batch are bad, the first of them {self.lines.place(numbers[0])}"
            raise DataError(f"{self.where}: {what}; mend the files")
        return self._batch(parsed.fields)

    def _batch(self, fields: Mapping[str, Tensor | SparseSlot]) -> SlotBatch:
        name = self.slots.target
        target = fields[name]
        flat = target.values.float() if isinstance(target, SparseSlot) else target.view(-1)
        return SlotBatch({other: field for other, field in fields.items() if other != name} | {"target": flat})

    def _parse(self, numbers: Sequence[int], report: Callable[[str], None] | None = None) -> Parsed | None:
        return self._reader.parse(self.lines.read(numbers), lambda line: self.lines.place(numbers[line]), report)

    def _open_table(self, root: str | None) -> SlotTable:
        """The table of all lines, made unless there is one; and say what is in it."""
        slots, versions = self.slots, list(map(file_version, self.paths))
        settings = [VERSION, {**slots._asdict(), "ignored": sorted(slots.ignored)}, self._reader.on_bad_line]
        key = content_key(self.paths, [*settings, [path.suffix for path in self.paths]])
        folder = cached(key, self._make_table, self.where, root)
        if versions != list(map(file_version, self.paths)):
            shutil.rmtree(folder, ignore_errors=True)
            raise DataError(f"{self.where}: the files in data_path have changed while they were read; begin anew")
        table = SlotTable(folder, slots)
        self._say_coverage(len(table), table.facts["lacking"], len(table), table.facts["bad"])
        return table

    def _make_table(self, folder: Path) -> None:
        logger.info(f"{self.where}: all lines are read into {folder.with_suffix('')}, once")
        lacking, bad = Counter[str](), list[str]()

        def report(what: str) -> None:
            bad.append(what)
            self._reader.report(what)

        def parts() -> Iterator[Mapping[str, Tensor | SparseSlot]]:
            for path in self.paths:
                reader, word, texts = self._open(path)
                first = 1 + (self._header and word == "line")
                for text in texts:
                    SHUTDOWN.raise_if_requested()
                    if parsed := reader.parse(text, partial(_place, path, word, first), report):
                        lacking.update(parsed.lacking)
                        yield parsed.fields
                    first += text.count(b"\n")

        lines = write_table(folder, self.slots, parts(), lambda: {"lacking": lacking, "bad": bad[:1] * len(bad)})
        if absent := [name for name in self.slots.names if lacking[name] == lines]:
            what = f"no line has the slots {', '.join(absent)}" if lines else f"there is no line in {self.paths[0]}"
            raise DataError(f"{self.where}: {what}; mend sparse_slots and dense_slots, or data_path")

    def _open(self, path: Path) -> tuple[SlotReader, str, Iterable[bytes]]:
        """What reads the lines of a file, what these are called there, and their text."""
        if path.suffix != PARQUET:
            return self._reader, "line", read_chunks(path, header=self._header)
        try:
            from pipeline.data.parquet import ParquetRows  # noqa: PLC0415 - imports numpy and pyarrow, an extra
        except ImportError as error:
            raise DataError(f"{self.where}: {no_package(str(path), str(error.name))}") from None
        rows = ParquetRows(path, self.slots)
        return SlotReader(rows.slots, self._reader.on_bad_line, self.where), "row", rows

    def _look(self) -> None:
        """Read the first lines, and say which slots they have.

        Raises:
            DataError: one is bad, or a slot is in no line at all.
        """
        count = min(len(self), LOOKED_AT)
        bad: list[str] = []
        parsed = self._parse(range(count), bad.append)
        lacking = parsed.lacking if parsed else dict.fromkeys(self.slots.names, count)
        good = count - len(bad)
        if absent := [name for name in self.slots.names if lacking[name] >= good and not self._occurs(name, count)]:
            there = ", ".join(sorted(map(_text, self._names(count))))
            what = f"no line has the slots {', '.join(absent)}; the first lines have {there}"
            raise DataError(f"{self.where}: {what}; mend sparse_slots and dense_slots, or data_path")
        self._say_coverage(len(self), lacking, good, bad)

    def _say_coverage(self, count: int, lacking: Mapping[str, int], good: int, bad: Sequence[str]) -> None:
        """Say how many of the first lines have each slot, and which one is the target."""
        files, slots = len(self.paths), self.slots
        incomplete = [f"{name} {good - lacking[name]}" for name in slots.names if lacking[name]]
        some = f" but {', '.join(incomplete)}; where a line lacks one it is {slots.padding}" if incomplete else ""
        which = "all" if good == count else f"of the first {good}, all"
        lines = f"{count:,} lines in {files} file{'s' * (files > 1)}; {which} have all {len(slots.names)} slots{some}"
        some_bad = f"; {len(bad)} bad ones: {bad[0]}" if bad else ""
        logger.info(f"{self.where}: {lines}; the target is {slots.target}{some_bad}")

    def _names(self, count: int) -> set[bytes]:
        if self.slots.columns:
            return {name.encode() for name in self.slots.names if self._occurs(name, 0)}
        return {field.partition(b":")[0] for field in self.lines.read(range(count)).split()}

    def _occurs(self, name: str, begin: int) -> bool:
        """Whether any line from a number on has a slot."""
        field = re.compile(rb"(?:^|\s)" + re.escape(name.encode()) + b":")
        if self.slots.columns:
            mark = re.escape(self.slots.delimiter)
            places = [number for number, column in enumerate(self.slots.columns) if column == name]
            some = "|".join(rf"(?:[^{mark}\n]*{mark}){{{place}}}[^{mark}\r\n]" for place in places)
            field = re.compile(f"^(?:{some})".encode(), re.MULTILINE)
        parts = (range(first, min(first + LOOKED_AT, len(self))) for first in range(begin, len(self), LOOKED_AT))
        return any(field.search(self.lines.read(part)) for part in parts)


def _place(path: Path, word: str, first: int, line: int) -> str:
    return f"{path}, {word} {first + line}"


def _column_parser(slots: Slots) -> ColumnParser | None:
    """What reads lines all at once; None where what it needs is not installed."""
    try:
        from pipeline.data.slot_columns import ColumnParser  # noqa: PLC0415 - imports numpy and pyarrow, an extra
    except ImportError as error:
        _say_how_to_read_faster(str(error.name))
        return None
    return ColumnParser(slots)


@cache
def _say_how_to_read_faster(missing: str) -> None:
    """Once, for however many datasets."""
    remedy = "pip install 'five-stage-pipeline[rec]' has them read many times as fast"
    logger.info(f"lines of slots are read one by one, since {missing} is not installed; {remedy}")
