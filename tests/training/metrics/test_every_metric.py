"""What holds for each of our metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline import metrics
from pipeline.check import checker
from pipeline.errors import DataError
from pipeline.metrics import AUC
from pipeline.metrics.base import MAE, RMSE, Accuracy, LogLoss, Mean
from pipeline.metrics.classification import F1, Precision, Recall, RecallAtK
from pipeline.metrics.ranking import COPC, GAUC, ActualCTR, BucketError, PairOrder
from tests.training.conftest import in_turn

# Predictions, target, and what else an update takes.
Data = tuple[Tensor, ...]
random = torch.Generator().manual_seed(0)
PAIRS: Data = torch.rand(24, generator=random), torch.randint(2, (24,), generator=random).float()
CLASSES: Data = torch.randn(24, 5, generator=random), torch.randint(5, (24,), generator=random)
USERS: Data = *PAIRS, torch.randint(4, (24,), generator=random)
TWO: Data = torch.randn(24, 2, generator=random), PAIRS[1]
WEIGHTS = torch.randint(1, 4, (24,), generator=random)
LABELS: Data = torch.randn(24, 5, generator=random), torch.randint(2, (24, 5), generator=random)

EVERY: list[tuple[str, Callable[[], Any], Data]] = [
    ("mean", Mean, PAIRS),
    ("accuracy", Accuracy, CLASSES),
    ("auc", AUC, PAIRS),
    ("auc in bins", lambda: AUC(exact_samples=10), PAIRS),
    ("log loss", LogLoss, PAIRS),
    ("log loss of logits", lambda: LogLoss(from_logits=True), PAIRS),
    ("mae", MAE, PAIRS),
    ("rmse", RMSE, PAIRS),
    ("precision of classes", Precision, CLASSES),
    ("recall of labels", lambda: Recall("binary"), PAIRS),
    ("micro f1", lambda: F1("micro"), CLASSES),
    ("f1 of logits", lambda: F1(threshold=0), PAIRS),
    ("recall at 2 of an item", lambda: RecallAtK(2), CLASSES),
    ("recall at 2 of items", lambda: RecallAtK(2), LABELS),
    ("gauc", GAUC, USERS),
    ("gauc with weights", GAUC, (*USERS, WEIGHTS)),
    ("pair order", PairOrder, TWO),
    ("actual ctr", ActualCTR, PAIRS),
    ("copc", COPC, PAIRS),
    ("bucket error", lambda: BucketError(3), PAIRS),
    ("auc with weights", AUC, (*PAIRS, WEIGHTS)),
    ("mean with weights", Mean, (*PAIRS, WEIGHTS)),
    ("copc with weights", COPC, (*PAIRS, WEIGHTS)),
    ("accuracy with weights", Accuracy, (*CLASSES, WEIGHTS)),
    ("precision of classes with weights", Precision, (*CLASSES, WEIGHTS)),
    ("recall of labels with weights", Recall, (*PAIRS, WEIGHTS)),
    ("micro f1 with weights", lambda: F1("micro"), (*CLASSES, WEIGHTS)),
    ("recall at 2 of an item with weights", lambda: RecallAtK(2), (*CLASSES, WEIGHTS)),
    ("recall at 2 of items with weights", lambda: RecallAtK(2), (*LABELS, WEIGHTS)),
]
every = in_turn(("name", "make", "data"), EVERY)


def updated(metric: Any, data: Data, sizes: list[int]) -> Any:
    """The metric after batches of these sizes."""
    for parts in zip(*(part.split(sizes) for part in data), strict=True):
        metric.update(*parts)
    return metric


def test_every_metric_that_has_a_name_is_tested_here() -> None:
    assert {type(make()).__name__ for _, make, _ in EVERY} == set(metrics.__all__) - {"Metric", "build_metrics"}


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 24), max_size=8))
def test_how_a_pass_is_split_into_batches_changes_nothing(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), 24]
    sizes = [after - before for before, after in pairwise(ends)]
    for name, make, data in EVERY:
        whole = updated(make(), data, [24]).compute()
        assert updated(make(), data, sizes).compute() == pytest.approx(whole, rel=1e-12), name


@every
def test_a_pass_goes_on_from_the_state_that_was_kept_in_its_midst(make: Callable[[], Any], data: Data) -> None:
    first, second = (tuple(part[own] for part in data) for own in (slice(15), slice(15, 24)))
    before, after = updated(make(), first, [8, 7]), make()
    state = before.state_dict()
    updated(before, second, [9])
    after.load_state_dict(state)
    continued = updated(after, second, [9]).compute()
    whole = updated(make(), data, [24]).compute()
    assert continued == before.compute()
    # In one batch the same numbers are summed in another order.
    assert continued == pytest.approx(whole, rel=1e-12)


@every
def test_a_state_is_tensors_and_plain_numbers(make: Callable[[], Any], data: Data) -> None:
    assert all(type(each) in {Tensor, int, float} for each in updated(make(), data, [24]).state_dict().values())


@every
def test_a_metric_starts_again_after_a_reset(make: Callable[[], Any], data: Data) -> None:
    metric = updated(make(), data, [24])
    expected = metric.compute()
    metric.reset()
    assert math.isnan(metric.compute())
    assert updated(metric, data, [24]).compute() == expected


@every
def test_a_metric_of_nothing_is_nan(make: Callable[[], Any], data: Data) -> None:
    assert math.isnan(make().compute())
    assert math.isnan(updated(make(), tuple(part[:0] for part in data), [0]).compute())


@every
def test_a_number_is_a_float_whatever_the_precision_of_the_predictions(make: Callable[[], Any], data: Data) -> None:
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        rounded = data[0].to(kind)
        found = updated(make(), (rounded.requires_grad_(), *data[1:]), [20, 4]).compute()
        assert type(found) is float
        assert found == pytest.approx(
            updated(make(), (rounded.detach().double(), *data[1:]), [24]).compute(), rel=1e-12
        )


@every
def test_an_update_reads_no_number_and_so_waits_for_no_device(make: Callable[[], Any], data: Data) -> None:
    # A tensor on the device "meta" has no numbers to read.
    metric = updated(make(), tuple(part.to("meta") for part in data), [8, 8, 8])
    assert all(each.is_meta for each in metric.state_dict().values() if isinstance(each, Tensor))


@every
def test_a_state_from_another_device_moves_to_that_of_the_predictions(make: Callable[[], Any], data: Data) -> None:
    metric = make()
    metric.load_state_dict(updated(make(), data, [24]).state_dict())
    updated(metric, tuple(part.to("meta") for part in data), [24])
    assert all(each.is_meta for each in metric.state_dict().values() if isinstance(each, Tensor))


def test_a_metric_is_named_in_a_config_by_its_bare_name(linear: Path) -> None:
    kinds = ["Mean", "Accuracy", "AUC", "LogLoss", "MAE", "RMSE", "Precision", "Recall", "F1", "COPC"]
    named = ", ".join(f"{kind.lower()}: {{class: {kind}}}" for kind in kinds)
    assert checker.check(linear, [f"phase.line.metrics={{{named}}}"]) == []
    assert checker.check(linear, [f"phase.line.metrics={{{named}, m: {{class: Meen}}}}"]) != []


def test_the_arguments_of_a_metric_are_checked_from_its_source(linear: Path) -> None:
    faults = checker.check(
        linear, ["phase.line.metrics={m: {class: RecallAtK}, f: {class: F1, args: {avrage: micro}}}"]
    )
    assert [each.message for each in faults] == [
        "RecallAtK needs the argument k; add it",
        "F1 has no argument 'avrage'; did you mean 'average'?",
    ]


SCORES = "compares scores [batch] with labels [batch], and got"
CHOICES = "compares scores [batch, classes] with classes [batch], and got"
NUMBERS = "compares predictions [batch] with labels [batch], and got"
TARGETS = "compares predictions [batch] with targets [batch], and got"
ITEMS = "compares scores [batch, items] with items [batch], and got"
SHAPES = [
    (AUC(), (4, 2), (4,), f"{SCORES} (4, 2) and (4,); return one score per sample"),
    (AUC(), (2, 3), (3, 2), f"{SCORES} (2, 3) and (3, 2); return one score per sample"),
    (LogLoss(), (4, 2), (4,), f"{NUMBERS} (4, 2) and (4,); return one prediction per sample"),
    (MAE(), (4, 1), (4, 3), f"{TARGETS} (4, 1) and (4, 3); return one prediction per sample"),
    (RMSE(), (4,), (), f"{TARGETS} (4,) and (); return one prediction per sample"),
    (Accuracy(), (4,), (4,), f"{CHOICES} (4,) and (4,); use another metric"),
    (Accuracy(), (4, 3), (4, 1), f"{CHOICES} (4, 3) and (4, 1); use another metric"),
    (Accuracy(), (3,), (), f"{CHOICES} (3,) and (); use another metric"),
    (Precision(), (4, 3), (4, 3), f"{CHOICES} (4, 3) and (4, 3); return one score per class"),
    (Recall(), (4, 1), (5,), f"{SCORES} (4, 1) and (5,); return one score per sample, or one per class"),
    (F1(), (4,), (5,), f"{SCORES} (4,) and (5,); return one score per sample, or one per class"),
    (COPC(), (4, 2), (4,), f"{NUMBERS} (4, 2) and (4,); return one prediction per sample"),
    (ActualCTR(), (4, 2), (4,), f"{NUMBERS} (4, 2) and (4,); return one prediction per sample"),
    (BucketError(), (4, 2), (4,), f"{NUMBERS} (4, 2) and (4,); return one prediction per sample"),
    (RecallAtK(1), (4, 3), (4, 2),
     f"{ITEMS} (4, 3) and (4, 2); return one score per item, and the item or a label for each of them"),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "predictions", "target", "message"), SHAPES)
def test_a_metric_refuses_shapes_that_it_would_misread(
    metric: Any, predictions: tuple[int, ...], target: tuple[int, ...], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        metric.update(torch.zeros(predictions), torch.zeros(target, dtype=torch.int64))
    assert str(caught.value) == f"{type(metric).__name__} {message}"


@pytest.mark.parametrize(
    ("metric", "what"),
    [
        (Accuracy(), "classes"),
        (Precision(), "classes"),
        (Recall(), "classes"),
        (F1(), "classes"),
        (RecallAtK(1), "items"),
    ],
)
def test_float_targets_are_refused_where_classes_are_wanted(metric: Any, what: str) -> None:
    with pytest.raises(DataError) as caught:
        metric.update(torch.rand(4, 3), torch.zeros(4))
    assert str(caught.value) == (
        f"{type(metric).__name__} takes {what} as integers, and got float32; give it target.long()"
    )


@every
def test_what_is_no_tensor_is_refused(make: Callable[[], Any], data: Data) -> None:
    metric = make()
    with pytest.raises(DataError) as caught:
        metric.update((data[0], data[0]), *data[1:])
    name = type(metric).__name__
    assert (
        str(caught.value)
        == f"{name} takes tensors, and got a tuple of 2; return one tensor, or write a metric of your own"
    )


def test_a_target_that_is_no_tensor_is_refused() -> None:
    metric: Any = AUC()
    with pytest.raises(DataError, match=r"^AUC takes tensors, and got None; return one tensor, or write a metric"):
        metric.update(torch.rand(4), None)


@every
@in_turn("cuts", [(0, 24), (1, 9, 24), (24, 24), (8, 16, 24)])
def test_states_of_ranks_are_merged_to_that_of_one(make: Callable[[], Any], data: Data, cuts: tuple[int, ...]) -> None:
    ranks = [
        updated(make(), tuple(part[first:last] for part in data), [last - first])
        for first, last in pairwise((0, *cuts))
    ]
    merged = make()
    merged.merge([rank.state_dict() for rank in ranks])
    whole = updated(make(), data, [24])
    if isinstance(merged, AUC):
        # In bins one process is off by more than the merged samples are.
        whole = updated(AUC(), data, [24])
    assert merged.compute() == pytest.approx(
        whole.compute(), rel=0.1 if merged.__dict__.get("edges") is not None else 1e-9
    )


@every
def test_a_merged_metric_goes_on(make: Callable[[], Any], data: Data) -> None:
    first, second = (updated(make(), tuple(part[own] for part in data), [8]) for own in (slice(0, 8), slice(8, 16)))
    first.merge([first.state_dict(), second.state_dict()])
    updated(first, tuple(part[16:] for part in data), [8])
    assert first.compute() == pytest.approx(updated(make(), data, [8, 8, 8]).compute(), rel=1e-9)


@every
def test_ranks_without_a_sample_have_no_number_together(make: Callable[[], Any], data: Data) -> None:
    merged = make()
    merged.merge([make().state_dict(), make().state_dict()])
    assert math.isnan(merged.compute())


drawn = torch.Generator().manual_seed(2)
# Few scores, so that there are ties, and the bins of an AUC have one each.
FEW: Data = torch.randint(1, 7, (300,), generator=drawn) / 7, torch.randint(2, (300,), generator=drawn)
OF_USERS: Data = *FEW, torch.randint(9, (300,), generator=drawn)
CHOICE: Data = torch.randint(7, (300, 5), generator=drawn), torch.randint(5, (300,), generator=drawn)
RELEVANT: Data = CHOICE[0], torch.randint(2, (300, 5), generator=drawn)
# Some count nothing.
COUNTS = torch.randint(4, (300,), generator=drawn)

WEIGHTED: list[tuple[str, Callable[[], Any], Data]] = [
    ("auc", AUC, FEW),
    ("auc in bins", lambda: AUC(exact_samples=150), FEW),
    ("gauc", GAUC, OF_USERS),
    ("log loss", LogLoss, FEW),
    ("mae", MAE, FEW),
    ("rmse", RMSE, FEW),
    ("mean", Mean, FEW),
    ("actual ctr", ActualCTR, FEW),
    ("copc", COPC, FEW),
    ("bucket error", lambda: BucketError(2), FEW),
    ("accuracy", Accuracy, CHOICE),
    ("precision of labels", Precision, FEW),
    ("recall of labels", Recall, FEW),
    ("f1 of labels", F1, FEW),
    ("macro precision", Precision, CHOICE),
    ("macro recall", Recall, CHOICE),
    ("macro f1", F1, CHOICE),
    ("micro f1", lambda: F1("micro"), CHOICE),
    ("recall at 2 of an item", lambda: RecallAtK(2), CHOICE),
    ("recall at 2 of items", lambda: RecallAtK(2), RELEVANT),
]
weighted = in_turn(("name", "make", "data"), WEIGHTED)


def test_every_metric_but_that_of_pairs_takes_weights() -> None:
    named = set(metrics.__all__) - {"Metric", "PairOrder", "build_metrics"}
    assert {type(make()).__name__ for _, make, _ in WEIGHTED} == named


@weighted
def test_a_weight_counts_as_so_many_samples(make: Callable[[], Any], data: Data) -> None:
    found = updated(make(), (*data, COUNTS), [100, 150, 50])
    repeated = updated(make(), tuple(part.repeat_interleave(COUNTS, 0) for part in data), [int(COUNTS.sum())])
    assert found.compute() == pytest.approx(repeated.compute(), rel=1e-12)
    assert found.compute() != pytest.approx(updated(make(), data, [300]).compute(), rel=1e-6)


@weighted
def test_a_metric_of_samples_that_count_nothing_is_nan(make: Callable[[], Any], data: Data) -> None:
    assert math.isnan(updated(make(), (*data, torch.zeros(300)), [300]).compute())


@weighted
def test_weights_of_another_number_are_refused(make: Callable[[], Any], data: Data) -> None:
    metric = make()
    with pytest.raises(DataError) as caught:
        metric.update(*(part[:4] for part in data), torch.ones(3))
    what = "weighs 4 numbers, and got 3 weights; give one weight per sample"
    assert str(caught.value) == f"{type(metric).__name__} {what}"


@weighted
@in_turn("bad", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_negative_or_not_finite_is_told(make: Callable[[], Any], data: Data, bad: float) -> None:
    weights = torch.ones(10)
    weights[3] = bad
    metrics = [updated(make(), (*(part[:10] for part in data), weights), [10]) for _ in range(2)]
    together = make()
    together.merge([metric.state_dict() for metric in metrics])
    for metric, count in ((metrics[0], 1), (together, 2)):
        with pytest.raises(DataError) as caught:
            metric.compute()
        what = f"{count} weights are negative or not finite; a weight says as how many samples one counts"
        assert str(caught.value) == f"{type(metric).__name__}: {what}"


@pytest.mark.parametrize("make", [AUC, GAUC])
def test_weights_of_some_batches_alone_are_refused(make: Callable[[], Any]) -> None:
    users = [torch.zeros(4, dtype=torch.int64)] if make is GAUC else []
    metric = make()
    metric.update(torch.rand(4), torch.ones(4), *users, torch.ones(4))
    with pytest.raises(DataError, match="some batches have weights and some have none; give all of them weights"):
        metric.update(torch.rand(4), torch.ones(4), *users)
