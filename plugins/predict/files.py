"""The formats of what an infer runner writes of its predictions: a line of JSON per sample, or tensors by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from loguru import logger
from torch import Tensor

from pipeline.checkpoint.safetensors_io import encode_tensors
from pipeline.checkpoint.storage import DISK, finite, make_folder, replacing, storing
from pipeline.data.batch import SparseSlot, shape_of
from pipeline.errors import DataError

# What to do where the storage refuses the file.
_OTHERWISE = "name another path in predictions"


class JsonLines:
    """Writes one JSON line per sample: its index in the dataset, its id, prediction and target.

    Args:
        path: of the file, for messages.
        file: the open file.

    Attributes:
        count: how many samples were taken.
        newest: the largest index so far; -1 before the first.
        is_sorted: whether the indices have been ascending so far.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.count = 0
        self.newest = -1
        self.is_sorted = True

    def __call__(self, predictions: Any, target: Any, batch: Any, indices: Sequence[int] | None = None) -> None:
        """Write a batch; reading the numbers makes a GPU wait, once per batch.

        Args:
            predictions: those of the batch.
            target: that of the batch; None if it has none.
            batch: the batch.
            indices: ascending, of its samples in the dataset; None: the samples are counted.
        """
        rows = _rows(_columns(predictions, target, batch))
        lines = []
        for index, row in zip(_row_indices(len(rows), indices, self.count), rows, strict=True):
            try:
                lines.append(json.dumps(finite({"index": index, **row})))
            except (TypeError, ValueError) as error:
                raise DataError(f"predictions: cannot be written as JSON ({error}); return numbers or text") from error
        self.count += len(lines)
        if indices:
            self.is_sorted = self.is_sorted and indices[0] > self.newest
            self.newest = max(self.newest, indices[-1])
        with storing(self.path, _OTHERWISE):
            self.file.write("".join(f"{line}\n" for line in lines).encode())

    def finish(self) -> None:
        """Sort the lines by their indices, if the batches came in another order."""
        if self.is_sorted:
            return
        self.file.seek(0)
        lines = self.file.read().splitlines(keepends=True)
        keys = [json.loads(line)["index"] for line in lines]
        if None in keys:
            what = "some batches have other numbers of rows than of samples"
            logger.warning(f"{self.path}: {what}, so the predictions stay in the order of the batches")
            return
        order = sorted(range(len(lines)), key=keys.__getitem__)
        self.file.seek(0)
        self.file.writelines(lines[place] for place in order)


class TensorsByName:
    """Keeps the predictions of all samples, and writes them in the end as tensors by name; the arguments are those of JsonLines.

    The names are ``index``, ``prediction`` and ``target``, or ``prediction.<name>`` where a batch
    has several by name; ``id`` is a tensor too where it is one in the batch, else a list in JSON in
    the metadata of the file.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.batches: list[dict[str, Tensor]] = []
        self.ids: list[Any] = []
        self.indices: list[int] = []

    def __call__(self, predictions: Any, target: Any, batch: Any, indices: Sequence[int] | None = None) -> None:
        """Take in a batch; the arguments are those of JsonLines."""
        columns = _columns(predictions, target, batch)
        texts = list(columns.pop("id")) if isinstance(columns.get("id"), list | tuple) else []
        tensors = dict(_tensors(columns))
        _check_counts({**tensors, "id": texts} if texts else tensors)
        rows = len(next(iter(tensors.values()), texts))
        own = _row_indices(rows, indices, len(self.indices))
        self.indices += (_UNKNOWN if index is None else index for index in own)
        self.batches.append(tensors)
        self.ids += texts

    def finish(self) -> None:
        """Write all, in the order of their indices.

        Raises:
            DataError: batches have other names or shapes.
        """
        try:
            tensors = {name: torch.cat([batch[name] for batch in self.batches]) for name in self.batches[0]}
        except (KeyError, RuntimeError) as error:
            what = f"predictions: those of one batch do not fit those of another ({error})"
            raise DataError(f"{what}; return rows of one shape, or write jsonl") from error
        index, ids = torch.tensor(self.indices), self.ids
        if _UNKNOWN not in self.indices:
            index, order = torch.sort(index, stable=True)
            tensors = {name: tensor[order] for name, tensor in tensors.items()}
            ids = [ids[place] for place in order.tolist()] if ids else ids
        tensors = {"index": index, **tensors}
        self.file.write(encode_tensors(tensors, {"id": json.dumps(ids)} if ids else None))


# The index of a row that belongs to no single sample, in a tensor.
_UNKNOWN = -1


def _row_indices(rows: int, indices: Sequence[int] | None, count: int) -> Sequence[int] | Sequence[None]:
    """Return an index for each row of a batch.

    Args:
        rows: how many there are.
        indices: those of the samples; None: the rows are counted.
        count: how many rows came before.

    Returns:
        None for each row if the batch has another number of rows than of samples.
    """
    if indices is None:
        return range(count, count + rows)
    return indices if len(indices) == rows else [None] * rows


def jsonl(path: Path) -> AbstractContextManager[JsonLines]:
    """The format ``jsonl``: a line of JSON per sample."""
    return _writing(path, JsonLines)


def safetensors(path: Path) -> AbstractContextManager[TensorsByName]:
    """The format ``safetensors``: tensors by name."""
    return _writing(path, TensorsByName)


_Writer = TypeVar("_Writer", JsonLines, TensorsByName)


@contextmanager
def _writing(path: Path, kind: Callable[[Path, BinaryIO], _Writer]) -> Iterator[_Writer]:
    """Takes predictions of batches until the block ends: then the file is complete on the disk, and after an error as it was.

    Args:
        path: of the file.
        kind: what writes it.

    Raises:
        StorageError: the storage refuses.
    """
    stack = ExitStack()
    with storing(path, _OTHERWISE):
        make_folder(path.parent)
        if path.is_dir():
            raise DataError(f"{path}: is a folder; name a file in `path` of predictions")
        temporary = stack.enter_context(replacing(path))
        file = temporary.open("xb+")
    with stack:
        # What was refused would be tried again when it is closed, which another error has told of.
        stack.callback(partial(_close, file))
        writer = kind(path, file)
        yield writer
        with storing(path, _OTHERWISE):
            writer.finish()
            file.flush()
            os.fsync(file.fileno())
    with storing(path, _OTHERWISE):
        DISK.fsync_folder(path.parent)


def _close(file: BinaryIO) -> None:
    with suppress(OSError):
        file.close()


def _columns(predictions: Any, target: Any, batch: Any) -> dict[str, Any]:
    """What there is of the samples of a batch, by name; ids are what a mapping has under ``id`` or ``ids``."""
    ids = next((batch[name] for name in ("id", "ids") if name in batch), None) if isinstance(batch, Mapping) else None
    columns = {"id": ids.ids if isinstance(ids, SparseSlot) else ids, "prediction": predictions, "target": target}
    return {name: values for name, values in columns.items() if values is not None}


def _rows(values: Any, name: str = "") -> list[Any]:
    """A value per sample, of columns as mappings.

    Raises:
        DataError: some of it has no row per sample.
    """
    if isinstance(values, Mapping):
        columns = {key: _rows(column, f"{name}.{key}" if name else str(key)) for key, column in values.items()}
        _check_counts(columns)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if hasattr(values, "tolist"):
        return values.tolist() if values.ndim else [values.item()]
    if isinstance(values, list | tuple) and not any(isinstance(value, Tensor) for value in values):
        return list(values)
    what = f"predictions: {name} is {shape_of(values)}, with no row per sample"
    raise DataError(f"{what}; return a tensor [batch, …], a list, or a mapping of these, or name a function in `from`")


def _check_counts(columns: Mapping[str, Sized]) -> None:
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"predictions: a batch has {counts or 'nothing'}; return a row per sample of each")


def _tensors(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Tensor]]:
    """Name -> tensor on the CPU with a row per sample, of columns as mappings.

    Raises:
        DataError: some of it is no tensor.
    """
    for key, column in values.items():
        name = f"{above}{key}"
        if isinstance(column, Mapping):
            yield from _tensors(column, f"{name}.")
            continue
        try:
            tensor = torch.as_tensor(column).cpu()
            yield name, tensor if tensor.ndim else tensor.reshape(1)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"predictions: {name} is {shape_of(column, 1)}, of which no tensor can be made ({error})"
            raise DataError(f"{what}; return tensors, or write jsonl") from error
