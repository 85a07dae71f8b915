"""AUC against a count of all pairs, and its histogram against the exact number and the bound that it gives."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.metrics import AUC


def pair_count(scores: list[float], labels: list[int]) -> float:
    """The share of (positive, negative) pairs in the right order, ties counting half."""
    labelled = list(zip(scores, labels, strict=True))
    pairs = list(product([s for s, y in labelled if y], [s for s, y in labelled if not y]))
    return sum(1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs) / len(pairs)


def auc_of(scores: Tensor, labels: Tensor, *, batch: int = 10**9, exact_samples: int = 10**9) -> AUC:
    """An AUC that was given these in batches."""
    auc = AUC(exact_samples)
    for some, theirs in zip(scores.split(batch), labels.split(batch), strict=True):
        auc.update(some, theirs)
    return auc


def drawn(size: int, levels: int = 0) -> tuple[Tensor, Tensor]:
    """Scores, rounded to a number of levels if that is given, and labels of which a fifth is positive."""
    random = torch.Generator().manual_seed(size)
    labels = (torch.rand(size, generator=random) < 0.2).float()
    scores = torch.sigmoid(torch.randn(size, generator=random) + labels)
    return (scores * levels).round() / levels if levels else scores, labels


def test_auc_is_the_share_of_pairs_in_order_with_ties_counting_half() -> None:
    for seed in range(25):
        random = torch.Generator().manual_seed(seed)
        size = int(torch.randint(2, 30, (), generator=random))
        scores = torch.randint(-3, 3 + 20 * (seed % 2), (size,), generator=random).float() / 4
        labels = torch.randint(2, (size,), generator=random)
        labels[:2] = torch.tensor([0, 1])
        auc = auc_of(scores, labels, batch=4)
        assert auc.compute() == pytest.approx(pair_count(scores.tolist(), labels.tolist()), abs=1e-12), seed


def test_auc_of_scores_of_any_shape_and_type_is_the_same() -> None:
    scores, labels = torch.tensor([0.5, -1.0, 2.0, 0.5]), torch.tensor([1, 0, 0, 1])
    for kind, shape in product([torch.float16, torch.bfloat16, torch.float64], [(4,), (4, 1), (2, 2)]):
        auc = AUC()
        auc.update(scores.to(kind).view(shape).requires_grad_(), labels.bool())
        assert auc.compute() == 0.5


def test_auc_tells_scores_apart_that_only_float64_does() -> None:
    scores = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert auc_of(scores, torch.tensor([0, 1])).compute() == 1.0


@pytest.mark.parametrize("exact_samples", [1, 10])
@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1, 1], []])
def test_auc_is_nan_where_a_class_is_absent(labels: list[int], exact_samples: int) -> None:
    auc = auc_of(torch.arange(len(labels)).float(), torch.tensor(labels), exact_samples=exact_samples)
    assert math.isnan(auc.compute())


@pytest.mark.parametrize("exact_samples", [1, 10])
def test_auc_is_nan_where_a_score_is_nan(exact_samples: int) -> None:
    scores = torch.tensor([0.1, math.nan, 0.3])
    assert math.isnan(auc_of(scores, torch.tensor([0, 1, 1]), exact_samples=exact_samples).compute())


def test_auc_takes_infinite_scores() -> None:
    scores, labels = torch.tensor([-math.inf, 0.0, math.inf, math.inf]), torch.tensor([0, 1, 0, 1])
    expected = pair_count(scores.tolist(), labels.tolist())
    assert auc_of(scores, labels).compute() == expected
    assert auc_of(scores.repeat(50), labels.repeat(50), batch=40, exact_samples=100).compute() == expected


def test_auc_refuses_labels_that_are_neither_0_nor_1_when_it_is_computed() -> None:
    auc = auc_of(torch.rand(4), torch.tensor([0.0, 0.5, 1.0, 3.0]))
    message = r"^AUC: 2 labels are neither 0 nor 1; make them so, e.g. \(rating > 3\).float\(\)$"
    with pytest.raises(DataError, match=message):
        auc.compute()


def test_auc_of_two_million_scores_in_bins_is_within_its_bound() -> None:
    scores, labels = drawn(2_000_000)
    binned = auc_of(scores, labels, batch=300_000, exact_samples=500_000)
    exact = auc_of(scores, labels).compute()
    assert 0 < abs(binned.compute() - exact) <= binned.error < 1 / 2048


def test_auc_is_exact_up_to_its_number_of_samples_and_binned_beyond() -> None:
    scores, labels = drawn(10_000)
    auc = auc_of(scores, labels, batch=1000, exact_samples=10_000)
    assert (auc.compute(), auc.error) == (auc_of(scores, labels).compute(), 0.0)
    auc.update(torch.tensor([0.5]), torch.tensor([1]))
    auc.compute()
    assert auc.error > 0


@pytest.mark.parametrize("levels", [1, 2, 10])
def test_auc_in_bins_is_exact_where_many_scores_are_equal(levels: int) -> None:
    scores, labels = drawn(50_000, levels)
    binned = auc_of(scores, labels, batch=5000, exact_samples=20_000)
    assert binned.compute() == pytest.approx(auc_of(scores, labels).compute(), abs=1e-12)
    assert binned.error == 0.0


@pytest.mark.parametrize("exact_samples", [5, 100, 3000])
def test_auc_in_bins_is_off_by_no_more_than_it_says_whatever_the_scores(exact_samples: int) -> None:
    for levels in (0, 3, 50, 5000):
        scores, labels = drawn(5000, levels)
        binned = auc_of(scores, labels, batch=700, exact_samples=exact_samples)
        assert abs(binned.compute() - auc_of(scores, labels).compute()) <= binned.error + 1e-12


def test_auc_in_bins_does_not_depend_on_the_batches() -> None:
    scores, labels = drawn(20_000)
    found = {auc_of(scores, labels, batch=batch, exact_samples=6000).compute() for batch in (7, 500, 4096, 20_000)}
    assert len(found) == 1


def test_auc_warns_where_later_scores_are_spread_otherwise(log_lines: list[str]) -> None:
    scores, labels = drawn(20_000)
    auc = auc_of(scores.sort().values, labels, batch=1000, exact_samples=5000)
    auc.compute()
    spread = "scores after the first 5000 samples are spread otherwise; mix the data, or set exact_samples to 20000"
    assert log_lines == [f"WARNING AUC: may be off by {auc.error:.2g}: {spread}\n"]


def test_auc_does_not_warn_where_the_data_are_mixed(log_lines: list[str]) -> None:
    auc_of(*drawn(50_000), batch=1000, exact_samples=20_000).compute()
    assert log_lines == []


def test_auc_keeps_no_more_memory_however_many_samples_there_are() -> None:
    scores, labels = drawn(10_000)
    auc = AUC(exact_samples=2000)
    sizes = []
    for some, theirs in zip(scores.split(100), labels.split(100), strict=True):
        auc.update(some, theirs)
        sizes.append(sum(each.nbytes for each in (*auc.sums.values(), *auc.samples.buffers)))
    assert max(sizes) <= max(18 * 2000, 100_000)
    assert len(set(sizes[20:])) == 1


def test_auc_keeps_no_batch_alive() -> None:
    wide = torch.rand(10, 1000)
    auc = AUC()
    auc.update(wide[:, 0], torch.ones(10))
    assert auc.samples.buffers[0].untyped_storage().nbytes() == 2 * 10 * 8


def test_auc_that_keeps_no_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^AUC: exact_samples is 0; it must be above 0$"):
        AUC(exact_samples=0)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_ranks_with_more_samples_than_are_kept_are_merged_bin_by_bin(spread: float) -> None:
    draw = torch.Generator().manual_seed(3)
    ranks, whole = [], AUC()
    # The last rank has few; the second has other scores, and a score that a tenth of all samples share.
    for count, shift in ((40_000, 0.0), (60_000, spread), (900, 0.0)):
        labels = torch.randint(2, (count,), generator=draw).float()
        scores = torch.randn(count, generator=draw, dtype=torch.float64) + labels + shift
        scores[::10] = 0.25
        rank = AUC(exact_samples=1000)
        for own in (rank, whole):
            own.update(scores, labels)
        ranks.append(rank)
    merged = AUC(exact_samples=1000)
    merged.merge([rank.state_dict() for rank in ranks])
    assert merged.compute() == pytest.approx(whole.compute(), abs=1 / 1024)


def test_samples_of_ranks_are_merged_exactly_though_they_are_more_than_one_keeps() -> None:
    draw = torch.Generator().manual_seed(3)
    scores, labels = torch.randn(3000, generator=draw), torch.randint(2, (3000,), generator=draw).float()
    ranks, whole, merged = [], AUC(), AUC(exact_samples=1000)
    whole.update(scores, labels)
    for part, own in zip(scores.chunk(3), labels.chunk(3), strict=True):
        rank = AUC(exact_samples=1000)
        rank.update(part, own)
        ranks.append(rank.state_dict())
    merged.merge(ranks)
    assert merged.compute() == whole.compute()
