"""Precision, recall and F1, against lists counted by hand and formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.metrics.classification import F1, Average, Precision, Recall
from tests.training.conftest import in_turn

PREDICTED = [0, 0, 1, 1, 1, 2, 2, 0, 4]
ACTUAL = [0, 1, 1, 1, 2, 2, 0, 0, 2]


def one_class(kind: type, positive: int, predicted: list[int], actual: list[int]) -> float | None:
    """The number of one class; None where the class doesn't occur."""
    true = sum(p == a == positive for p, a in zip(predicted, actual, strict=True))
    taken, there = predicted.count(positive), actual.count(positive)
    if not taken and not there:
        return None
    precision, recall = (true / taken if taken else 0.0), (true / there if there else 0.0)
    harmonic = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {Precision: precision, Recall: recall, F1: harmonic}[kind]


def scores_of(classes: list[int], size: int) -> torch.Tensor:
    """Scores that are greatest for these classes."""
    noise = torch.rand(len(classes), size, generator=torch.Generator().manual_seed(0))
    return noise + 2 * torch.nn.functional.one_hot(torch.tensor(classes), size)


@pytest.mark.parametrize("kind", [Precision, Recall, F1])
def test_macro_is_the_mean_of_the_numbers_of_the_classes_that_occur(kind: Any) -> None:
    metric = kind(average="macro")
    metric.update(scores_of(PREDICTED, 6), torch.tensor(ACTUAL))
    numbers = [one_class(kind, each, PREDICTED, ACTUAL) for each in range(6)]
    occurring = [each for each in numbers if each is not None]
    assert len(occurring) == 4
    assert metric.compute() == pytest.approx(sum(occurring) / 4, rel=1e-12)


@pytest.mark.parametrize("kind", [Precision, Recall, F1])
def test_weights_need_not_be_whole_numbers(kind: Any) -> None:
    weights = [0.5, 2.0, 1.25, 0.0, 0.75, 3.0, 0.1, 1.0, 0.0]
    metric = kind(average="macro")
    metric.update(scores_of(PREDICTED, 6), torch.tensor(ACTUAL), torch.tensor(weights, dtype=torch.float64))
    # As many samples as it has twentieths.
    counts = [round(20 * weight) for weight in weights]
    repeated = [
        [number for number, count in zip(classes, counts, strict=True) for _ in range(count)]
        for classes in (PREDICTED, ACTUAL)
    ]
    numbers = [one_class(kind, each, *repeated) for each in range(6)]
    occurring = [each for each in numbers if each is not None]
    # The one sample that is predicted as class 4 counts nothing.
    assert len(occurring) == 3
    assert metric.compute() == pytest.approx(sum(occurring) / 3, rel=1e-12)


@pytest.mark.parametrize("kind", [Precision, Recall, F1])
def test_micro_is_the_accuracy_where_each_sample_has_one_class(kind: Any) -> None:
    metric = kind(average="micro")
    metric.update(scores_of(PREDICTED, 6), torch.tensor(ACTUAL))
    assert metric.compute() == pytest.approx(5 / 9, rel=1e-12)


@in_turn("labels", [torch.tensor([1, 0, 0, 1, 1]), torch.tensor([[1.0], [0.0], [0.0], [1.0], [1.0]])])
@in_turn(
    ("kind", "average", "expected"),
    [
        (Precision, "binary", 2 / 3),
        (Recall, "binary", 2 / 3),
        (F1, "binary", 2 / 3),
        (Precision, "macro", (2 / 3 + 1 / 2) / 2),
        (Recall, "macro", (2 / 3 + 1 / 2) / 2),
        (F1, "micro", 3 / 5),
    ],
)
def test_scores_of_two_classes_are_compared_with_a_threshold(
    kind: Any, average: Average, expected: float, labels: torch.Tensor
) -> None:
    metric = kind(average=average)
    metric.update(torch.tensor([0.9, 0.2, 0.6, 0.7, 0.1]), labels)
    assert metric.compute() == pytest.approx(expected, rel=1e-12)


def test_binary_takes_class_1_of_two_scores_as_of_one() -> None:
    probabilities, labels = torch.tensor([0.9, 0.2, 0.6, 0.7, 0.1]), torch.tensor([1, 0, 0, 1, 0])
    one, two = Precision("binary"), Precision("binary")
    one.update(probabilities, labels)
    two.update(torch.stack([1 - probabilities, probabilities], 1), labels)
    assert one.compute() == two.compute() == pytest.approx(2 / 3, rel=1e-12)


@pytest.mark.parametrize(("threshold", "recall"), [(0, 1.0), (1.5, 1 / 3), (9, 0.0)])
def test_logits_are_compared_with_a_threshold_that_is_given(threshold: float, recall: float) -> None:
    metric = Recall("binary", threshold=threshold)
    metric.update(torch.tensor([2.0, -1.0, 0.5, 1.0]), torch.tensor([1, 0, 1, 1]))
    assert metric.compute() == pytest.approx(recall, rel=1e-12)


def test_a_score_at_the_threshold_is_not_above_it() -> None:
    metric = Recall("binary")
    metric.update(torch.tensor([0.5, 0.5000001]), torch.tensor([1, 1]))
    assert metric.compute() == 0.5


@in_turn("kind", [Precision, Recall, F1])
@in_turn(("score", "label", "expected"), [(0.1, 1, 0.0), (0.9, 0, 0.0), (0.1, 0, 0.0)])
def test_nothing_right_and_nothing_positive_are_0(kind: Any, score: float, label: int, expected: float) -> None:
    metric = kind("binary")
    metric.update(torch.tensor([score]), torch.tensor([label]))
    assert metric.compute() == expected


@in_turn("kind", [Precision, Recall, F1])
@in_turn("average", ["binary", "macro", "micro", None])
def test_of_nothing_it_is_nan(kind: Any, average: Average | None) -> None:
    metric = kind(average)
    assert math.isnan(metric.compute())
    metric.update(torch.empty(0), torch.empty(0))
    assert math.isnan(metric.compute())


@in_turn("kind", [Precision, Recall, F1])
@in_turn("as_classes", [False, True])
def test_of_two_classes_it_is_that_of_the_positive_one_by_default(kind: Any, as_classes: bool) -> None:
    predicted, actual = [1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 0, 1]
    scores = torch.tensor(predicted) * 0.8 + 0.1
    metric = kind()
    metric.update(torch.stack([1 - scores, scores], 1) if as_classes else scores, torch.tensor(actual))
    assert metric.compute() == pytest.approx(one_class(kind, 1, predicted, actual), rel=1e-12)


@pytest.mark.parametrize("kind", [Precision, Recall, F1])
def test_of_more_classes_it_is_their_mean_by_default(kind: Any) -> None:
    default, macro = kind(), kind(average="macro")
    for metric in (default, macro):
        metric.update(scores_of(PREDICTED, 6), torch.tensor(ACTUAL))
    assert default.compute() == macro.compute()


@in_turn("kind", [Precision, Recall, F1])
@in_turn("predictions", [[0.7, math.nan], [[0.7, 0.3], [0.1, math.nan]]])
def test_a_score_that_is_nan_makes_it_nan(kind: Any, predictions: list[Any]) -> None:
    metric = kind("binary")
    metric.update(torch.tensor(predictions), torch.tensor([1, 0]))
    assert math.isnan(metric.compute())


@pytest.mark.parametrize(
    ("predictions", "target", "message"),
    [
        ([0.5, 3.0, -1.0], [0, 1, 1],
         r"2 scores outside \[0, 1\] are no probabilities; for logits write args: {threshold: 0}"),
        ([0.5, 0.5, 0.5], [0.0, 0.5, 2.0],
         r"2 labels are neither 0 nor 1; make them so, e.g. \(rating > 3\).float\(\)"),
        ([[0.5, 0.5], [0.5, 0.5]], [2, -100],
         "2 numbers in the target are of no score; count from 0, and leave out what is to be ignored"),
    ],
)  # fmt: skip
def test_values_that_it_cannot_take_are_told_when_it_is_computed(
    predictions: list[Any], target: list[Any], message: str
) -> None:
    metric = F1()
    metric.update(torch.tensor(predictions), torch.tensor(target))
    with pytest.raises(DataError, match=f"^F1: {message}$"):
        metric.compute()


def test_binary_of_three_classes_is_refused() -> None:
    with pytest.raises(DataError, match=r"^Recall: average is binary, of 3 classes; write macro or micro$"):
        Recall("binary").update(torch.rand(4, 3), torch.zeros(4, dtype=torch.int64))


def test_batches_of_different_numbers_of_classes_are_refused() -> None:
    metric = F1()
    metric.update(torch.rand(4, 3), torch.zeros(4, dtype=torch.int64))
    message = "^F1: scores of 4 classes came after scores of 3; return as many for every batch$"
    with pytest.raises(DataError, match=message):
        metric.update(torch.rand(4, 4), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("average", "remedy"), [("weighted", "known: binary, macro, micro"), ("makro", r"did you mean 'macro'\?")]
)
def test_an_unknown_average_is_refused_with_the_right_names(average: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"^F1: there is no average '{average}'; {remedy}$"):
        F1(average=average)
