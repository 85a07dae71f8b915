"""Lines ``slot:value slot:value …``, PaddleRec's format, or delimited text: a dataset that gives batches of them."""

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

# Lines that are read at the beginning, to find out which slots there are.
LOOKED_AT = 1000


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
        settings = [VERSION, {**slots._asdict(), "ignored": sorted(slots.ignored)}, self._reader.on_bad_line == "error"]
        key = content_key(self.paths, [*settings, [path.suffix for path in self.paths]])
        table = SlotTable(cached(key, partial(self._make_table, versions), self.where, root), slots)
        self._refuse_changes(versions)
        self._say_coverage(len(table), table.facts["lacking"], len(table), *table.facts["bad"])
        return table

    def _refuse_changes(self, versions: list[Any]) -> None:
        if versions != list(map(file_version, self.paths)):
            raise DataError(f"{self.where}: the files in data_path have changed while they were read; begin anew")

    def _make_table(self, versions: list[Any], folder: Path) -> None:
        logger.info(f"{self.where}: all lines are read into {folder.with_suffix('')}, once")
        lacking, bad, first_bad = Counter[str](), 0, ""

        def report(what: str) -> None:
            nonlocal bad, first_bad
            # Another run may call the dataset otherwise.
            bad, first_bad = bad + 1, first_bad or what.removeprefix(f"{self.where}: ")
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

        lines = write_table(folder, self.slots, parts(), lambda: {"lacking": lacking, "bad": (bad, first_bad)})
        self._refuse_changes(versions)
        if not lines:
            what = f"all {bad} lines are bad, the first of them {first_bad}; mend the files" if bad else ""
            files = ", ".join(map(str, self.paths[:3]))
            raise DataError(f"{self.where}: {what or f'there is no line in {files}; check data_path'}")
        if absent := [name for name in self.slots.names if lacking[name] == lines]:
            what = f"no line has the slots {', '.join(absent)}"
            raise DataError(f"{self.where}: {what}; mend sparse_slots and dense_slots, or data_path")

    def _open(self, path: Path) -> tuple[SlotReader, str, Iterable[bytes]]:
        """What reads the lines of a file, what these are called there, and their text."""
        if path.suffix != PARQUET:
            return self._reader, "line", read_chunks(path, header=self._header)
        try:
            from pipeline.slots.parquet import ParquetRows  # noqa: PLC0415 - imports numpy and pyarrow, an extra
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
            there = ", ".join(sorted(map(as_text, self._names(count))))
            what = f"no line has the slots {', '.join(absent)}; the first lines have {there}"
            raise DataError(f"{self.where}: {what}; mend sparse_slots and dense_slots, or data_path")
        self._say_coverage(len(self), lacking, good, len(bad), bad[0].removeprefix(f"{self.where}: ") if bad else "")

    def _say_coverage(self, count: int, lacking: Mapping[str, int], good: int, bad: int, first_bad: str) -> None:
        """Say how many of the first lines have each slot, and which one is the target."""
        files, slots = len(self.paths), self.slots
        incomplete = [f"{name} {good - lacking[name]}" for name in slots.names if lacking[name]]
        some = f" but {', '.join(incomplete)}; where a line lacks one it is {slots.padding}" if incomplete else ""
        which = "all" if good == count else f"of the first {good}, all"
        lines = f"{count:,} lines in {files} file{'s' * (files > 1)}; {which} have all {len(slots.names)} slots{some}"
        some_bad = f"; {bad} bad ones, the first {first_bad}" if bad else ""
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
