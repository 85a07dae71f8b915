"""The mean of a number per batch."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.metrics.base import Mean, wide


def test_a_mean_weighs_each_value_by_its_samples() -> None:
    mean = Mean()
    for value, count in [(1.0, 4), (2.0, 4), (6.0, 1)]:
        mean.add_mean(torch.tensor(value), count)
    assert mean.compute() == pytest.approx((1 * 4 + 2 * 4 + 6) / 9)


def test_a_mean_of_predictions_counts_each_number_alike() -> None:
    mean = Mean()
    mean.update(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3))
    mean.update(torch.tensor([6]))
    assert mean.compute() == 3.0


def test_a_mean_does_not_lose_small_numbers_beside_large_ones() -> None:
    mean = Mean()
    mean.add_mean(torch.tensor(2.0**25), 1)
    for _ in range(8):
        mean.add_mean(torch.tensor(1.0), 1)
    assert mean.compute() * 9 == 2.0**25 + 8


def test_a_mean_of_no_batch_is_nan() -> None:
    assert math.isnan(Mean().compute())


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)])
def test_sums_are_of_the_widest_type_that_a_device_has(device: str, dtype: torch.dtype) -> None:
    assert wide(torch.device(device)) == dtype
