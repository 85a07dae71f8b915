"""What makes two batches the same."""

from __future__ import annotations

import array
from collections import namedtuple
from typing import Any

import pytest
import torch
from pipeline_plugins.resume_test.recorder import batch_hash

Pair = namedtuple("Pair", "x y")


class Sample:
    """A batch of a type of its own, which has no repr that tells anything."""

    def __init__(self, x: float) -> None:
        self.x = torch.tensor(x)


def batch() -> Any:
    return {"x": torch.arange(6.0).view(2, 3), "rest": [("a", 1, None, 2.5, b"z"), Sample(1.0), torch.zeros(0)]}


@pytest.mark.slow
def test_the_same_content_has_the_same_hash_wherever_it_lies() -> None:
    assert batch_hash(batch()) == batch_hash(batch())
    assert batch_hash(torch.arange(6).view(2, 3).t()) == batch_hash(torch.arange(6).view(2, 3).t().contiguous())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        ([torch.zeros(1), torch.ones(1)], [torch.ones(1), torch.zeros(1)]),
        ([[1], 2], [1, [2]]),
        ({"x": 1}, {"y": 1}),
        ((1, 2), Pair(1, 2)),
        ("1", 1),
        (Sample(1.0), Sample(2.0)),
        (array.array("i", [1]), array.array("i", [2])),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    ],
)
def test_another_number_type_shape_or_order_has_another(one: Any, other: Any) -> None:
    assert batch_hash(one) == batch_hash(one)
    assert batch_hash(one) != batch_hash(other)
