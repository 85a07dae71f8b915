"""GAUC against a count of all pairs of each user, BucketError against PaddleRec's loop, and what else recommenders judge by."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.metrics import COPC, GAUC, ActualCTR, BucketError, PairOrder
from tests.training.conftest import in_turn


def drawn(size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with ties, labels, and users."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(9, (size,), generator=random).double() / 8
    labels = (torch.rand(size, generator=random) < 0.3).long()
    return scores, labels, torch.randint(size // 6, (size,), generator=random) * 7 - 3


def by_pairs(scores: Tensor, labels: Tensor, users: Tensor) -> float:
    """The areas of users who have both labels, weighted by their samples."""
    area = total = 0.0
    for user in users.unique():
        own = users == user
        high, low = scores[own & (labels == 1)].tolist(), scores[own & (labels == 0)].tolist()
        if high and low:
            right = sum(1.0 if one > other else 0.5 if one == other else 0.0 for one, other in product(high, low))
            area += own.sum().item() * right / len(high) / len(low)
            total += own.sum().item()
    return area / total if total else math.nan


@in_turn("seed", range(10))
@in_turn("size", [7, 60, 500])
def test_gauc_is_the_share_of_each_users_pairs_in_order(size: int, seed: int) -> None:
    data = drawn(size, seed)
    gauc = GAUC()
    for parts in zip(*(part.split(13) for part in data), strict=True):
        gauc.update(*parts)
    assert gauc.compute() == pytest.approx(by_pairs(*data), abs=1e-12, nan_ok=True)


def test_gauc_of_users_with_one_label_or_a_score_that_is_nan_is_nan() -> None:
    for scores, labels in (([0.1, 0.9], [1, 0]), ([0.1, 0.9], [1, 1]), ([math.nan, 0.9], [1, 0])):
        gauc = GAUC()
        users = torch.tensor([0, 0 if math.isnan(scores[0]) else 1])
        gauc.update(torch.tensor(scores), torch.tensor(labels), users)
        assert math.isnan(gauc.compute())


@pytest.mark.parametrize("users", [torch.zeros(3, dtype=torch.int64), torch.zeros(4)])
def test_users_are_an_integer_for_each_sample(users: Tensor) -> None:
    kind = str(users.dtype).removeprefix("torch.")
    with pytest.raises(DataError) as caught:
        GAUC().update(torch.rand(4), torch.ones(4), users)
    assert (
        str(caught.value) == f"GAUC takes the user of each of 4 samples as an integer, and got {len(users)} of {kind}"
    )


def bucket_error(predictions: Tensor, labels: Tensor, buckets: int) -> float:
    """PaddleRec's loop over buckets, with the mean prediction of each."""
    inside: list[list[tuple[float, float]]] = [[] for _ in range(buckets)]
    for prediction, label in zip(predictions.tolist(), labels.tolist(), strict=True):
        inside[min(int(prediction * buckets), buckets - 1)].append((prediction, label))
    last, shows, expected, clicks, error, count = -1.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for number, samples in enumerate(inside):
        if abs(number / buckets - last) > 0.01 or last < 0:
            last, shows, expected, clicks = number / buckets, 0.0, 0.0, 0.0
        shows += len(samples)
        expected += sum(prediction for prediction, _ in samples)
        clicks += sum(label for _, label in samples)
        if shows == 0 or expected == 0:
            continue
        rate = expected / shows
        if math.sqrt((1 - rate) / (rate * shows)) < 0.05:
            error += abs(clicks / shows / rate - 1) * shows
            count += shows
            last = -1.0
    return error / count if count else 0.0


@pytest.mark.parametrize(("size", "buckets"), [(50, 10), (3000, 128), (200_000, 4096), (200_000, 250)])
def test_bucket_error_is_that_of_a_plain_loop(size: int, buckets: int) -> None:
    random = torch.Generator().manual_seed(size)
    predictions = torch.rand(size, generator=random, dtype=torch.float64) ** 3
    labels = (torch.rand(size, generator=random) < predictions * 1.1).double()
    error = BucketError(buckets)
    for parts in zip(predictions.split(1000), labels.split(1000), strict=True):
        error.update(*parts)
    assert error.compute() == pytest.approx(bucket_error(predictions, labels, buckets), rel=1e-9)
    assert (error.compute() > 0.05) == (size == 200_000)


def test_bucket_error_of_a_prediction_that_is_nan_is_nan_and_of_too_few_samples_0() -> None:
    error = BucketError()
    error.update(torch.tensor([0.5]), torch.tensor([1.0]))
    assert error.compute() == 0.0
    error.update(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert math.isnan(error.compute())
    with pytest.raises(ConfigError, match=r"^BucketError: buckets is 0; it must be above 0$"):
        BucketError(0)


def test_click_rates_and_their_ratio() -> None:
    predictions, labels = torch.tensor([0.25, 0.5, 0.25]), torch.tensor([1, 0, 1])
    copc, rate = COPC(), ActualCTR()
    for metric in (copc, rate):
        metric.update(predictions[:2], labels[:2])
        metric.update(predictions[2:], labels[2:])
    assert (copc.compute(), rate.compute()) == (2.0, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("metric", "predictions", "labels", "message"),
    [
        (COPC(), 1.5, 1.0, "COPC: 2 predictions outside [0, 1] are no probabilities; return their sigmoid"),
        (
            BucketError(),
            -0.5,
            1.0,
            "BucketError: 2 predictions outside [0, 1] are no probabilities; return their sigmoid",
        ),
        (COPC(), 0.5, 0.5, "COPC: 2 labels are neither 0 nor 1; make them so, e.g. (rating > 3).float()"),
        (ActualCTR(), 0.5, 2.0, "ActualCTR: 2 labels are neither 0 nor 1; make them so, e.g. (rating > 3).float()"),
        (
            BucketError(),
            0.5,
            -1.0,
            "BucketError: 2 labels are neither 0 nor 1; make them so, e.g. (rating > 3).float()",
        ),
    ],
)
def test_what_is_no_probability_or_label_is_told(metric: Any, predictions: float, labels: float, message: str) -> None:
    metric.update(torch.full((2,), predictions), torch.full((2,), labels))
    with pytest.raises(DataError) as caught:
        metric.compute()
    assert str(caught.value) == message


def test_pairs_in_order_for_each_that_is_not() -> None:
    order = PairOrder()
    order.update(torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 1.0]]))
    order.update(torch.tensor([[1.0, 1.0], [5.0, -1.0]]), None)
    assert order.compute() == (3 + 1) / (2 + 1)
    order.update(torch.tensor([[1.0, math.nan]]))
    assert math.isnan(order.compute())
    with pytest.raises(DataError, match=r"^PairOrder takes scores \[batch, 2\], and got \(4,\); return the score"):
        order.update(torch.rand(4))
