"""Means over samples, against formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipeline.errors import DataError
from pipeline.metrics.base import MAE, RMSE, Accuracy, LogLoss, Mean

PROBABILITIES, LABELS = [0.9, 0.2, 0.6, 0.7, 0.1], [1, 0, 0, 1, 1]
CROSS_ENTROPY = -sum(math.log(p if y else 1 - p) for p, y in zip(PROBABILITIES, LABELS, strict=True)) / 5


@pytest.mark.parametrize("from_logits", [False, True])
def test_log_loss_is_the_mean_over_samples_with_a_short_last_batch(from_logits: bool) -> None:
    scores = torch.tensor(PROBABILITIES, dtype=torch.float64)
    metric = LogLoss(from_logits=from_logits)
    for some, their in zip(
        (scores.logit() if from_logits else scores).split(3), torch.tensor(LABELS).split(3), strict=True
    ):
        metric.update(some, their)
    assert metric.compute() == pytest.approx(CROSS_ENTROPY, rel=1e-12)


def test_log_loss_takes_labels_that_are_probabilities() -> None:
    metric = LogLoss()
    metric.update(torch.tensor([0.2], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64))
    assert metric.compute() == pytest.approx(-(0.3 * math.log(0.2) + 0.7 * math.log(0.8)), rel=1e-12)


@pytest.mark.parametrize(
    ("probability", "label", "loss"), [(1.0, 1, 0.0), (0.0, 0, 0.0), (1.0, 0, 100.0), (0.0, 1, 100.0)]
)
def test_log_loss_of_a_certain_prediction_is_finite(probability: float, label: int, loss: float) -> None:
    metric = LogLoss()
    metric.update(torch.tensor([probability]), torch.tensor([label]))
    assert metric.compute() == loss


def test_log_loss_of_logits_taken_for_probabilities_says_what_to_write() -> None:
    metric = LogLoss()
    metric.update(torch.tensor([0.5, 1.5, -2.0]), torch.tensor([0.0, 1.0, 1.0]))
    message = (
        r"^LogLoss: 2 predictions outside \[0, 1\] are no probabilities; for logits write args: {from_logits: true}$"
    )
    with pytest.raises(DataError, match=message):
        metric.compute()


@pytest.mark.parametrize("from_logits", [False, True])
def test_log_loss_refuses_labels_that_are_no_probabilities(from_logits: bool) -> None:
    metric = LogLoss(from_logits)
    metric.update(torch.tensor([0.5, 0.5]), torch.tensor([-1.0, 1.0]))
    message = r"^LogLoss: 1 labels are outside \[0, 1\]; make them 0 and 1, or probabilities$"
    with pytest.raises(DataError, match=message):
        metric.compute()


def test_accuracy_is_the_share_of_hits_with_a_short_last_batch() -> None:
    metric = Accuracy()
    metric.update(torch.eye(3), torch.tensor([0, 1, 0]))
    metric.update(torch.tensor([[0.1, 0.5, 0.4]]), torch.tensor([1]))
    assert metric.compute() == 3 / 4


def test_accuracy_of_sequences_is_that_of_all_their_elements() -> None:
    metric = Accuracy()
    metric.update(torch.eye(3).expand(2, 3, 3), torch.tensor([[0, 1, 2], [0, 0, 0]]))
    assert metric.compute() == 4 / 6


@pytest.mark.parametrize("stranger", [-100, 3])
def test_accuracy_refuses_classes_that_have_no_score(stranger: int) -> None:
    metric = Accuracy()
    metric.update(torch.eye(3), torch.tensor([0, 1, stranger]))
    message = "^Accuracy: 1 numbers in the target are of no score; count from 0, and leave out what is to be ignored$"
    with pytest.raises(DataError, match=message):
        metric.compute()


@pytest.mark.parametrize(
    ("metric", "expected"), [(MAE(), (2 + 0 + 3 + 1) / 4), (RMSE(), math.sqrt((4 + 0 + 9 + 1) / 4))]
)
def test_errors_of_a_regression_are_means_over_the_whole_pass(metric: MAE | RMSE, expected: float) -> None:
    metric.update(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([3.0, 2.0, 0.0]))
    metric.update(torch.tensor([5.0]), torch.tensor([4]))
    assert metric.compute() == pytest.approx(expected, rel=1e-12)


def test_errors_are_those_of_the_numbers_given_and_not_of_their_half_precision() -> None:
    metric = MAE()
    metric.update(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.001], dtype=torch.float64))
    assert metric.compute() == pytest.approx(0.001, rel=1e-9)


def test_sums_do_not_lose_small_numbers_beside_large_ones() -> None:
    metric = MAE()
    metric.update(torch.tensor([2.0**25]), torch.tensor([0.0]))
    for _ in range(8):
        metric.update(torch.tensor([1.0]), torch.tensor([0.0]))
    assert metric.compute() * 9 == 2.0**25 + 8


@pytest.mark.parametrize(
    ("metric", "predictions", "target"),
    [
        (Accuracy(), [[0.1, math.nan], [1.0, 0.0]], [1, 0]),
        (LogLoss(), [math.nan, 0.5], [1, 0]),
        (MAE(), [math.nan, 0.5], [1, 0]),
        (RMSE(), [math.nan, 0.5], [1, 0]),
        (Mean(), [math.nan, 0.5], [1, 0]),
    ],
)
def test_a_mean_is_nan_where_a_prediction_is(metric: Any, predictions: list[Any], target: list[int]) -> None:
    metric.update(torch.tensor(predictions), torch.tensor(target))
    assert math.isnan(metric.compute())
