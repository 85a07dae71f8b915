"""Precision, Recall, F1 and RecallAtK."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError, one_of
from pipeline.metrics.base import (
    CLASSES,
    LABELS,
    MeanMetric,
    SumMetric,
    count_outside,
    count_wrong_labels,
    flat_classes,
    flat_pairs,
    require_tensor,
    wide,
)

Average = Literal["macro", "micro", "binary"]


class Confusion(SumMetric):
    """Counts for each class, and a mean over the classes of what a subclass computes from them.

    It is nan if a score is nan. A class that is neither predicted nor in the target is left out of
    a mean. For any other class, 0 / 0 is 0.

    Args:
        average: ``binary`` is the number of class 1 of two classes. ``macro`` is the mean of the
            numbers of all classes. ``micro`` is the number of the sums over all classes, which is
            the accuracy. None is ``binary`` with two classes, and ``macro`` with more.
        threshold: for scores [batch]: class 1 is predicted if the score is above it. None is 0.5,
            and the scores must be probabilities.

    Attributes:
        shares: weights of the two counts whose sum divides the number of correct predictions of a
            class: of the samples that are predicted as the class, and of the samples that belong to
            it.

    Raises:
        ConfigError: ``average`` is unknown.
    """

    shares: ClassVar[tuple[float, float]]
    mistakes: ClassVar[Mapping[str, str]] = {
        "improbable": "scores outside [0, 1] are no probabilities; for logits write args: {threshold: 0}",
        "unlabelled": LABELS,
        "strangers": CLASSES,
    }

    def __init__(self, average: Average | None = None, threshold: float | None = None) -> None:
        super().__init__()
        if average not in (None, *get_args(Average)):
            known = one_of(str(average), get_args(Average))
            raise ConfigError(f"{type(self).__name__}: there is no average '{average}'{known}")
        self.average = average
        self.threshold = threshold

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: scores of any scale, [batch, classes]; or scores [batch], see
                ``threshold``.
            target: integer classes [batch], counted from 0; or labels [batch], 0 or 1.
            weights: as how many samples each sample counts, [batch]; None if all count the same.

        Raises:
            DataError: the shapes differ, the number of classes is another than before or does not
                fit ``average``, or there is not one weight per sample.
        """
        if not isinstance(predictions, Tensor) or predictions.shape[1:].numel() != 1:
            self._update_classes(predictions, target, weights)
            return
        pairs = "scores [batch] with labels [batch]"
        remedy = "return one score per sample, or one per class"
        scores, labels = flat_pairs(self, predictions, target, pairs, remedy)
        self.add(unlabelled=count_wrong_labels(labels))
        if self.threshold is None:
            self.add(improbable=count_outside(scores, 0, 1))
        positive = scores > (0.5 if self.threshold is None else self.threshold)
        self._count(positive.long(), (labels == 1).long(), 2, scores.isnan(), weights)

    def compute(self) -> float:
        """Return the number, from 0 to 1; nan if there were no samples.

        Raises:
            DataError: there were wrong values among predictions, targets or weights.
        """
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
        """Add a batch with one score per class."""
        scores, classes = flat_classes(self, predictions, target, "classes", "return one score per class")
        size = scores.shape[-1]
        if self.average == "binary" and size != 2:
            raise DataError(f"{type(self).__name__}: average is binary, of {size} classes; write macro or micro")
        self.add(strangers=count_outside(classes, 0, size - 1))
        # On a GPU, an index out of range would end the process. ``read`` reports such a class.
        self._count(scores.argmax(-1), classes.clamp(0, size - 1), size, scores.isnan(), weights)

    def _count(self, predicted: Tensor, actual: Tensor, size: int, nans: Tensor, weights: Any) -> None:
        """Count the samples of a batch in each class.

        Args:
            predicted: the predicted classes, [samples].
            actual: the classes of the target, [samples].
            size: the number of classes.
            nans: whether each score is nan.
            weights: one weight per sample; None counts each as 1.
        """
        before = self.sums.get("both")
        if before is not None and len(before) != size:
            came = f"scores of {size} classes came after scores of {len(before)}"
            raise DataError(f"{type(self).__name__}: {came}; return as many for every batch")
        amount = torch.ones_like(actual) if weights is None else self.weights_of(weights, actual)
        zeros = torch.zeros(size, dtype=amount.dtype, device=predicted.device)
        self.add(
            both=zeros.index_add(0, actual, amount * (predicted == actual)),
            predicted=zeros.index_add(0, predicted, amount),
            actual=zeros.index_add(0, actual, amount),
            nans=nans.sum(),
        )


class Precision(Confusion):
    """The share of the samples predicted as a class that belong to it: both / predicted.

    With ``macro`` and ``micro`` it equals ``MulticlassPrecision`` of torchmetrics, and with
    ``binary`` ``BinaryPrecision``. Arguments and errors are those of ``Confusion``.

    Example:
        >>> import torch
        >>> from pipeline.metrics import Precision
        >>> precision = Precision()
        >>> precision.update(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([1, 1, 0, 1]))
        >>> round(precision.compute(), 4)
        0.6667
    """

    shares = (1.0, 0.0)


class Recall(Confusion):
    """The share of the samples of a class that are predicted as it: both / actual.

    With ``macro`` and ``micro`` it equals ``MulticlassRecall`` of torchmetrics, and with ``binary``
    ``BinaryRecall``. Arguments and errors are those of ``Confusion``.

    Example:
        >>> import torch
        >>> from pipeline.metrics import Recall
        >>> recall = Recall()
        >>> recall.update(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([1, 1, 0, 0]))
        >>> recall.compute()
        1.0
    """

    shares = (0.0, 1.0)


class F1(Confusion):
    """The harmonic mean of precision and recall: 2 both / (predicted + actual).

    With ``macro`` and ``micro`` it equals ``MulticlassF1Score`` of torchmetrics, and with
    ``binary`` ``BinaryF1Score``. Arguments and errors are those of ``Confusion``.

    Example:
        >>> import torch
        >>> from pipeline.metrics import F1
        >>> f1 = F1()
        >>> f1.update(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([1, 1, 0, 0]))
        >>> f1.compute()
        0.8
    """

    shares = (0.5, 0.5)


class RecallAtK(MeanMetric):
    """The share of a sample's relevant items that are among its k items with the best scores.

    It is a mean over samples, from 0 to 1.

    Items with the same score share the places among the k that are left for them. So a model that
    scores all items the same gets k / items, as a random order does. A sample without a relevant
    item is not counted. The metric is nan if a score is nan. Without equal scores it equals
    ``RetrievalRecall(top_k=k, empty_target_action="skip")`` of torchmetrics, where each sample is a
    query.

    Args:
        k: the number of items that are looked at.

    Raises:
        ConfigError: ``k`` is below 1.

    Example:
        >>> import torch
        >>> from pipeline.metrics import RecallAtK
        >>> recall = RecallAtK(k=2)
        >>> recall.update(torch.tensor([[0.1, 0.3, 0.2], [0.9, 0.1, 0.5]]), torch.tensor([1, 1]))
        >>> recall.compute()
        0.5
    """

    mistakes: ClassVar[Mapping[str, str]] = {"strangers": CLASSES, "unlabelled": LABELS}

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"RecallAtK: k is {k}; it must be above 0")
        self.k = int(k)

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: scores of any scale, [batch, items].
            target: the number of the relevant item, counted from 0, [batch]; or labels [batch,
                items], 1 for a relevant item and 0 for any other.
            weights: as how many samples each sample counts, [batch]; None if all count the same.

        Raises:
            DataError: the shapes differ, there are fewer than k items, or there is not one weight
                per sample.
        """
        scores, relevant = self._read(require_tensor(self, predictions), require_tensor(self, target))
        if self.k > scores.shape[-1]:
            raise DataError(f"RecallAtK: k is {self.k}, and a sample has {scores.shape[-1]} scores; lower k")
        last = scores.topk(self.k).values[:, -1:]
        above = scores > last
        # The items that share the places that are left.
        level = scores == last
        remaining = (self.k - above.sum(-1)).to(wide(scores.device))
        hits = (above & relevant).sum(-1) + (level & relevant).sum(-1) * remaining / level.sum(-1)
        count = relevant.sum(-1)
        recall = (hits / count.clamp(min=1)).masked_fill(scores.isnan().any(-1), math.nan)
        amount = count > 0 if weights is None else self.weights_of(weights, count) * (count > 0)
        self.add(total=(recall * amount).sum(), samples=amount.sum())

    def _read(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores, and whether each item is relevant, both [samples, items]."""
        if scores.dim() > 1 and scores.shape == target.shape:
            self.add(unlabelled=count_wrong_labels(target))
            return scores.flatten(0, -2), target.flatten(0, -2) == 1
        remedy = "return one score per item, and the item or a label for each of them"
        scores, items = flat_classes(self, scores, target, "items", remedy)
        self.add(strangers=count_outside(items, 0, scores.shape[-1] - 1))
        return scores, items[:, None] == torch.arange(scores.shape[-1], device=items.device)
