"""The rows of Parquet files, as lines of slots."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.slots import Slots
from pipeline.errors import DataError, one_of
from pipeline.slots.slot_lines import fnv1a

# Rows that are read at once.
_ROWS = 4096


class ParquetRows:
    """The rows of a file, as the text of lines ``slot:value slot:value …``.

    A column is a slot: of numbers, of text, or of lists of these. A null, an empty list, or an empty text that is to be hashed,
    is a slot that the line lacks.

    Args:
        path: of the file.
        slots: what the lines may have.

    Attributes:
        slots: of these lines: as they were given, but for the hash sizes; values are hashed here, since they may have blanks.

    Raises:
        DataError: it cannot be read, or has a column that is no slot.
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
        self._read, self._hashed = [name for name in names if name in slots.names], slots.hash_sizes
        if slots.target not in names:
            raise DataError(f"{path}: there is no column {slots.target}, the target; it has {', '.join(names)}")
        self.slots = slots._replace(hash_sizes={}, delimiter="", columns=())

    def __iter__(self) -> Iterator[bytes]:
        """Some lines at a time, each with a newline."""
        try:
            # Within one group: pyarrow reads no dictionaries of two at once.
            groups = (self._file.iter_batches(_ROWS, [group], self._read) for group in range(self._file.num_row_groups))
            for batch in chain.from_iterable(groups):
                fields = [self._fields(name, batch.column(name)) for name in self._read]
                # Without the first, pyarrow would leave out rows that have nothing but nulls.
                joined = pc.binary_join_element_wise("", *fields, " ", null_handling="skip")
                lines = pa.ListArray.from_arrays([0, len(joined)], pc.utf8_slice_codeunits(joined, 1))
                yield pc.binary_join(lines, "\n")[0].as_buffer().to_pybytes() + b"\n"
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path} cannot be read: {error}") from error

    def _fields(self, name: str, column: Any) -> Any:
        """``name:value name:value …`` for each row; null where it has no value.

        Raises:
            DataError: these are no values of a slot.
        """
        try:
            if not _is_list(column.type):
                return pc.binary_join_element_wise(name, self._text(name, column), ":")
            lengths = pc.list_value_length(column).fill_null(0)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
            # A null within a list is a value that cannot be read.
            values = self._text(name, column.flatten()).fill_null("")
            joined = pc.binary_join(pa.ListArray.from_arrays(offsets, values), f" {name}:")
            return pc.if_else(pc.greater(lengths, 0), pc.binary_join_element_wise(name, joined, ":"), None)
        except pa.ArrowException as error:
            what = f"{self._path}: column {name} is of type {column.type}, and cannot be read: {error}"
            raise DataError(f"{what}; write numbers, text, or lists of these, or add it to ignored_slots") from error

    def _text(self, name: str, values: Any) -> Any:
        """Values as text; those that are hashed, their hashes."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        if name not in self._hashed:
            # A blank would be the end of a value, and begin another.
            return pc.replace_substring_regex(values.cast(pa.string()), "[\\x00-\\x20]", "\u2423")
        words = values if pa.types.is_binary(values.type) else values.cast(pa.string()).cast(pa.binary())
        hashes = {word: str(fnv1a(word) % self._hashed[name]) for word in words.unique().to_pylist() if word}
        return pa.array([hashes.get(word) for word in words.to_pylist()], pa.string())


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
