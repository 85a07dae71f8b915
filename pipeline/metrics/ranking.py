"""How well a recommender ranks and how honest its click rates are: GAUC, PairOrder, ActualCTR, COPC and BucketError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import pipeline.metrics.base as metric
from pipeline.errors import ConfigError, DataError
from pipeline.metrics.auc import Columns

_PAIRS, _REMEDY = "scores [batch] with labels [batch]", "return one score per sample"

_IMPROBABLE = "predictions outside [0, 1] are no probabilities; return their sigmoid"


class GAUC(metric.SumMetric):
    """The area under the ROC curve of each user's samples, ties counting half; the mean, weighted by the users' samples.

    Users all of whose samples have one label are left out; with none left, or where a score is nan, it is nan. All samples
    are kept, at 17 to 34 bytes each, and 8 to 16 more with weights. H. Zhu et al., 2017 (arXiv:1703.02091).
    """

    mistakes: ClassVar[Mapping[str, str]] = {"unlabelled": metric.LABELS}

    _names = ("scores", "positive", "users", "weights")

    def __init__(self) -> None:
        super().__init__()
        self.samples = Columns(type(self).__name__)

    def update(self, predictions: Tensor, target: Tensor, users: Tensor, weights: Tensor | None = None) -> None:
        """Scores [batch] of any scale, labels [batch], 0 or 1, the user of each [batch], an integer, and weights [batch]."""
        scores, labels = metric.flat_pairs(self, predictions, target, _PAIRS, _REMEDY)
        users = metric.tensor(self, users).flatten()
        if users.numel() != scores.numel() or users.is_floating_point():
            what = f"GAUC takes the user of each of {scores.numel()} samples as an integer"
            raise DataError(f"{what}, and got {users.numel()} of {str(users.dtype).removeprefix('torch.')}")
        self.add(nans=scores.isnan().sum(), unlabelled=metric.no_labels(labels))
        columns = [scores.to(metric.wide(scores.device)), labels == 1, users.long()]
        self.samples.append(*columns, *([] if weights is None else [self.weights_of(weights, scores)]))

    def compute(self) -> float:
        """The mean area, from 0 to 1."""
        sums = self.read()
        if not sums or sums["nans"]:
            return math.nan
        scores, positive, users, *weights = self.samples.all(torch.device("cpu"))
        amount = weights[0].double() if weights else torch.ones(len(scores), dtype=torch.float64)
        values, score = torch.unique(scores, return_inverse=True)
        ids, user = torch.unique(users, return_inverse=True)
        # Equal scores of one user are a group; groups are in the order of users, and of their scores.
        groups, group = torch.unique(user * len(values) + score, return_inverse=True)
        none, of_user = torch.zeros(len(groups), dtype=torch.float64), groups // max(len(values), 1)
        positives = none.index_add(0, group, amount * positive)
        negatives = none.index_add(0, group, amount) - positives
        of_users = torch.zeros(len(ids), dtype=torch.float64)
        all_negatives = of_users.index_add(0, of_user, negatives)
        before = (all_negatives.cumsum(0) - all_negatives)[of_user]
        in_order = of_users.index_add(0, of_user, positives * (negatives.cumsum(0) - negatives / 2 - before))
        pairs = all_negatives * of_users.index_add(0, of_user, positives)
        total = of_users.index_add(0, user, amount)[pairs > 0]
        return float((total * (in_order / pairs)[pairs > 0]).sum() / total.sum())

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self.samples = Columns(type(self).__name__)

    def state_dict(self) -> dict[str, Any]:
        """The samples: name -> tensor."""
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


class PairOrder(metric.SumMetric):
    """How many pairs are in order for each that is not: (right + 1) / (wrong + 1). PaddleRec's PosNegRatio.

    A pair whose scores are equal is not in order. nan where a score is nan.
    """

    def update(self, predictions: Tensor, target: Any = None) -> None:
        """Scores [batch, 2] of any scale: of the one that is preferred, and of the other. There is no target."""
        scores = metric.tensor(self, predictions)
        if scores.ndim != 2 or scores.shape[1] != 2:
            what = f"PairOrder takes scores [batch, 2], and got {tuple(scores.shape)}"
            raise DataError(f"{what}; return the score of the one that is preferred, and of the other")
        right = scores[:, 0] > scores[:, 1]
        self.add(right=right.sum(), wrong=(~right).sum(), nans=scores.isnan().sum())

    def compute(self) -> float:
        """The ratio, above 0; nan if there was no pair."""
        sums = self.read()
        right, wrong = (int(sums.get(name, 0)) for name in ("right", "wrong"))
        return math.nan if not right + wrong or sums["nans"] else (right + 1) / (wrong + 1)


class ActualCTR(metric.MeanMetric):
    """The share of clicks among the samples: the mean of the labels. What the model expects is ``Mean``."""

    mistakes: ClassVar[Mapping[str, str]] = {"unlabelled": metric.LABELS}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Scores [batch], of which nothing is made, labels [batch], 0 or 1, and weights [batch]."""
        _, labels = metric.numbers(self, predictions, target, "labels")
        self.add_values(labels, weights)
        self.add(unlabelled=metric.no_labels(labels))


class COPC(metric.SumMetric):
    """Clicks over predicted clicks: the sum of the labels divided by that of the predictions; 1 where they agree."""

    mistakes: ClassVar[Mapping[str, str]] = {"improbable": _IMPROBABLE, "unlabelled": metric.LABELS}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Probabilities [batch], labels [batch], 0 or 1, and weights [batch]."""
        expected, clicks = metric.numbers(self, predictions, target, "labels")
        self.add(improbable=metric.outside(expected, 0, 1), unlabelled=metric.no_labels(clicks))
        if weights is not None:
            amount = self.weights_of(weights, clicks)
            expected, clicks = expected * amount, clicks * amount
        self.add(clicks=clicks.sum(), expected=expected.sum())

    def compute(self) -> float:
        """The ratio, of 0 or more; nan if there was nothing, and infinite where only the labels have clicks."""
        sums = self.read()
        return float(sums["clicks"] / sums["expected"]) if sums else math.nan


class BucketError(metric.SumMetric):
    """How far the click rate is off the predicted one, as a share of it, among samples that are predicted alike.

    Samples are counted in buckets by their prediction. Neighbouring buckets, within 0.01, are put together until the click
    rate that they predict is sure to 5 %, by the standard error of so many samples; the error is the mean of
    |actual / predicted - 1| over these, weighted by their samples. What never becomes sure is left out; with nothing left
    it is 0, as in PaddleRec. There the prediction of a bucket is its lower end; here it is the mean of its predictions.

    Args:
        buckets: how many there are.
    """

    mistakes: ClassVar[Mapping[str, str]] = {"improbable": _IMPROBABLE, "unlabelled": metric.LABELS}

    def __init__(self, buckets: int = 4096) -> None:
        super().__init__()
        if buckets < 1:
            raise ConfigError(f"BucketError: buckets is {buckets}; it must be above 0")
        self.buckets = int(buckets)

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Probabilities [batch], labels [batch], 0 or 1, and weights [batch], as so many samples."""
        expected, clicks = metric.numbers(self, predictions, target, "labels")
        self.add(improbable=metric.outside(expected, 0, 1), unlabelled=metric.no_labels(clicks))
        amount = torch.ones_like(clicks) if weights is None else self.weights_of(weights, clicks)
        place = (expected.nan_to_num() * self.buckets).long().clamp(0, self.buckets - 1)
        values = torch.stack([amount, amount * expected, amount * clicks])
        self.add(counts=values.new_zeros(3, self.buckets).index_add(1, place, values))

    def compute(self) -> float:
        """The error, of 0 or more; nan if there was nothing, or a prediction is nan."""
        sums = self.read()
        if not sums or not sums["counts"][0].any() or sums["counts"].isnan().any():
            return math.nan
        error = sure = 0.0
        begin, total = None, [0.0, 0.0, 0.0]
        for number, counts in enumerate(sums["counts"].T.tolist()):
            if begin is None or number - begin > 0.01 * self.buckets:
                begin, total = number, [0.0, 0.0, 0.0]
            shows, expected, clicks = total = [one + more for one, more in zip(total, counts, strict=True)]
            rate = expected / shows if shows else 0.0
            if rate and math.sqrt(max(1 - rate, 0) / (rate * shows)) < 0.05:
                error += abs(clicks / expected - 1) * shows
                sure += shows
                begin = None
        return error / sure if sure else 0.0
