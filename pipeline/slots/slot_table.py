"""Lines of slots that were parsed once: tables that are mapped into memory, of which a batch takes rows."""

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

# Of the files; another one is another table.
VERSION = 1

_FLOATS, _IDS, _STARTS, _COUNTS, _FACTS = "dense.f32", "ids.i64", "starts.i64", "counts.i32", "table.json"


class SlotTable:
    """The values of lines, by number.

    In the files, the values of a line stand together: its numbers; its ids, one slot after the other; where these begin, and
    how many each slot has. The last two are left out where each has one.

    Args:
        folder: where ``write_table`` has put them.
        slots: of the lines.

    Attributes:
        facts: what ``write_table`` was told beside the lines.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, folder: Path, slots: Slots) -> None:
        self.folder, self.slots = folder, slots
        try:
            self._open()
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folder} is damaged: {error}; remove that folder, to make it anew") from error

    def _open(self) -> None:
        slots, self.facts = self.slots, json.loads((self.folder / _FACTS).read_bytes())
        self._lines, ids = self.facts["lines"], self.facts["ids"]
        self._widths = list(map(math.prod, slots.dense.values()))
        self._floats = self._map(_FLOATS, (self._lines, sum(self._widths)), torch.float32)
        self._ids = self._map(_IDS, (ids,), torch.int64)
        self._starts: Tensor | None = None
        if self.facts["ragged"]:
            self._starts = self._map(_STARTS, (self._lines,), torch.int64)
            self._counts = self._map(_COUNTS, (self._lines, len(slots.sparse)), torch.int32)

    def _map(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        path, count = self.folder / name, math.prod(shape)
        if path.stat().st_size != count * dtype.itemsize:
            raise ValueError(f"{name} has a wrong size")
        return (torch.from_file(str(path), size=count, dtype=dtype) if count else torch.empty(0)).view(shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files itself."""
        return SlotTable, (self.folder, self.slots)

    def __len__(self) -> int:
        """How many lines there are."""
        return int(self._lines)

    def fields(self, numbers: Sequence[int]) -> dict[str, Tensor | SparseSlot]:
        """The values of the lines of these numbers: dense ones float32 (batch, …), sparse ones as a SparseSlot."""
        rows, slots = torch.frombuffer(array("q", numbers), dtype=torch.int64), self.slots
        parts = torch.split(self._floats.index_select(0, rows), self._widths, dim=1) if self._widths else ()
        fields: dict[str, Tensor | SparseSlot] = {
            name: part.reshape(-1, *shape) for (name, shape), part in zip(slots.dense.items(), parts, strict=True)
        }
        sparse = self._ragged(rows) if self._starts is not None else self._one_each(rows)
        return fields | dict(zip(slots.sparse, sparse, strict=True))

    def _one_each(self, rows: Tensor) -> Iterable[SparseSlot]:
        """The slots, where each line has one id of each."""
        count = len(self.slots.sparse)
        ids = self._ids.view(self._lines, count).index_select(0, rows).t().contiguous()
        return map(SparseSlot, ids.unbind(), repeat(torch.arange(len(rows))))

    def _ragged(self, rows: Tensor) -> Iterable[SparseSlot]:
        """The slots, where lines have any number of ids of some."""
        assert self._starts is not None
        counts = self._counts.index_select(0, rows).long()
        starts = self._starts.index_select(0, rows).unsqueeze(1) + counts.cumsum(1) - counts
        counts, starts = counts.t().contiguous(), starts.t()
        ids = self._ids.index_select(0, _places(starts.reshape(-1), counts.view(-1)))
        offsets = counts.cumsum(1) - counts
        return map(SparseSlot, torch.split(ids, counts.sum(1).tolist()), offsets.unbind())


def _places(starts: Tensor, counts: Tensor) -> Tensor:
    """The places of ``counts`` values from each of ``starts`` on, one after the other."""
    ends = counts.cumsum(0)
    return torch.repeat_interleave(starts - ends + counts, counts) + torch.arange(int(ends[-1]))


def write_table(
    folder: Path,
    slots: Slots,
    parts: Iterable[Mapping[str, Tensor | SparseSlot]],
    facts: Callable[[], Mapping[str, Any]],
) -> int:
    """Write the files of a ``SlotTable``; how many lines these have.

    Args:
        folder: an empty one.
        slots: of the lines.
        parts: the fields of some lines at a time.
        facts: called when all parts were written, for plain data to keep.
    """
    names = (_FLOATS, _IDS, _STARTS, _COUNTS)
    files = {name: (folder / name).open("wb") for name in names}
    lines = ids = 0
    ragged = False
    try:
        for fields in parts:
            dense = [field.flatten(1) for name in slots.dense if isinstance(field := fields[name], Tensor)]
            sparse = [field for name in slots.sparse if isinstance(field := fields[name], SparseSlot)]
            count = len(sparse[0].offsets if sparse else dense[0])
            if dense:
                files[_FLOATS].write(bytes_of(torch.cat(dense, 1)))
            if sparse:
                counts = torch.stack([_counts(field) for field in sparse])
                starts = counts.view(-1).cumsum(0).view_as(counts) - counts
                values = torch.cat([field.values for field in sparse])
                files[_IDS].write(bytes_of(values[_places(starts.t().reshape(-1), counts.t().reshape(-1))]))
                per_line = counts.sum(0)
                files[_STARTS].write(bytes_of(ids + per_line.cumsum(0) - per_line))
                files[_COUNTS].write(bytes_of(counts.t().int().contiguous()))
                ids, ragged = ids + len(values), ragged or bool((counts != 1).any())
            lines += count
    finally:
        for file in files.values():
            file.close()
    if not ragged:
        for name in (_STARTS, _COUNTS):
            (folder / name).unlink()
    (folder / _FACTS).write_text(json.dumps({**facts(), "lines": lines, "ids": ids, "ragged": ragged}), "utf-8")
    return lines


def _counts(slot: SparseSlot) -> Tensor:
    """How many ids each line has."""
    return torch.diff(slot.offsets, append=torch.tensor([len(slot.values)]))
