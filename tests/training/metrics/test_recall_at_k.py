"""Recall at k, against all orders in which equal scores may stand."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.metrics.classification import RecallAtK
from tests.training.conftest import in_turn


def mean_over_orders(scores: list[int], relevant: set[int], k: int) -> float:
    """The share of the relevant that stands in the first k, as a mean over all orders that the scores allow."""
    orders = [
        order
        for order in permutations(range(len(scores)))
        if [scores[i] for i in order] == sorted(scores, reverse=True)
    ]
    return sum(len(relevant & set(order[:k])) for order in orders) / len(orders) / len(relevant)


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of 5 items for 4 samples, with ties, and labels of which each sample has at least one."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (4, 5), generator=random)
    labels[:, 2] = 1
    return torch.randint(3, (4, 5), generator=random), labels


@in_turn("k", range(1, 6))
@in_turn("seed", range(4))
def test_recall_of_several_items_is_that_of_a_random_order_among_ties(seed: int, k: int) -> None:
    scores, labels = drawn(seed)
    metric = RecallAtK(k)
    metric.update(scores.float(), labels.float())
    samples = zip(scores.tolist(), labels.tolist(), strict=True)
    expected = [mean_over_orders(each, {i for i, y in enumerate(theirs) if y}, k) for each, theirs in samples]
    assert metric.compute() == pytest.approx(sum(expected) / 4, rel=1e-12)


@pytest.mark.parametrize("k", range(1, 6))
def test_recall_of_one_item_is_the_share_of_hits(k: int) -> None:
    scores, items = drawn(0)[0], torch.tensor([0, 2, 4, 4])
    metric = RecallAtK(k)
    metric.update(scores, items)
    expected = [mean_over_orders(each, {item}, k) for each, item in zip(scores.tolist(), items.tolist(), strict=True)]
    assert metric.compute() == pytest.approx(sum(expected) / 4, rel=1e-12)


def test_weights_make_the_mean_over_samples_a_weighted_one() -> None:
    scores, labels = drawn(0)
    # The last sample has nothing relevant, and does not count whatever its weight is.
    labels[3] = 0
    metric = RecallAtK(2)
    metric.update(scores, labels, torch.tensor([0.5, 2.25, 0.0, 7.0]))
    samples = zip(scores.tolist()[:2], labels.tolist()[:2], strict=True)
    first, second = [mean_over_orders(each, {i for i, y in enumerate(theirs) if y}, 2) for each, theirs in samples]
    assert first != second
    assert metric.compute() == pytest.approx((0.5 * first + 2.25 * second) / 2.75, rel=1e-12)


def test_recall_without_ties_is_a_count_by_hand() -> None:
    metric = RecallAtK(2)
    metric.update(torch.tensor([[0.1, 0.3, 0.2], [9.0, -1.0, 5.0], [1.0, 2.0, 3.0]]), torch.tensor([1, 1, 1]))
    assert metric.compute() == pytest.approx(2 / 3)


def test_a_model_that_scores_all_items_alike_has_what_chance_gives() -> None:
    metric = RecallAtK(10)
    metric.update(torch.zeros(1, 1000), torch.tensor([0]))
    assert metric.compute() == pytest.approx(10 / 1000)


def test_a_sample_without_a_relevant_item_does_not_count() -> None:
    metric = RecallAtK(1)
    metric.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1, 1], [0, 0]]))
    assert metric.compute() == 0.5
    metric.reset()
    metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([[0, 0]]))
    assert math.isnan(metric.compute())


def test_recall_of_sequences_is_that_of_all_their_elements() -> None:
    items, scores = torch.tensor([[0, 1, 2], [0, 0, 0]]), torch.eye(3) * torch.tensor([[1], [2], [3]])
    by_item, by_label = RecallAtK(1), RecallAtK(1)
    by_item.update(scores.expand(2, 3, 3), items)
    by_label.update(scores.expand(2, 3, 3), torch.nn.functional.one_hot(items, 3))
    assert by_item.compute() == by_label.compute() == pytest.approx(4 / 6)


@pytest.mark.parametrize("position", [0, 2])
def test_a_score_that_is_nan_makes_recall_nan(position: int) -> None:
    metric, scores = RecallAtK(2), torch.tensor([[3.0, 2.0, 1.0]])
    scores[0, position] = math.nan
    metric.update(scores, torch.tensor([1]))
    assert math.isnan(metric.compute())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([[1.0, 0.5, 0.0]], r"1 labels are neither 0 nor 1; make them so, e.g. \(rating > 3\).float\(\)"),
        ([3], "1 numbers in the target are of no score; count from 0, and leave out what is to be ignored"),
    ],
)
def test_targets_that_it_cannot_take_are_told_when_it_is_computed(target: list[Any], message: str) -> None:
    metric = RecallAtK(1)
    metric.update(torch.rand(1, 3), torch.tensor(target))
    with pytest.raises(DataError, match=f"^RecallAtK: {message}$"):
        metric.compute()


def test_k_above_the_number_of_items_is_refused() -> None:
    with pytest.raises(DataError, match=r"^RecallAtK: k is 4, and a sample has 3 scores; lower k$"):
        RecallAtK(4).update(torch.rand(2, 3), torch.tensor([0, 1]))


def test_k_below_1_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^RecallAtK: k is 0; it must be above 0$"):
        RecallAtK(0)
