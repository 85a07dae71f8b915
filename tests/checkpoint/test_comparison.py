"""Where two nested states differ, bit for bit."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from typing import Any

import pytest
import torch

from pipeline.checkpoint.comparison import Difference, differences


def said(one: Any, other: Any) -> list[str]:
    return [str(each) for each in differences(one, other)]


def nan(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 | bits))[0])


def state() -> dict[str, Any]:
    """A bit of everything that a state holds."""
    return {
        "w": torch.arange(6.0).view(2, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2),
        "half": torch.tensor([1.0, math.nan], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "flags": torch.tensor([True, False]),
        "plain": [1, "a", None, 0.5, math.nan, (2, {3: b"x"})],
    }


def test_equal_states_do_not_differ() -> None:
    assert said(state(), state()) == []


def test_tensors_are_compared_by_their_elements_wherever_they_lie_in_memory() -> None:
    assert said(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()) == []


def test_of_two_tensors_the_elements_that_differ_are_counted() -> None:
    one, other = torch.zeros(8, 8), torch.zeros(8, 8)
    other[1, 2], other[3, 4], other[7, 7] = 1e-3, -2.5e-3, 1e-4
    (found,) = differences({"layers.0.weight": one}, {"layers.0.weight": other})
    assert str(found) == "layers.0.weight: 3 of 64 elements, largest difference 0.0025"
    assert (found.place, found.count, found.elements) == ("layers.0.weight", 3, 64)
    assert found.largest == float(torch.tensor(2.5e-3))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex128, torch.float8_e4m3fn]
)
def test_a_number_of_any_type_is_compared(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1, 2]).to(dtype), torch.tensor([1, 4]).to(dtype)
    assert said(one, other) == ["1 of 2 elements, largest difference 2"]


def test_minus_zero_is_not_zero() -> None:
    assert said(torch.tensor([0.0]), torch.tensor([-0.0])) == ["1 of 1 elements, largest difference 0"]
    assert said([0.0], [-0.0]) == ["[0]: 0.0 and -0.0"]


def test_nans_are_equal_only_if_their_bits_are() -> None:
    payloads = [torch.tensor([0x7FC00000 + each], dtype=torch.int32).view(torch.float32) for each in (0, 0, 1)]
    assert said(payloads[0], payloads[1]) == []
    assert said(payloads[0], payloads[2]) == ["1 of 1 elements, largest difference nan"]
    assert said(nan(1), nan(1)) == []
    assert said(nan(1), nan(2)) == ["nan and nan"]


def test_another_shape_or_dtype_is_a_difference_whatever_the_numbers() -> None:
    assert said(torch.zeros(2, 3), torch.zeros(6)) == ["float32 [2, 3] and float32 [6]"]
    assert said(torch.zeros(2), torch.zeros(2, dtype=torch.int64)) == ["float32 [2] and int64 [2]"]


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (1, 1.0, "1 and 1.0"),
        (1, True, "1 and True"),
        ([1], (1,), "list of 1 and tuple of 1"),
        ({}, OrderedDict(), "dict of 0 and OrderedDict of 0"),
        (torch.zeros(1), [0.0], "float32 [1] and list of 1"),
        ([1, 2], [1], "2 items and 1 items"),
        ("a" * 99, None, f"'{'a' * 59}… and None"),
    ],
)
def test_another_type_or_length_is_a_difference(one: Any, other: Any, what: str) -> None:
    assert said(one, other) == [what]


def test_each_place_is_named_by_the_way_to_it_in_the_order_of_the_first() -> None:
    one = {"state": {0: {"step": 1}, 7: [1, 2]}, "gone": torch.zeros(2), "a.b": 1}
    other = {"new": 5, "a.b": 2, "state": {0: {"step": 2}, 7: [1, 3]}}
    assert said(one, other) == [
        "state[0].step: 1 and 2",
        "state[7][1]: 2 and 3",
        "gone: float32 [2] and nothing",
        "a.b: 1 and 2",
        "new: nothing and 5",
    ]


def test_the_first_difference_is_found_without_looking_further() -> None:
    found = differences([1, object()], [2, object()])
    assert next(found) == Difference("[0]", "1 and 2")
