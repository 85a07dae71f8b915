"""Precision, Recall, F1 and RecallAtK."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

import pipeline.metrics.base as metric
from pipeline.errors import ConfigError, DataError, one_of

Average = Literal["macro", "micro", "binary"]


class Confusion(metric.SumMetric):
    """Counts for each class, and a mean of what a subclass makes of them; nan where a score is nan.

    A class that is neither predicted nor in the target is left out of a mean; a number that is 0 / 0 otherwise is 0.

    Args:
        average: ``binary``, the number of class 1 of two; ``macro``, the mean of the classes' numbers; ``micro``, the number
            of the classes' sums, which is the accuracy. None: ``binary`` of two classes, ``macro`` of more.
        threshold: the score of scores [batch] above which class 1 is predicted. None: 0.5, and the scores must be
            probabilities.

    Attributes:
        shares: the samples of a class that are predicted correctly are divided by these shares, added: that of all that are
            predicted as it, and that of all that are of it.
    """

    shares: ClassVar[tuple[float, float]]
    mistakes: ClassVar[Mapping[str, str]] = {
        "improbable": "scores outside [0, 1] are no probabilities; for logits write args: {threshold: 0}",
        "unlabelled": metric.LABELS,
        "strangers": metric.CLASSES,
    }

    def __init__(self, average: Average | None = None, threshold: float | None = None) -> None:
        super().__init__()
        if average not in (None, *get_args(Average)):
            known = one_of(str(average), get_args(Average))
            raise ConfigError(f"{type(self).__name__}: there is no average '{average}'{known}")
        self.average, self.threshold = average, threshold

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Scores [batch, classes] of any scale and classes [batch], from 0; or scores [batch] and labels [batch], 0 or 1.

        Weights [batch] say as how many samples each counts; without them all count alike.
        """
        if not isinstance(predictions, Tensor) or predictions.shape[1:].numel() != 1:
            self._update_classes(predictions, target, weights)
            return
        pairs, remedy = "scores [batch] with labels [batch]", "return one score per sample, or one per class"
        scores, labels = metric.flat_pairs(self, predictions, target, pairs, remedy)
        self.add(unlabelled=metric.no_labels(labels))
        if self.threshold is None:
            self.add(improbable=metric.outside(scores, 0, 1))
        positive = scores > (0.5 if self.threshold is None else self.threshold)
        self._count(positive.long(), (labels == 1).long(), 2, scores.isnan(), weights)

    def compute(self) -> float:
        """The number, from 0 to 1; nan if there was nothing."""
        sums = self.read()
        if not sums or sums["nans"] or not sums["actual"].any():
            return math.nan
        counts = torch.stack([sums["both"], sums["predicted"], sums["actual"]]).double()
        if self.average == "micro":
            counts = counts.sum(1, keepdim=True)
        elif self.average == "macro" or counts.shape[1] > 2:
            counts = counts[:, counts[1:].sum(0) > 0]
        else:
            counts = counts[:, 1:]
        both, predicted, actual = counts
        of_predicted, of_actual = self.shares
        return float((both / (of_predicted * predicted + of_actual * actual)).nan_to_num().mean())

    def _update_classes(self, predictions: Any, target: Any, weights: Any) -> None:
        scores, classes = metric.flat_classes(self, predictions, target, "classes", "return one score per class")
        size = scores.shape[-1]
        if self.average == "binary" and size != 2:
            raise DataError(f"{type(self).__name__}: average is binary, of {size} classes; write macro or micro")
        self.add(strangers=metric.outside(classes, 0, size - 1))
        # An index that is no class would end a process that uses a GPU.
        self._count(scores.argmax(-1), classes.clamp(0, size - 1), size, scores.isnan(), weights)

    def _count(self, predicted: Tensor, actual: Tensor, size: int, nans: Tensor, weights: Any) -> None:
        before = self.sums.get("both")
        if before is not None and len(before) != size:
            came = f"scores of {size} classes came after scores of {len(before)}"
            raise DataError(f"{type(self).__name__}: {came}; return as many for every batch")
        amount = torch.ones_like(actual) if weights is None else self.weights_of(weights, actual)
        none = torch.zeros(size, dtype=amount.dtype, device=predicted.device)
        self.add(
            both=none.index_add(0, actual, amount * (predicted == actual)),
            predicted=none.index_add(0, predicted, amount),
            actual=none.index_add(0, actual, amount),
            nans=nans.sum(),
        )


class Precision(Confusion):
    """The share of the samples predicted as a class that belong to it: both / predicted."""

    shares = (1.0, 0.0)


class Recall(Confusion):
    """The share of the samples of a class that are predicted as it: both / actual."""

    shares = (0.0, 1.0)


class F1(Confusion):
    """The harmonic mean of precision and recall: 2 both / (predicted + actual)."""

    shares = (0.5, 0.5)


class RecallAtK(metric.MeanMetric):
    """The share of a sample's relevant items that are among its k best scored; the mean over samples, from 0 to 1.

    Items of the same score share the places among the k that are left for them: a model that scores all items alike has
    k / items, as with a random order. A sample without a relevant item doesn't count. nan where a score is nan.

    Args:
        k: how many items are looked at.
    """

    mistakes: ClassVar[Mapping[str, str]] = {"strangers": metric.CLASSES, "unlabelled": metric.LABELS}

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"RecallAtK: k is {k}; it must be above 0")
        self.k = int(k)

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Scores [batch, items] of any scale; the relevant item [batch], from 0, or labels [batch, items], 1 for relevant.

        Weights [batch] say as how many samples each counts; without them all count alike.
        """
        scores, relevant = self._read(metric.tensor(self, predictions), metric.tensor(self, target))
        if self.k > scores.shape[-1]:
            raise DataError(f"RecallAtK: k is {self.k}, and a sample has {scores.shape[-1]} scores; lower k")
        last = scores.topk(self.k).values[:, -1:]
        above, level = scores > last, scores == last
        remaining = (self.k - above.sum(-1)).to(metric.wide(scores.device))
        hits = (above & relevant).sum(-1) + (level & relevant).sum(-1) * remaining / level.sum(-1)
        count = relevant.sum(-1)
        recall = (hits / count.clamp(min=1)).masked_fill(scores.isnan().any(-1), math.nan)
        amount = count > 0 if weights is None else self.weights_of(weights, count) * (count > 0)
        self.add(total=(recall * amount).sum(), samples=amount.sum())

    def _read(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and whether each is of a relevant item, both [samples, items]."""
        if scores.dim() > 1 and scores.shape == target.shape:
            self.add(unlabelled=metric.no_labels(target))
            return scores.flatten(0, -2), target.flatten(0, -2) == 1
        remedy = "return one score per item, and the item or a label for each of them"
        scores, items = metric.flat_classes(self, scores, target, "items", remedy)
        self.add(strangers=metric.outside(items, 0, scores.shape[-1] - 1))
        return scores, items[:, None] == torch.arange(scores.shape[-1], device=items.device)
