"""A dataset of lines of slots, batch by batch.

The lines are in PaddleRec's format ``slot:value slot:value …``, or delimited text, or rows of
Parquet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from loguru import logger
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.config.slots import PARQUET, Slots, SlotsError, make_slots, with_columns
from pipeline.data.batch import SlotBatch, SparseSlot
from pipeline.errors import ConfigError, DataError
from pipeline.signals import SHUTDOWN
from pipeline.slots.file_cache import cached, content_key
from pipeline.slots.lines import LineFiles, file_version, find_files, first_line, read_chunks
from pipeline.slots.slot_lines import Parsed, SlotReader, as_text
from pipeline.slots.slot_table import VERSION, SlotTable, write_table
from pipeline.user_code.imports import no_package

# How many lines are read at the start, to find out which slots there are.
LOOKED_AT = 1000


class SlotFiles(Dataset[SlotBatch]):
    r"""The lines of files with slots, batch by batch.

    Text files have lines ``slot:value slot:value …``, with slots in any order, or are delimited
    text. The columns of Parquet files are slots.

    A batch is a ``SlotBatch``. If a line lacks a slot, ``padding`` fills it: a sparse slot gets one
    id, and a dense slot gets it at each place.

    Each line is found by its number. So, like any dataset with indices, an epoch can be shuffled,
    divided among workers and processes, and resumed.

    Args:
        data_path: files, folders, patterns, or a list of these; see ``find_files``.
        sparse_slots: the names of slots with ids: whole numbers from 0 to 2**63 - 1, any number of
            them in a line.
        dense_slots: the names of slots with numbers, such as ``name:13`` or ``name:[2,3]``. A line
            that has the slot has exactly as many numbers.
        ignored_slots: the names of slots that the lines have, but that are not read.
        delimiter: the character between the fields of delimited text. An empty field is a slot that
            the line lacks, or a place of a dense slot without a number. Quotes have no meaning.
        columns: the slots of the columns of delimited text, in order. A dense slot is named once
            for all its columns. By default the first line of each file is a header, which names the
            slot of each column.
        padding: the value of a slot that a line lacks.
        target: the slot that becomes ``target``, float32 (batch,). By default it is ``label`` or
            ``click``, or else the first sparse slot.
        hash_size: how many ids to make from the values of all sparse slots except the target, or
            ``{slot: N}``. The id is the 64-bit FNV-1a hash of the value's bytes, modulo N. It is
            the same in every process and version.
        on_bad_line: ``error``; ``skip`` to leave out bad lines with a warning; ``count`` to leave
            them out with a warning at the 1st, 10th, 100th and so on of each worker.
        cache: whether all lines are parsed once, into tables that are mapped into memory, for all
            runs with the same lines and slots; or the folder for these tables, see ``cached``.
            Parquet files are always cached.
        where: what messages start with.

    Attributes:
        slots: the slots that the lines may have.
        paths: the files, sorted.
        hash_sizes: slot -> how many ids its values are hashed to. The state of a loader includes
            it, and the loader refuses a state with other sizes.

    Raises:
        ConfigError: the slots contradict each other.
        DataError: there is no line; or a bad line is among the first lines, or with ``cache``
            anywhere; or no line has one of the slots.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from pipeline.slots.files import SlotFiles
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "lines.txt")
        ...     _ = path.write_text("click:1 user:7 price:1.5\nclick:0 user:8 price:2.5\n")
        ...     dataset = SlotFiles(str(path), sparse_slots="click user", dense_slots="price:1")
        ...     batch = dataset.__getitems__([0, 1])
        >>> batch["user"].ids
        tensor([7, 8])
        >>> batch["price"]
        tensor([[1.5000],
                [2.5000]])
        >>> batch["target"]
        tensor([1., 0.])
    """

    uses_random_numbers = False

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
            self.slots = make_slots(
                sparse_slots, dense_slots, ignored_slots, padding, target, hash_size, delimiter, columns
            )
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

    def __len__(self) -> int:
        """Return the number of lines; in a table, without the bad lines."""
        return len(self.lines if self._table is None else self._table)

    def __getitem__(self, number: int) -> SlotBatch:
        """Return a batch of one line."""
        return self.__getitems__([number])

    def __getitems__(self, numbers: Iterable[int]) -> SlotBatch:
        """Return a batch of the lines with these numbers.

        Raises:
            DataError: a line is bad; or, if bad lines are left out, all are bad.
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

    def _delimited(self, slots: Slots) -> Slots:
        """Return the slots of delimited text with their columns, which headers may name.

        Raises:
            ConfigError: no file is text.
            DataError: a header does not fit the slots, or differs from the header of the first
                file.
        """
        paths = [path for path in self.paths if path.suffix != PARQUET]
        if not paths:
            raise ConfigError(f"{self.where}.delimiter: would be ignored: Parquet has columns of its own; remove it")
        if not self._header:
            return slots
        headers = {path: first_line(path) for path in paths}
        # The first header, and its file.
        found: tuple[Path, list[str]] | None = None
        for path, line in headers.items():
            # An empty file has no header.
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

    def _open_table(self, root: str | None) -> SlotTable:
        """Return the table of all lines, and log what is in it. If there is none yet, make it.

        Args:
            root: the folder of the tables, see ``cached``.

        Raises:
            DataError: a line is bad and not left out, a file has changed or cannot be read, or the
                table cannot be made.
        """
        slots = self.slots
        versions = list(map(file_version, self.paths))
        plain_slots = {**slots._asdict(), "ignored": sorted(slots.ignored)}
        suffixes = [path.suffix for path in self.paths]
        key = content_key(self.paths, [VERSION, plain_slots, self._reader.on_bad_line == "error", suffixes])
        folder = cached(key, partial(self._make_table, versions), self.where, root)
        table = SlotTable(folder, slots)
        self._refuse_changes(versions)
        self._say_coverage(len(table), table.facts["lacking"], len(table), *table.facts["bad"])
        return table

    def _refuse_changes(self, versions: list[Any]) -> None:
        """Raise a DataError if a file has another version than one of these."""
        if versions != list(map(file_version, self.paths)):
            raise DataError(f"{self.where}: the files in data_path have changed while they were read; begin anew")

    def _make_table(self, versions: list[Any], folder: Path) -> None:
        """Parse all lines, and write the table.

        Args:
            versions: the version of each file.
            folder: where the table is written.

        Raises:
            DataError: a line is bad and not left out, a file has changed or cannot be read, all
                lines are bad, or no line has one of the slots.
        """
        logger.info(f"{self.where}: all lines are read into {folder.with_suffix('')}, once")
        lacking = Counter[str]()
        bad = 0
        first_bad = ""

        def report(what: str) -> None:
            nonlocal bad, first_bad
            bad += 1
            # Without the name of the dataset, which may be another one in a later run that uses the
            # table.
            first_bad = first_bad or what.removeprefix(f"{self.where}: ")
            self._reader.report(what)

        def parts() -> Iterator[Mapping[str, Tensor | SparseSlot]]:
            for path in self.paths:
                reader, word, texts = self._open(path)
                first = 1 + (self._header and word == "line")
                for text in texts:
                    SHUTDOWN.raise_if_requested()
                    parsed = reader.parse(text, partial(_place, path, word, first), report)
                    if parsed:
                        lacking.update(parsed.lacking)
                        yield parsed.fields
                    first += text.count(b"\n")

        lines = write_table(folder, self.slots, parts(), lambda: {"lacking": lacking, "bad": (bad, first_bad)})
        self._refuse_changes(versions)
        if not lines and bad:
            raise DataError(f"{self.where}: all {bad} lines are bad, the first of them {first_bad}; mend the files")
        if not lines:
            files = ", ".join(map(str, self.paths[:3]))
            raise DataError(f"{self.where}: there is no line in {files}; check data_path")
        absent = [name for name in self.slots.names if lacking[name] == lines]
        if absent:
            what = f"no line has the slots {', '.join(absent)}"
            raise DataError(f"{self.where}: {what}; mend sparse_slots and dense_slots, or data_path")

    def _open(self, path: Path) -> tuple[SlotReader, str, Iterable[bytes]]:
        """Open a file.

        Returns:
            The parser for its lines, what a line is called in this file, and the text in parts.

        Raises:
            DataError: the file is Parquet, and pyarrow is not installed or cannot read it.
        """
        if path.suffix != PARQUET:
            return self._reader, "line", read_chunks(path, header=self._header)
        try:
            from pipeline.slots.parquet import ParquetRows  # noqa: PLC0415 - imports numpy and pyarrow, an extra
        except ImportError as error:
            raise DataError(f"{self.where}: {no_package(str(path), str(error.name))}") from None
        rows = ParquetRows(path, self.slots)
        return SlotReader(rows.slots, self._reader.on_bad_line, self.where), "row", rows

    def _look(self) -> None:
        """Read the first lines, and log which slots they have.

        Raises:
            DataError: a line is bad and not left out, or no line has one of the slots.
        """
        count = min(len(self), LOOKED_AT)
        bad: list[str] = []
        parsed = self._parse(range(count), bad.append)
        lacking = parsed.lacking if parsed else dict.fromkeys(self.slots.names, count)
        good = count - len(bad)
        # A slot that the first lines lack may be in a later line.
        absent = [name for name in self.slots.names if lacking[name] >= good and not self._occurs(name, count)]
        if absent:
            there = ", ".join(sorted(map(as_text, self._names(count))))
            what = f"no line has the slots {', '.join(absent)}; the first lines have {there}"
            raise DataError(f"{self.where}: {what}; mend sparse_slots and dense_slots, or data_path")
        first_bad = bad[0].removeprefix(f"{self.where}: ") if bad else ""
        self._say_coverage(len(self), lacking, good, len(bad), first_bad)

    def _say_coverage(self, count: int, lacking: Mapping[str, int], good: int, bad: int, first_bad: str) -> None:
        """Log how many of the lines that were read have each slot, and which slot is the target.

        Args:
            count: the number of all lines.
            lacking: slot -> how many of the good lines lack it.
            good: how many lines were read, without the bad lines.
            bad: how many lines were bad.
            first_bad: what is wrong with the first of them.
        """
        files = len(self.paths)
        slots = self.slots
        incomplete = [f"{name} {good - lacking[name]}" for name in slots.names if lacking[name]]
        some = f" but {', '.join(incomplete)}; where a line lacks one it is {slots.padding}" if incomplete else ""
        which = "all" if good == count else f"of the first {good}, all"
        lines = f"{count:,} lines in {files} file{'s' * (files > 1)}; {which} have all {len(slots.names)} slots{some}"
        some_bad = f"; {bad} bad ones, the first {first_bad}" if bad else ""
        logger.info(f"{self.where}: {lines}; the target is {slots.target}{some_bad}")

    def _names(self, count: int) -> set[bytes]:
        """Return the names of the slots in the first lines.

        In delimited text these are the slots that have a value in any line.
        """
        if self.slots.columns:
            return {name.encode() for name in self.slots.names if self._occurs(name, 0)}
        return {field.partition(b":")[0] for field in self.lines.read(range(count)).split()}

    def _occurs(self, name: str, start: int) -> bool:
        """Return whether any line from a number on has a slot."""
        if self.slots.columns:
            mark = re.escape(self.slots.delimiter)
            places = [number for number, column in enumerate(self.slots.columns) if column == name]
            # One of these fields is not empty.
            some = "|".join(rf"(?:[^{mark}\n]*{mark}){{{place}}}[^{mark}\r\n]" for place in places)
            field = re.compile(f"^(?:{some})".encode(), re.MULTILINE)
        else:
            field = re.compile(rb"(?:^|\s)" + re.escape(name.encode()) + b":")
        parts = (range(first, min(first + LOOKED_AT, len(self))) for first in range(start, len(self), LOOKED_AT))
        return any(field.search(self.lines.read(part)) for part in parts)


def _place(path: Path, word: str, first: int, line: int) -> str:
    return f"{path}, {word} {first + line}"
