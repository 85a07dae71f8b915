"""The rows of Parquet files, as lines of slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.slots import Slots
from pipeline.data.slot_columns import hash_parts
from pipeline.errors import DataError, one_of

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
        slots: of these lines: as they were given, but for the hash sizes of columns of text, whose values are hashed here,
            since they may have blanks.

    Raises:
        DataError: it cannot be read, or has a column that is no slot.
    """

    def __init__(self, path: Path, slots: Slots) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        schema = self._file.schema_arrow
        known = {*slots.names, *slots.ignored}
        if unknown := [name for name in schema.names if name not in known]:
            remedy = "add it to sparse_slots, dense_slots or ignored_slots"
            raise DataError(f"{path}: column {unknown[0]} is not in the config{one_of(unknown[0], known)}; {remedy}")
        self._read = [name for name in schema.names if name in slots.names]
        text = {name for name in self._read if _is_text(schema.field(name).type)}
        self._hashed: Mapping[str, int] = {name: size for name, size in slots.hash_sizes.items() if name in text}
        rest = {name: size for name, size in slots.hash_sizes.items() if name not in text}
        self.slots = slots._replace(hash_sizes=rest, delimiter="", columns=())

    def __iter__(self) -> Iterator[bytes]:
        """Some lines at a time, each with a newline."""
        try:
            # Within one group: pyarrow reads no dictionaries of two at once.
            groups = (self._file.iter_batches(_ROWS, [group], self._read) for group in range(self._file.num_row_groups))
            for batch in chain.from_iterable(groups):
                fields = [self._fields(name, batch.column(name)) for name in self._read]
                lines = pc.binary_join_element_wise(*fields, " ", null_handling="skip")
                yield (
                    pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")[0].as_buffer().to_pybytes()
                    + b"\n"
                )
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path} cannot be read: {error}") from error

    def _fields(self, name: str, column: Any) -> Any:
        """``name:value name:value …`` for each row; null where it has no value."""
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not _is_list(column.type):
            return pc.binary_join_element_wise(name, self._text(name, column), ":")
        lengths = pc.list_value_length(column).fill_null(0)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        # A null within a list is a value that cannot be read.
        values = self._text(name, column.flatten()).fill_null("")
        joined = pc.binary_join(pa.ListArray.from_arrays(offsets, values), f" {name}:")
        return pc.if_else(pc.greater(lengths, 0), pc.binary_join_element_wise(name, joined, ":"), None)

    def _text(self, name: str, values: Any) -> Any:
        """Values as text; those that are hashed, their hashes."""
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        if name not in self._hashed or not len(values):
            return values.cast(pa.string())
        words = values.cast(pa.binary())
        offsets = np.frombuffer(words.buffers()[1], np.int32)[words.offset :][: len(words) + 1]
        data = np.frombuffer(words.buffers()[2] or b"", np.uint8)
        some, ids = np.diff(offsets) > 0, np.zeros(len(words), np.int64)
        ids[some] = hash_parts(data, offsets[:-1][some], offsets[1:][some], np.uint64(self._hashed[name]))
        return pc.if_else(pa.array(some), pa.array(ids).cast(pa.string()), None)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if _is_list(kind) or pa.types.is_dictionary(kind) else kind
    tests = pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary
    return any(test(kind) for test in tests)
