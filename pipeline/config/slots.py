"""What a config says of the slots of lines ``slot:value slot:value …``, or of delimited text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pipeline.errors import one_of

# How the names of Parquet files end, and of those that only an extra reads.
PARQUET = ".parquet"
NEEDS_EXTRA = (PARQUET, ".zst")


def dense_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the slots in ``"dense_var:13 name:[2,3]"``.

    Raises:
        ValueError: it has no such form, or names one twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for part in re.sub(r"\s*,\s*", ",", text).split():
        match = re.fullmatch(r"([^:\s]+):(?:([1-9]\d*)|\[((?:[1-9]\d*,)*[1-9]\d*)\])", part)
        if not match or match[1] in shapes:
            raise ValueError(f"has '{part}'; write each slot once, as name:13 or name:[2,3]")
        shapes[match[1]] = tuple(map(int, (match[2] or match[3]).split(",")))
    return shapes


class Slots(NamedTuple):
    """What a line may have, and what becomes of it.

    Attributes:
        dense: name -> shape of its values.
        sparse: the names of those with any number of ids.
        ignored: the names of those that are not read.
        target: the name of the one that is the target; a dense one has the shape (1,).
        padding: what a slot has where a line lacks it.
        hash_sizes: name of a sparse slot -> how many ids its values are hashed to.
        delimiter: what is between the fields of delimited text; ``""`` where each field names its slot.
        columns: the slot of each of these fields; none where the header of each file names them.
    """

    dense: Mapping[str, tuple[int, ...]]
    sparse: tuple[str, ...]
    ignored: frozenset[str]
    target: str
    padding: int
    hash_sizes: Mapping[str, int]
    delimiter: str = ""
    columns: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The slots that are read: dense ones first, as PaddleRec has them."""
        return [*self.dense, *self.sparse]


class SlotsError(ValueError):
    """Slots that contradict each other.

    Args:
        key: of the dataset, that has to be changed.
        message: what is wrong, and what to do.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


def make_slots(
    sparse_slots: str = "",
    dense_slots: str = "",
    ignored_slots: str = "",
    padding: int = 0,
    target: str | None = None,
    hash_size: int | Mapping[str, int] | None = None,
    delimiter: str | None = None,
    columns: str | None = None,
) -> Slots:
    """What lines may have, of the keys of a dataset.

    Raises:
        SlotsError: they contradict each other.
    """
    try:
        sparse, dense, ignored = sparse_slots.split(), dense_shapes(dense_slots), ignored_slots.split()
    except ValueError as error:
        raise SlotsError("dense_slots", str(error)) from None
    known, keys = [*dense, *sparse], ("ignored_slots", "dense_slots", "sparse_slots")
    for key, names in zip(keys, (ignored, dense, sparse), strict=True):
        if twice := [name for name in names if [*known, *ignored].count(name) > 1]:
            raise SlotsError(key, f"slot {twice[0]} is named twice; name it once in one of {', '.join(keys)}")
    if target is None:
        target = next((name for name in ("label", "click") if name in known), sparse[0] if sparse else "")
    if target not in known:
        what = f"there is no slot '{target}'{one_of(target, known)}" if target else "is needed where no slot is sparse"
        raise SlotsError("target", what)
    if math.prod(dense.get(target, ())) != 1:
        raise SlotsError("target", f"slot {target} has {math.prod(dense[target])} numbers; name one with one")
    if "target" in known and target != "target":
        raise SlotsError(
            "target", f"is {target}, beside a slot called target; write target: target, or rename that one"
        )
    if len(known) == 1:
        raise SlotsError("sparse_slots", f"there is no slot but {target}, which is the target; add those of the inputs")
    inputs = [name for name in sparse if name != target]
    sizes = dict.fromkeys(inputs, hash_size) if isinstance(hash_size, int) else dict(hash_size or {})
    for name in sizes.keys() - {*inputs}:
        raise SlotsError("hash_size", f"'{name}' is no sparse slot beside the target{one_of(name, inputs)}")
    slots = Slots(dense, tuple(sparse), frozenset(ignored), target, padding, sizes)
    return slots if delimiter is None and columns is None else _delimited(slots, delimiter, columns)


def _delimited(slots: Slots, delimiter: str | None, columns: str | None) -> Slots:
    if delimiter is None:
        what = "would be ignored: lines have columns where a delimiter is between them; add delimiter"
        raise SlotsError("columns", what)
    if not re.fullmatch(r"""[^\n\r"'\0\x80-\U0010ffff]""", delimiter):
        what = f"is {delimiter!r}; write one ASCII character such as ',' or '\\t', no newline or quote"
        raise SlotsError("delimiter", what)
    slots = slots._replace(delimiter=delimiter)
    if columns is None:
        return slots
    if twice := [name for name in slots.dense if columns.split().count(name) > 1]:
        raise SlotsError("columns", f"names slot {twice[0]} twice; name a dense slot once, for all its columns")
    names = [[name] * math.prod(slots.dense.get(name, ())) for name in columns.split()]
    try:
        return with_columns(slots, list(chain.from_iterable(names)))
    except ValueError as error:
        raise SlotsError("columns", str(error)) from None


def with_columns(slots: Slots, columns: Sequence[str]) -> Slots:
    """The slots of delimited text whose fields are these, in this order.

    Raises:
        ValueError: a slot has no field or too many, or a field no slot.
    """
    known = [*slots.names, *sorted(slots.ignored)]
    widths = {slots.target: 1, **{name: math.prod(shape) for name, shape in slots.dense.items()}}
    for name in columns:
        if name not in known:
            raise ValueError(
                f"there is no slot '{name}'{one_of(name, known)}; add it to ignored_slots if nobody reads it"
            )
        if name in widths and columns.count(name) != widths[name]:
            raise ValueError(f"slot {name} has {columns.count(name)} columns, and not {widths[name]}")
    if absent := [name for name in slots.names if name not in columns]:
        raise ValueError(f"no column is slot {absent[0]}; name the slot of each column")
    return slots._replace(columns=tuple(columns))
