"""What a config says of the slots of lines ``slot:value slot:value …``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
    """

    dense: Mapping[str, tuple[int, ...]]
    sparse: tuple[str, ...]
    ignored: frozenset[str]
    target: str
    padding: int
    hash_sizes: Mapping[str, int]

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
    return Slots(dense, tuple(sparse), frozenset(ignored), target, padding, sizes)
