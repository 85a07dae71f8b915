"""Metrics that are a mean over samples: accuracy, log loss, and the errors of a regression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pipeline.training.metrics.mean import wide
from pipeline.training.metrics.shapes import classified, paired
from pipeline.training.metrics.sums import CLASSES, Averaged, outside

LEAST_LOG = -100.0


class Accuracy(Averaged):
    """The share of samples whose class has the greatest score, from 0 to 1; nan where a score is nan."""

    mistakes: ClassVar[Mapping[str, str]] = {"strangers": CLASSES}

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Scores [batch, classes] of any scale and classes [batch], from 0; or both with more dimensions of samples."""
        scores, classes = classified(self, predictions, target, "classes", "use another metric")
        hits = (scores.argmax(-1) == classes).to(wide(scores.device))
        self.add_each(hits.masked_fill(scores.isnan().any(-1), math.nan))
        self.add(strangers=outside(classes, 0, scores.shape[-1] - 1))


class LogLoss(Averaged):
    """Mean binary cross entropy in nats: the mean of -(y log p + (1 - y) log(1 - p)).

    As in torch.nn.BCELoss, a logarithm is at least -100, so that a certain and wrong prediction is not infinite.

    Args:
        from_logits: whether predictions are logits instead of probabilities.
    """

    mistakes: ClassVar[Mapping[str, str]] = {
        "improbable": "predictions outside [0, 1] are no probabilities; for logits write args: {from_logits: true}",
        "unlabelled": "labels are outside [0, 1]; make them 0 and 1, or probabilities",
    }

    def __init__(self, from_logits: bool = False) -> None:
        super().__init__()
        self.from_logits = from_logits

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Predictions and labels in [0, 1], both [batch] or of one shape; each number counts alike."""
        p, y = numbers(self, predictions, target, "labels")
        if self.from_logits:
            self.add_each(torch.nn.functional.binary_cross_entropy_with_logits(p, y, reduction="none"))
        else:
            # torch's own looks at the probabilities first, and so waits for the device.
            self.add_each(-y * p.log().clamp(min=LEAST_LOG) - (1 - y) * (-p).log1p().clamp(min=LEAST_LOG))
            self.add(improbable=outside(p, 0, 1))
        self.add(unlabelled=outside(y, 0, 1))


class MAE(Averaged):
    """Mean absolute error, in the unit of the target: the mean of |prediction - target|."""

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Predictions and targets, both [batch] or of one shape; each number counts alike."""
        given, wanted = numbers(self, predictions, target, "targets")
        self.add_each((given - wanted).abs())


class RMSE(Averaged):
    """Root mean square error, in the unit of the target: the root of the mean of (prediction - target)² over the whole pass."""

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Predictions and targets, both [batch] or of one shape; each number counts alike."""
        given, wanted = numbers(self, predictions, target, "targets")
        self.add_each((given - wanted).square())

    def compute(self) -> float:
        """The root; nan if there was nothing."""
        return math.sqrt(super().compute())


def numbers(metric: object, predictions: Tensor, target: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Predictions and target as flat tensors of the type in which is summed up.

    Raises:
        DataError: they are not of one shape.
    """
    wanted = f"predictions [batch] with {what} [batch]"
    given, right = paired(metric, predictions, target, wanted, "return one prediction per sample")
    return given.to(wide(given.device)), right.to(wide(given.device))
