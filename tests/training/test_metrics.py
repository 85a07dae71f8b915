"""Metrics, against counts by hand."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ClassPathError, DataError
from pipeline.training.metrics import AUC, Accuracy, LogLoss, Mean, build_metrics


def pair_count(scores: list[float], labels: list[int]) -> float:
    """The share of (positive, negative) pairs in the right order, ties counting half."""
    labelled = list(zip(scores, labels, strict=True))
    pairs = list(product([s for s, y in labelled if y], [s for s, y in labelled if not y]))
    return sum(1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(25))
def test_auc_is_the_share_of_pairs_in_order_with_ties_counting_half(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    size = int(torch.randint(2, 30, (), generator=random))
    scores = torch.randint(-3, 3 + 20 * (seed % 2), (size,), generator=random).float() / 4
    labels = torch.randint(2, (size,), generator=random)
    labels[:2] = torch.tensor([0, 1])
    auc = AUC()
    for some, their in zip(scores.split(4), labels.split(4), strict=True):
        auc.update(some, their)
    assert auc.compute() == pytest.approx(pair_count(scores.tolist(), labels.tolist()), abs=1e-12)


def test_auc_of_scores_of_any_shape_and_type_is_the_same() -> None:
    scores, labels = torch.tensor([0.5, -1.0, 2.0, 0.5]), torch.tensor([1, 0, 0, 1])
    for kind, shape in product([torch.float16, torch.bfloat16, torch.float64], [(4,), (4, 1), (2, 2)]):
        auc = AUC()
        auc.update(scores.to(kind).view(shape).requires_grad_(), labels.bool())
        assert auc.compute() == 0.5


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1, 1], []])
def test_auc_is_nan_where_a_class_is_absent(labels: list[int]) -> None:
    auc = AUC()
    auc.update(torch.arange(len(labels)).float(), torch.tensor(labels))
    assert math.isnan(auc.compute())


def test_auc_is_nan_before_the_first_batch() -> None:
    assert math.isnan(AUC().compute())


def test_auc_is_nan_where_a_score_is_nan() -> None:
    auc = AUC()
    auc.update(torch.tensor([0.1, math.nan, 0.3]), torch.tensor([0, 1, 1]))
    assert math.isnan(auc.compute())


def test_auc_forgets_what_was_before_a_reset() -> None:
    auc = AUC()
    auc.update(torch.tensor([0.9, 0.1]), torch.tensor([0, 1]))
    auc.reset()
    auc.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    assert auc.compute() == 1.0


@pytest.mark.parametrize(
    ("metric", "predictions", "target", "shapes"),
    [
        (AUC(), torch.zeros(4, 2), torch.zeros(4), r"\(4, 2\) and \(4,\); return one score per sample"),
        (Accuracy(), torch.zeros(4), torch.zeros(4), r"\(4,\) and \(4,\); use another metric"),
        (Accuracy(), torch.zeros(4, 3), torch.zeros(4, 1), r"\(4, 3\) and \(4, 1\); use another metric"),
    ],
)
def test_a_metric_refuses_shapes_that_it_would_misread(
    metric: Any, predictions: torch.Tensor, target: torch.Tensor, shapes: str
) -> None:
    with pytest.raises(DataError, match=shapes):
        metric.update(predictions, target)


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


def test_accuracy_is_the_share_of_hits_with_a_short_last_batch() -> None:
    metric = Accuracy()
    metric.update(torch.eye(3), torch.tensor([0, 1, 0]))
    metric.update(torch.tensor([[0.1, 0.5, 0.4]]), torch.tensor([1]))
    assert metric.compute() == pytest.approx(3 / 4)


def test_log_loss_of_logits_taken_for_probabilities_says_what_to_write() -> None:
    with pytest.raises(
        DataError, match=r"outside \[0, 1\] are no probabilities; for logits write args: {from_logits: true}"
    ):
        LogLoss().update(torch.tensor([0.5, 1.5]), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("metric", [LogLoss(), Accuracy()])
def test_a_metric_is_nan_after_a_reset(metric: LogLoss | Accuracy) -> None:
    metric.update(torch.tensor([[0.5]]), torch.tensor([0.0]))
    metric.reset()
    assert math.isnan(metric.compute())


def test_a_mean_weighs_each_value_by_its_samples() -> None:
    mean = Mean()
    for value, count in [(1.0, 4), (2.0, 4), (6.0, 1)]:
        mean.add(torch.tensor(value), count)
    assert mean.compute() == pytest.approx((1 * 4 + 2 * 4 + 6) / 9)


class Count:
    def __init__(self, start: int = 0) -> None:
        self.start = start


def test_metrics_are_built_by_bare_name_class_path_or_class_with_their_arguments() -> None:
    built = build_metrics(
        {
            "auc": {"class": "AUC"},
            "logloss": {"class": "pipeline.training.metrics:LogLoss", "args": {"from_logits": True}},
            "count": {"class": Count, "args": {"start": 5}},
        },
        None,
    )
    assert isinstance(built["auc"], AUC)
    assert isinstance(built["logloss"], LogLoss)
    assert built["logloss"].from_logits
    assert built["count"].start == 5


def test_a_metric_of_the_workspace_may_import_from_the_folder_above_it(workspace: Any) -> None:
    counting = "from ..shared import START\nclass Metric:\n    start = START\n"
    folder: Path = workspace({"shared.py": "START = 7", "metrics/counting.py": counting})
    built = build_metrics({"count": {"class": str(folder / "metrics/counting.py")}}, folder)
    assert built["count"].start == 7


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ClassPathError, match=r"'Acuracy'.*Accuracy"):
        build_metrics({"accuracy": {"class": "Acuracy"}}, None)
