"""Tables of lines that were parsed once, mapped into memory. A batch takes rows from them."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.safetensors_io import bytes_of
from pipeline.config.slots import Slots
from pipeline.data.batch import SparseSlot
from pipeline.errors import DataError

# The version of the files, which is part of the name of a table.
VERSION = 1

# The files of a table.
_FLOATS = "dense.f32"
_IDS = "ids.i64"
_STARTS = "starts.i64"
_COUNTS = "counts.i32"
_FACTS = "table.json"


class SlotTable:
    """The values of lines, by number.

    In the files, the values of a line are next to each other: the numbers of its dense slots; its
    ids, slot by slot; where its ids start; and how many ids each slot has. The last two files are
    left out if each line has one id of each slot.

    Args:
        folder: the folder into which ``write_table`` has written the files.
        slots: the slots of the lines.

    Attributes:
        facts: the facts that ``write_table`` has kept, and the numbers of lines and ids.

    Raises:
        DataError: the table is damaged.
    """

    def __init__(self, folder: Path, slots: Slots) -> None:
        self.folder = folder
        self.slots = slots
        try:
            self._open()
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} is damaged: {error}; remove that folder, to make it anew") from error

    def _open(self) -> None:
        self.facts = json.loads((self.folder / _FACTS).read_bytes())
        self._lines = self.facts["lines"]
        # How many numbers each dense slot has.
        self._widths = list(map(math.prod, self.slots.dense.values()))
        self._floats = self._map(_FLOATS, (self._lines, sum(self._widths)), torch.float32)
        self._ids = self._map(_IDS, (self.facts["ids"],), torch.int64)
        self._starts: Tensor | None = None
        if self.facts["ragged"]:
            self._starts = self._map(_STARTS, (self._lines,), torch.int64)
            self._counts = self._map(_COUNTS, (self._lines, len(self.slots.sparse)), torch.int32)

    def _map(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Map a file into memory.

        Raises:
            ValueError: the size of the file does not fit the shape.
        """
        path = self.folder / name
        count = math.prod(shape)
        if path.stat().st_size != count * dtype.itemsize:
            raise ValueError(f"{name} has a wrong size")
        # An empty file cannot be mapped.
        return (torch.from_file(str(path), size=count, dtype=dtype) if count else torch.empty(0)).view(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder and the slots. Another process maps the files itself."""
        return SlotTable, (self.folder, self.slots)

    def __len__(self) -> int:
        """Return the number of lines."""
        return int(self._lines)

    def fields(self, numbers: Sequence[int]) -> dict[str, Tensor | SparseSlot]:
        """Return the values of the lines with these numbers.

        Returns:
            Slot -> float32 (batch, …) for a dense slot, or a ``SparseSlot``.
        """
        slots = self.slots
        rows = torch.frombuffer(array("q", numbers), dtype=torch.int64)
        parts = torch.split(self._floats.index_select(0, rows), self._widths, dim=1) if self._widths else ()
        fields: dict[str, Tensor | SparseSlot] = {
            name: part.reshape(-1, *shape) for (name, shape), part in zip(slots.dense.items(), parts, strict=True)
        }
        sparse = self._ragged(rows) if self._starts is not None else self._one_each(rows)
        return fields | dict(zip(slots.sparse, sparse, strict=True))

    def _one_each(self, rows: Tensor) -> Iterable[SparseSlot]:
        """Return the sparse slots if each line has one id of each slot."""
        count = len(self.slots.sparse)
        ids = self._ids.view(self._lines, count).index_select(0, rows).t().contiguous()
        return map(SparseSlot, ids.unbind(), repeat(torch.arange(len(rows))))

    def _ragged(self, rows: Tensor) -> Iterable[SparseSlot]:
        """Return the sparse slots if some lines have another number of ids of a slot."""
        assert self._starts is not None
        # The shape is [lines, slots].
        counts = self._counts.index_select(0, rows).long()
        starts = self._starts.index_select(0, rows).unsqueeze(1) + counts.cumsum(1) - counts
        # From here on it is [slots, lines].
        counts = counts.t().contiguous()
        starts = starts.t()
        ids = self._ids.index_select(0, _places(starts.reshape(-1), counts.view(-1)))
        offsets = counts.cumsum(1) - counts
        return map(SparseSlot, torch.split(ids, counts.sum(1).tolist()), offsets.unbind())


def write_table(
    folder: Path,
    slots: Slots,
    parts: Iterable[Mapping[str, Tensor | SparseSlot]],
    facts: Callable[[], Mapping[str, Any]],
) -> int:
    """Write the files of a ``SlotTable``.

    Args:
        folder: an empty folder.
        slots: the slots of the lines.
        parts: the fields of some lines at a time.
        facts: called when all parts were written; returns plain data to keep.

    Returns:
        The number of lines.
    """
    files = {name: (folder / name).open("wb") for name in (_FLOATS, _IDS, _STARTS, _COUNTS)}
    lines = 0
    ids = 0
    is_ragged = False
    try:
        for fields in parts:
            dense = [field.flatten(1) for name in slots.dense if isinstance(field := fields[name], Tensor)]
            sparse = [field for name in slots.sparse if isinstance(field := fields[name], SparseSlot)]
            if dense:
                files[_FLOATS].write(bytes_of(torch.cat(dense, 1)))
            if sparse:
                # The shape is [slots, lines].
                counts = torch.stack([_counts(field) for field in sparse])
                starts = counts.view(-1).cumsum(0).view_as(counts) - counts
                values = torch.cat([field.values for field in sparse])
                # From slot by slot to line by line.
                places = _places(starts.t().reshape(-1), counts.t().reshape(-1))
                files[_IDS].write(bytes_of(values[places]))
                per_line = counts.sum(0)
                files[_STARTS].write(bytes_of(ids + per_line.cumsum(0) - per_line))
                files[_COUNTS].write(bytes_of(counts.t().int().contiguous()))
                ids += len(values)
                is_ragged = is_ragged or bool((counts != 1).any())
            lines += len(sparse[0].offsets if sparse else dense[0])
    finally:
        for file in files.values():
            file.close()
    if not is_ragged:
        for name in (_STARTS, _COUNTS):
            (folder / name).unlink()
    kept = {**facts(), "lines": lines, "ids": ids, "ragged": is_ragged}
    (folder / _FACTS).write_text(json.dumps(kept), "utf-8")
    return lines


def _counts(slot: SparseSlot) -> Tensor:
    """Return how many ids each line has, [lines]."""
    return torch.diff(slot.offsets, append=torch.tensor([len(slot.values)]))


def _places(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the places of consecutive values.

    Args:
        starts: the place of the first value of each group.
        counts: how many values each group has.
    """
    ends = counts.cumsum(0)
    return torch.repeat_interleave(starts - ends + counts, counts) + torch.arange(int(ends[-1]))
