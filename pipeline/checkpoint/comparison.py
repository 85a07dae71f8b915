"""Where two nested states differ, bit for bit; types, the bits of a NaN and the sign of zero count."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import printable

_LONGEST = 60

# Plain numbers in a list that are each named; of more, such as the state of a random generator, it is told how many.
_FEW = 16


@dataclass(frozen=True)
class Difference:
    """One place at which two states differ.

    Attributes:
        place: the way to it, ``state[0].exp_avg``; ``""`` for the whole.
        what: in words, what the first has and what the second has.
        count: of two tensors of one shape and type, or two long lists of numbers, how many elements differ.
        elements: and how many there are.
        largest: of two tensors the largest difference of two elements; nan where one of them is NaN.
    """

    place: str
    what: str
    count: int | None = None
    elements: int | None = None
    largest: float | None = None

    def __str__(self) -> str:
        """``layers.0.weight: 3 of 64 elements, largest difference 0.001``."""
        return printable(f"{self.place}: {self.what}" if self.place else self.what)


def differences(one: Any, other: Any, place: str = "") -> Iterator[Difference]:
    """The differences of two states, in the order of the first; what only the second has comes last.

    Args:
        one: mappings, lists and tuples of tensors and plain values, in each other.
        other: the same.
        place: the way to both.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        yield from _of_tensors(one, other, place)
    elif isinstance(one, Mapping) and type(one) is type(other):
        yield from _of_mappings(one, other, place)
    elif isinstance(one, list | tuple) and type(one) is type(other):
        yield from _of_sequences(one, other, place)
    elif type(one) is not type(other) or not _same(one, other):
        yield Difference(place, f"{brief(one)} and {brief(other)}")


def _of_mappings(one: Mapping[Any, Any], other: Mapping[Any, Any], place: str) -> Iterator[Difference]:
    for key in {**one, **other}:
        if key in one and key in other:
            yield from differences(one[key], other[key], below(place, key))
        else:
            sides = [brief(side[key]) if key in side else "nothing" for side in (one, other)]
            yield Difference(below(place, key), " and ".join(sides))


def _of_sequences(one: Sequence[Any], other: Sequence[Any], place: str) -> Iterator[Difference]:
    if len(one) != len(other):
        yield Difference(place, f"{len(one)} items and {len(other)} items")
    elif len(one) > _FEW and all(type(number) in {int, float} for number in (*one, *other)):
        if count := sum(not _same(item, its) for item, its in zip(one, other, strict=True)):
            yield Difference(place, f"{count} of {len(one)} numbers", count, len(one))
    else:
        for index, (item, its) in enumerate(zip(one, other, strict=True)):
            yield from differences(item, its, f"{place}[{index}]")


def _of_tensors(one: Tensor, other: Tensor, place: str) -> Iterator[Difference]:
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        yield Difference(place, f"{brief(one)} and {brief(other)}")
    elif one.layout is torch.sparse_coo:
        first, second = ([side._indices(), side._values(), side.is_coalesced()] for side in (one, other))
        yield from _of_sequences(first, second, place)
    elif (differing := (_bits(one) != _bits(other)).any(dim=1)).any():
        count, elements = int(differing.sum()), len(differing)
        # Large integers are rounded.
        wide = torch.complex128 if one.is_complex() else torch.float64
        largest = float((_elements(one)[differing].to(wide) - _elements(other)[differing].to(wide)).abs().max())
        what = f"{count} of {elements} elements, largest difference {largest:.3g}"
        yield Difference(place, what, count, elements, largest)


def _elements(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor on the CPU; lazy conjugates and negatives are computed."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of each element, [elements, bytes]."""
    return _elements(tensor).view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _same(one: Any, other: Any) -> bool:
    """Whether two plain values of one type are the same; a float by its bits."""
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


def below(place: str, key: Any) -> str:
    """The way to what a state has under a key."""
    if isinstance(key, str):
        return f"{place}.{key}" if place else key
    return f"{place}[{key!r}]"


def brief(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
