"""Means of numbers that stay on their device until they are read, against sums in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pipeline.errors import DataError
from pipeline.metrics.meters import MOST, Meter, Meters

DRAWN = random.Random(0)
NUMBERS = [(torch.tensor(DRAWN.uniform(-3, 3)), DRAWN.randint(1, 9)) for _ in range(50)]
"""(float32 number, samples)"""


def summed(numbers: list[tuple[torch.Tensor, int]]) -> float:
    """The mean over samples of those that are finite, in plain Python."""
    finite = [(number.item(), samples) for number, samples in numbers if math.isfinite(number.item())]
    total = 0.0
    for number, samples in finite:
        total += number * samples
    return total / sum(samples for _, samples in finite)


@pytest.mark.parametrize("every", [1, 7, 50, 1000])
def test_the_mean_is_that_over_samples_bit_for_bit_whenever_it_is_read(every: int) -> None:
    average = Meter()
    for index, (number, samples) in enumerate(NUMBERS, 1):
        average.add(number, samples)
        if index % every == 0:
            average.read()
    assert average.mean() == summed(NUMBERS)
    assert (average.batches, average.samples) == (50, sum(samples for _, samples in NUMBERS))


@pytest.mark.parametrize("every", [1, 3, 50])
def test_the_recent_mean_is_that_since_it_was_last_asked_for(every: int) -> None:
    average = Meter()
    for index, (number, samples) in enumerate(NUMBERS[:20], 1):
        average.add(number, samples)
        if index % every == 0:
            average.read()
    assert average.recent() == summed(NUMBERS[:20])
    for number, samples in NUMBERS[20:]:
        average.add(number, samples)
    assert average.recent() == summed(NUMBERS[20:])
    assert average.mean() == summed(NUMBERS)


@pytest.mark.parametrize("every", [1, 2, 50])
def test_what_is_not_finite_is_counted_and_left_out_of_both_means(every: int) -> None:
    numbers = list(NUMBERS)
    for place, value in ((4, math.nan), (5, math.inf), (30, -math.inf)):
        numbers[place] = (torch.tensor(value), 1000)
    average = Meter()
    for index, (number, samples) in enumerate(numbers, 1):
        average.add(number, samples)
        if index % every == 0:
            average.read()
    assert average.mean() == average.recent() == summed(numbers)
    assert average.nonfinite == 3
    place, value = average.first or (0, 0.0)
    assert place == 5
    assert math.isnan(value)


def test_numbers_of_one_sum_are_added_in_double_precision() -> None:
    average = Meter()
    for _ in range(1000):
        average.add(torch.tensor(0.1), 1)
    assert average.mean() == pytest.approx(torch.tensor(0.1).item(), rel=1e-13)


@pytest.mark.parametrize("numbers", [[], [math.nan, math.inf]])
def test_without_a_finite_number_the_means_are_nan(numbers: list[float]) -> None:
    average = Meter()
    for number in numbers:
        average.add(torch.tensor(number), 2)
    assert math.isnan(average.mean())
    assert math.isnan(average.recent())


def test_a_new_pass_forgets_everything() -> None:
    average = Meter()
    average.add(torch.tensor(math.nan), 2)
    average.read()
    average.add(torch.tensor(7.0), 2)
    average.reset()
    average.add(torch.tensor(3.0), 2)
    assert (average.mean(), average.nonfinite, average.first, average.batches, average.samples) == (3.0, 0, None, 1, 2)


def test_numbers_of_several_precisions_are_averaged() -> None:
    average = Meter()
    for number in (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.double), torch.tensor(6.0)):
        average.add(number, 1)
    assert average.mean() == 3.0


def test_what_is_logged_is_weighted_by_the_samples_of_its_batch_or_those_that_it_names() -> None:
    samples = 4
    logged = Meters(lambda: samples)
    logged.log("accuracy", 0.5)
    samples = 2
    logged.log("accuracy", torch.tensor(1.0, requires_grad=True))
    logged.log("accuracy", 0.0, batch_size=6)
    logged.log("length", 8)
    assert logged.means() == {"accuracy": (0.5 * 4 + 1.0 * 2) / 12, "length": 8.0}
    assert logged.recent() == logged.means()
    assert math.isnan(logged.recent()["length"])


def test_what_is_logged_does_not_wait_without_end() -> None:
    logged = Meters()
    for _ in range(MOST + 3):
        logged.log("x", 1.0)
    assert len(logged["x"].waiting) == 3
    assert logged.means() == {"x": 1.0}


def test_only_a_scalar_can_be_logged() -> None:
    with pytest.raises(DataError, match=r"log\('x', …\) was given a tensor of shape \(2,\); give it a scalar"):
        Meters().log("x", torch.ones(2))
