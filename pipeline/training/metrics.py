"""Numbers over a whole pass: ``update(predictions, target)`` for each batch, then ``compute()``, then ``reset()``.

Any object with these three methods fits, so those of torchmetrics do as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline import class_path
from pipeline.errors import DataError
from pipeline.phase_check import METRICS


class Metric(Protocol):
    """What the runner asks of a metric."""

    def update(self, predictions: Any, target: Any) -> None:
        """Take in one batch."""

    def compute(self) -> Any:
        """The number over all batches since the last reset: a float or a tensor with one element."""

    def reset(self) -> None:
        """Start again."""


def build_metrics(settings: Mapping[str, Mapping[str, Any]], workspace: Path | None) -> dict[str, Metric]:
    """The metrics of a phase: name -> ``{class, args}`` to name -> metric. A bare class name is one of this module's."""
    metrics = {}
    for name, each in settings.items():
        chosen = each["class"]
        path = (
            chosen
            if isinstance(chosen, type)
            else class_path.parse(chosen, name="Metric", workspace=workspace, module=METRICS)
        )
        metrics[name] = class_path.load_class(path, object)(**each.get("args", {}))
    return metrics


class Mean:
    """The mean of a number per batch, weighted by samples; kept on the device until it is read."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.count = 0

    def add(self, value: Tensor, count: int) -> None:
        """Take in a scalar that is a mean over ``count`` samples."""
        self.total = self.total + value * count
        self.count += count

    def compute(self) -> float:
        """The mean; nan if there was nothing."""
        return float(self.total) / self.count if self.count else math.nan

    def reset(self) -> None:
        """Start again."""
        self.total, self.count = 0.0, 0


class AUC:
    """Area under the ROC curve, exact: the chance that a positive scores above a negative, ties counting half.

    Keeps one float and one bit per sample. Not defined, and so nan, where one of the classes is absent or a score is nan.
    """

    def __init__(self) -> None:
        self.reset()

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Scores [batch], of any scale (logits do), and labels [batch], positive where > 0.5."""
        if predictions.numel() != target.numel():
            got = f"{tuple(predictions.shape)} and {tuple(target.shape)}"
            raise DataError(
                f"AUC compares scores [batch] with labels [batch], and got {got}; return one score per sample"
            )
        self.scores.append(predictions.detach().flatten().float().cpu())
        self.labels.append(target.flatten().cpu() > 0.5)

    def compute(self) -> float:
        """The area, by the rank sum of Mann and Whitney."""
        positives = sum(int(labels.sum()) for labels in self.labels)
        negatives = sum(map(len, self.labels)) - positives
        if not positives or not negatives:
            return math.nan
        scores, labels = torch.cat(self.scores), torch.cat(self.labels)
        if scores.isnan().any():
            return math.nan
        _, groups, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
        # The mean rank of each group of equal scores, counted from 1.
        ranks = sizes.cumsum(0).double() - (sizes.double() - 1) / 2
        rank_sum = float(ranks[groups][labels].sum())
        return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)

    def reset(self) -> None:
        """Forget all samples."""
        self.scores: list[Tensor] = []
        self.labels: list[Tensor] = []


class LogLoss:
    """Mean binary cross entropy.

    Args:
        from_logits: whether predictions are logits instead of probabilities.
    """

    def __init__(self, from_logits: bool = False) -> None:
        self.from_logits = from_logits
        self.mean = Mean()

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Predictions and labels in [0, 1], both [batch]."""
        if not self.from_logits and ((predictions < 0) | (predictions > 1)).any():
            raise DataError(
                "LogLoss: predictions outside [0, 1] are no probabilities; for logits write args: {from_logits: true}"
            )
        functional = torch.nn.functional
        cross_entropy = (
            functional.binary_cross_entropy_with_logits if self.from_logits else functional.binary_cross_entropy
        )
        self.mean.add(
            cross_entropy(predictions.detach().flatten(), target.flatten().to(predictions.dtype)), target.numel()
        )

    def compute(self) -> float:
        """The mean over samples, in nats."""
        return self.mean.compute()

    def reset(self) -> None:
        """Start again."""
        self.mean.reset()


class Accuracy:
    """The share of samples whose class is predicted."""

    def __init__(self) -> None:
        self.mean = Mean()

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Scores [batch, classes] and classes [batch]."""
        if predictions.shape[:-1] != target.shape:
            got = f"{tuple(predictions.shape)} and {tuple(target.shape)}"
            raise DataError(
                f"Accuracy compares scores [batch, classes] with classes [batch], and got {got}; use another metric"
            )
        hits = (predictions.detach().argmax(-1) == target).float().mean()
        self.mean.add(hits, target.shape[0])

    def compute(self) -> float:
        """The share, from 0 to 1."""
        return self.mean.compute()

    def reset(self) -> None:
        """Start again."""
        self.mean.reset()
