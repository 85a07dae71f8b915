"""Metrics of recommenders, for ranking and for click rates.

GAUC and PairOrder judge the order of scores. ActualCTR, COPC and BucketError judge predicted click
rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.metrics.auc import Columns
from pipeline.metrics.base import (
    LABELS,
    MeanMetric,
    SumMetric,
    count_outside,
    count_wrong_labels,
    flat_numbers,
    flat_pairs,
    require_tensor,
    wide,
)

_IMPROBABLE = "predictions outside [0, 1] are no probabilities; return their sigmoid"


class GAUC(SumMetric):
    """Area under the ROC curve per user: the mean over users, weighted by their samples.

    A tie counts half. A user whose samples all have the same label is left out. The metric is nan
    if no user is left, or if a score is nan. All samples are kept, at 17 to 34 bytes each, and 8 to
    16 more with weights. See H. Zhu et al., 2017 (arXiv:1703.02091).

    Example:
        >>> import torch
        >>> from pipeline.metrics import GAUC
        >>> gauc = GAUC()
        >>> scores, labels = torch.tensor([0.1, 0.9, 0.4, 0.6]), torch.tensor([0, 1, 1, 0])
        >>> gauc.update(scores, labels, users=torch.tensor([3, 3, 5, 5]))
        >>> gauc.compute()
        0.5
    """

    mistakes: ClassVar[Mapping[str, str]] = {"unlabelled": LABELS}

    _names = ("scores", "positive", "users", "weights")

    def __init__(self) -> None:
        super().__init__()
        self.samples = Columns(type(self).__name__)

    def update(self, predictions: Tensor, target: Tensor, users: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: scores of any scale, [batch].
            target: labels [batch], 0 or 1.
            users: the user of each sample, an integer, [batch].
            weights: one weight per sample, [batch]; None if all count the same.

        Raises:
            DataError: the shapes differ, the users are not integers, or only some batches have
                weights.
        """
        pairs = "scores [batch] with labels [batch]"
        scores, labels = flat_pairs(self, predictions, target, pairs, "return one score per sample")
        users = require_tensor(self, users).flatten()
        if users.numel() != scores.numel() or users.is_floating_point():
            what = f"GAUC takes the user of each of {scores.numel()} samples as an integer"
            raise DataError(f"{what}, and got {users.numel()} of {str(users.dtype).removeprefix('torch.')}")
        self.add(nans=scores.isnan().sum(), unlabelled=count_wrong_labels(labels))
        columns = [scores.to(wide(scores.device)), labels == 1, users.long()]
        if weights is not None:
            columns += [self.weights_of(weights, scores)]
        self.samples.append(*columns)

    def compute(self) -> float:
        """Return the mean area, from 0 to 1; nan if it is undefined.

        Raises:
            DataError: a label is neither 0 nor 1, or a weight is negative or not finite.
        """
        sums = self.read()
        if not sums or sums["nans"]:
            return math.nan
        scores, positive, users, *weights = self.samples.all(torch.device("cpu"))
        amount = weights[0].double() if weights else torch.ones(len(scores), dtype=torch.float64)
        values, score = torch.unique(scores, return_inverse=True)
        ids, user = torch.unique(users, return_inverse=True)
        # Equal scores of one user are a group. Groups are sorted by user, and by score within a
        # user.
        groups, group = torch.unique(user * len(values) + score, return_inverse=True)
        user_of_group = groups // max(len(values), 1)
        group_zeros = torch.zeros(len(groups), dtype=torch.float64)
        positives = group_zeros.index_add(0, group, amount * positive)
        negatives = group_zeros.index_add(0, group, amount) - positives
        user_zeros = torch.zeros(len(ids), dtype=torch.float64)
        user_negatives = user_zeros.index_add(0, user_of_group, negatives)
        user_positives = user_zeros.index_add(0, user_of_group, positives)
        # The negatives of all users before the user of each group.
        earlier = (user_negatives.cumsum(0) - user_negatives)[user_of_group]
        below = negatives.cumsum(0) - negatives / 2 - earlier
        in_order = user_zeros.index_add(0, user_of_group, positives * below)
        pairs = user_negatives * user_positives
        areas = (in_order / pairs)[pairs > 0]
        user_weights = user_zeros.index_add(0, user, amount)[pairs > 0]
        return float((user_weights * areas).sum() / user_weights.sum())

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self.samples = Columns(type(self).__name__)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples: name -> tensor."""
        return super().state_dict() | dict(zip(self._names, self.samples.all(), strict=False))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.merge([state])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks together."""
        sums = [{name: value for name, value in state.items() if name not in self._names} for state in states]
        super().merge(sums)
        for state in states:
            self.samples.append(*(state[name] for name in self._names if name in state))


class PairOrder(SumMetric):
    """How many pairs are in order for each pair that is not: (right + 1) / (wrong + 1).

    This is PaddleRec's PosNegRatio. A pair with equal scores is not in order. The metric is nan if
    a score is nan.

    Example:
        >>> import torch
        >>> from pipeline.metrics import PairOrder
        >>> order = PairOrder()
        >>> order.update(torch.tensor([[2.0, 1.0], [3.0, 1.0], [1.0, 2.0]]))
        >>> order.compute()
        1.5
    """

    def update(self, predictions: Tensor, target: Any = None) -> None:
        """Add one batch.

        Args:
            predictions: scores of any scale, [batch, 2]: of the preferred one of each pair, and of
                the other one.
            target: ignored; the metric needs none.

        Raises:
            DataError: the scores have another shape.
        """
        scores = require_tensor(self, predictions)
        if scores.ndim != 2 or scores.shape[1] != 2:
            what = f"PairOrder takes scores [batch, 2], and got {tuple(scores.shape)}"
            raise DataError(f"{what}; return the score of the one that is preferred, and of the other")
        right = scores[:, 0] > scores[:, 1]
        self.add(right=right.sum(), wrong=(~right).sum(), nans=scores.isnan().sum())

    def compute(self) -> float:
        """Return the ratio, above 0; nan if there were no pairs."""
        sums = self.read()
        right = int(sums.get("right", 0))
        wrong = int(sums.get("wrong", 0))
        if not right + wrong or sums["nans"]:
            return math.nan
        return (right + 1) / (wrong + 1)


class ActualCTR(MeanMetric):
    """The share of clicks among the samples: the mean of the labels.

    The click rate that the model expects is ``Mean``.

    Example:
        >>> import torch
        >>> from pipeline.metrics import ActualCTR
        >>> rate = ActualCTR()
        >>> rate.update(torch.tensor([0.2, 0.9, 0.3, 0.4]), torch.tensor([0, 1, 0, 0]))
        >>> rate.compute()
        0.25
    """

    mistakes: ClassVar[Mapping[str, str]] = {"unlabelled": LABELS}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: scores [batch]; only their shape is checked.
            target: labels [batch], 0 or 1.
            weights: one weight per sample, [batch]; None if all count the same.

        Raises:
            DataError: the shapes differ, or there is not one weight per sample.
        """
        _, labels = flat_numbers(self, predictions, target, "labels")
        self.add_values(labels, weights)
        self.add(unlabelled=count_wrong_labels(labels))


class COPC(SumMetric):
    """Clicks over predicted clicks: the sum of the labels divided by the sum of the predictions.

    It is 1 if they agree.

    Example:
        >>> import torch
        >>> from pipeline.metrics import COPC
        >>> copc = COPC()
        >>> copc.update(torch.tensor([0.25, 0.5, 0.25]), torch.tensor([1, 0, 1]))
        >>> copc.compute()
        2.0
    """

    mistakes: ClassVar[Mapping[str, str]] = {"improbable": _IMPROBABLE, "unlabelled": LABELS}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: probabilities [batch].
            target: labels [batch], 0 or 1.
            weights: one weight per sample, [batch]; None if all count the same.

        Raises:
            DataError: the shapes differ, or there is not one weight per sample.
        """
        expected, clicks = flat_numbers(self, predictions, target, "labels")
        self.add(improbable=count_outside(expected, 0, 1), unlabelled=count_wrong_labels(clicks))
        if weights is not None:
            amount = self.weights_of(weights, clicks)
            expected = expected * amount
            clicks = clicks * amount
        self.add(clicks=clicks.sum(), expected=expected.sum())

    def compute(self) -> float:
        """Return the ratio, 0 or more.

        It is nan if there were no samples, and infinite if only the labels have clicks.

        Raises:
            DataError: there were wrong values among predictions, labels or weights.
        """
        sums = self.read()
        return float(sums["clicks"] / sums["expected"]) if sums else math.nan


class BucketError(SumMetric):
    """How far the click rate differs from the predicted one, as a share of the predicted one.

    It is computed among samples with similar predictions.

    Samples are counted in buckets by their prediction. Neighbouring buckets, up to a distance of
    0.01, are joined until the standard error of the predicted click rate of so many samples is
    below 5 % of it. The error is the mean of |actual / predicted - 1| over these groups, weighted
    by their samples. Buckets that never reach 5 % are left out; if none is left, the error is 0.

    This is PaddleRec's bucket error, with one difference: there the prediction of a bucket is its
    lower end, and here it is the mean of its predictions.

    Args:
        buckets: the number of buckets.

    Raises:
        ConfigError: ``buckets`` is below 1.

    Example:
        >>> import torch
        >>> from pipeline.metrics import BucketError
        >>> error = BucketError()
        >>> error.update(torch.full((1000,), 0.5), torch.arange(1000) % 4 == 0)
        >>> error.compute()  # the click rate is 0.25
        0.5
    """

    mistakes: ClassVar[Mapping[str, str]] = {"improbable": _IMPROBABLE, "unlabelled": LABELS}

    def __init__(self, buckets: int = 4096) -> None:
        super().__init__()
        if buckets < 1:
            raise ConfigError(f"BucketError: buckets is {buckets}; it must be above 0")
        self.buckets = int(buckets)

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: probabilities [batch].
            target: labels [batch], 0 or 1.
            weights: as how many samples each sample counts, [batch]; None if all count the same.

        Raises:
            DataError: the shapes differ, or there is not one weight per sample.
        """
        expected, clicks = flat_numbers(self, predictions, target, "labels")
        self.add(improbable=count_outside(expected, 0, 1), unlabelled=count_wrong_labels(clicks))
        amount = torch.ones_like(clicks) if weights is None else self.weights_of(weights, clicks)
        place = (expected.nan_to_num() * self.buckets).long().clamp(0, self.buckets - 1)
        values = torch.stack([amount, amount * expected, amount * clicks])
        self.add(counts=values.new_zeros(3, self.buckets).index_add(1, place, values))

    def compute(self) -> float:
        """Return the error, 0 or more; nan if there were no samples, or if a prediction is nan.

        Raises:
            DataError: there were wrong values among predictions, labels or weights.
        """
        sums = self.read()
        if not sums or not sums["counts"][0].any() or sums["counts"].isnan().any():
            return math.nan
        error = 0.0
        counted = 0.0
        # The first bucket of the current group, and the sums over the group.
        first: int | None = None
        samples = 0.0
        expected = 0.0
        clicks = 0.0
        for number, (more_samples, more_expected, more_clicks) in enumerate(sums["counts"].T.tolist()):
            if first is None or number - first > 0.01 * self.buckets:
                first = number
                samples = 0.0
                expected = 0.0
                clicks = 0.0
            samples += more_samples
            expected += more_expected
            clicks += more_clicks
            rate = expected / samples if samples else 0.0
            if rate and math.sqrt(max(1 - rate, 0) / (rate * samples)) < 0.05:
                error += abs(clicks / expected - 1) * samples
                counted += samples
                first = None
        return error / counted if counted else 0.0
