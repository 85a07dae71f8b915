"""Recall among the items that a recommender puts first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.training.metrics.mean import wide
from pipeline.training.metrics.shapes import classified, tensor
from pipeline.training.metrics.sums import CLASSES, LABELS, Averaged, no_labels, outside


class RecallAtK(Averaged):
    """The share of a sample's relevant items that are among its k best scored; the mean over samples, from 0 to 1.

    Items of the same score share the places among the k that are left for them: a model that scores all items alike has
    k / items, as with a random order. A sample without a relevant item doesn't count. nan where a score is nan.

    Args:
        k: how many items are looked at.
    """

    mistakes: ClassVar[Mapping[str, str]] = {"strangers": CLASSES, "unlabelled": LABELS}

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"RecallAtK: k is {k}; it must be above 0")
        self.k = int(k)

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Scores [batch, items] of any scale; the relevant item [batch], from 0, or labels [batch, items], 1 for relevant."""
        scores, relevant = self._read(tensor(self, predictions), tensor(self, target))
        if self.k > scores.shape[-1]:
            raise DataError(f"RecallAtK: k is {self.k}, and a sample has {scores.shape[-1]} scores; lower k")
        wanted = relevant.sum(-1)
        recall = self._found(scores, relevant) / wanted.clamp(min=1)
        recall = recall.masked_fill(scores.isnan().any(-1), math.nan)
        self.add(total=recall.sum(), samples=(wanted > 0).sum())

    def _read(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and whether each is of a relevant item, both [samples, items]."""
        if scores.dim() > 1 and scores.shape == target.shape:
            self.add(unlabelled=no_labels(target))
            return scores.flatten(0, -2), target.flatten(0, -2) == 1
        remedy = "return one score per item, and the item or a label for each of them"
        scores, items = classified(self, scores, target, "items", remedy)
        self.add(strangers=outside(items, 0, scores.shape[-1] - 1))
        return scores, items[:, None] == torch.arange(scores.shape[-1], device=items.device)

    def _found(self, scores: Tensor, relevant: Tensor) -> Tensor:
        """How many relevant items are among the k best, [samples]."""
        last = scores.topk(self.k).values[:, -1:]
        above, level = scores > last, scores == last
        left = (self.k - above.sum(-1)).to(wide(scores.device))
        return (above & relevant).sum(-1) + (level & relevant).sum(-1) * left / level.sum(-1)
