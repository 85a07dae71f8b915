"""The rows of Parquet files, as lines of slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.slots import Slots
from pipeline.errors import DataError, one_of
from pipeline.slots.slot_lines import fnv1a

# How many rows are read at once.
_ROWS = 4096


class ParquetRows:
    """The rows of a file, as the text of lines ``slot:value slot:value …``.

    Each column is a slot and holds numbers, text, or lists of these. A row lacks a slot if its
    value is null, an empty list, or an empty text that would be hashed.

    Args:
        path: the file.
        slots: the slots that the lines may have.

    Attributes:
        slots: the slots of the text. They have no hash sizes, because values are hashed here: they
            may have blanks in them.

    Raises:
        DataError: the file cannot be read, a column is not a slot of the config, two columns have
            the same name, or there is no column with the target.
    """

    def __init__(self, path: Path, slots: Slots) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        names = self._file.schema_arrow.names
        known = {*slots.names, *slots.ignored}
        for name in names:
            if name not in known:
                what = f"column {name} is not in the config{one_of(name, known)}"
                raise DataError(f"{path}: {what}; add it to sparse_slots, dense_slots or ignored_slots")
            if names.count(name) > 1:
                raise DataError(f"{path}: two columns are called {name}; rename one")
        self._columns = [name for name in names if name in slots.names]
        self._hash_sizes = slots.hash_sizes
        if slots.target not in names:
            raise DataError(f"{path}: there is no column {slots.target}, the target; it has {', '.join(names)}")
        self.slots = slots._replace(hash_sizes={}, delimiter="", columns=())

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text of some lines at a time, each with a newline.

        Raises:
            DataError: the file cannot be read, or a column does not hold values of a slot.
        """
        try:
            # One row group after the other, because pyarrow cannot read the dictionaries of two at
            # once.
            for group in range(self._file.num_row_groups):
                for batch in self._file.iter_batches(_ROWS, [group], self._columns):
                    yield self._text_of(batch)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path} cannot be read: {error}") from error

    def _text_of(self, batch: Any) -> bytes:
        """Return the text of a batch of rows."""
        fields = [self._fields(name, batch.column(name)) for name in self._columns]
        # The empty text before the fields keeps rows that have only nulls, which pyarrow would
        # leave out. The blank behind it is cut off again.
        joined = pc.binary_join_element_wise("", *fields, " ", null_handling="skip")
        lines = pa.ListArray.from_arrays([0, len(joined)], pc.utf8_slice_codeunits(joined, 1))
        text: bytes = pc.binary_join(lines, "\n")[0].as_buffer().to_pybytes()
        return text + b"\n"

    def _fields(self, name: str, column: Any) -> Any:
        """Return ``name:value name:value …`` for each row; null for a row without a value.

        Raises:
            DataError: the column does not hold values of a slot.
        """
        try:
            if not _is_list(column.type):
                return pc.binary_join_element_wise(name, self._text(name, column), ":")
            lengths = pc.list_value_length(column).fill_null(0)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
            # A null in a list becomes an empty value, which the parser of lines reports.
            values = self._text(name, column.flatten()).fill_null("")
            joined = pc.binary_join(pa.ListArray.from_arrays(offsets, values), f" {name}:")
            return pc.if_else(pc.greater(lengths, 0), pc.binary_join_element_wise(name, joined, ":"), None)
        except pa.ArrowException as error:
            what = f"{self._path}: column {name} is of type {column.type}, and cannot be read: {error}"
            raise DataError(f"{what}; write numbers, text, or lists of these, or add it to ignored_slots") from error

    def _text(self, name: str, values: Any) -> Any:
        """Return values as text; for a hashed slot, the text of their hashes."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        if name not in self._hash_sizes:
            # A blank would end the value and start another one. This character is reported instead.
            return pc.replace_substring_regex(values.cast(pa.string()), "[\\x00-\\x20]", "\u2423")
        words = values if pa.types.is_binary(values.type) else values.cast(pa.string()).cast(pa.binary())
        hashes = {word: str(fnv1a(word) % self._hash_sizes[name]) for word in words.unique().to_pylist() if word}
        return pa.array([hashes.get(word) for word in words.to_pylist()], pa.string())


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
