"""The area under the ROC curve, exact up to a number of samples and from a histogram beyond it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from loguru import logger
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.training.metrics.base import LABELS, SumMetric, flat_pairs, no_labels, wide

BINS = 4096
NOTICEABLE = 0.001


class AUC(SumMetric):
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counting half.

    Exact for up to ``exact_samples`` (the rank sum of H. Mann and D. Whitney, 1947). A pass with more has its scores
    counted in 4096 bins, which the samples up to there fill alike; a score that would fill one alone gets a bin of its own.
    Two different scores in one bin then count as a tie: the area is off by at most half the share of such pairs, which is
    below 1/2048 unless later scores are spread otherwise than the first. ``compute`` warns where it is above 0.001.

    Not defined, and so nan, where one of the classes is absent or a score is nan.

    Args:
        exact_samples: how many samples are kept, at 9 to 18 bytes each.

    Attributes:
        error: how far off the number last computed may be; 0 where it is exact.
    """

    mistakes: ClassVar[Mapping[str, str]] = {"unlabelled": LABELS}

    def __init__(self, exact_samples: int = 1_000_000) -> None:
        super().__init__()
        if exact_samples < 1:
            raise ConfigError(f"AUC: exact_samples is {exact_samples}; it must be above 0")
        self.exact_samples = int(exact_samples)
        self.error = 0.0
        self.samples = _Samples()
        self.edges: Tensor | None = None

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Scores [batch] of any scale (logits do), and labels [batch], 0 or 1 of whatever type."""
        pairs = "scores [batch] with labels [batch]"
        flat, labels = flat_pairs(self, predictions, target, pairs, "return one score per sample")
        scores, positive = flat.to(wide(flat.device)), labels == 1
        self.add(nans=scores.isnan().sum(), unlabelled=no_labels(labels))
        if self.edges is None:
            self.samples.append(scores, positive)
            if self.samples.count <= self.exact_samples:
                return
            scores, positive = self.samples.all(scores.device)
            self.samples, self.edges = _Samples(), _edges(scores[: self.exact_samples])
        self.edges = self.edges.to(scores.device)
        self.add(bins=_bin_counts(scores, positive, self.edges))

    def compute(self) -> float:
        """The area."""
        sums = self.read()
        self.error = 0.0
        if not sums or sums["nans"]:
            return math.nan
        if self.edges is not None:
            return self._from_bins(sums["bins"].double(), self.edges.cpu())
        scores, positive = self.samples.all(torch.device("cpu"))
        _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
        positives = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, group, positive.double())
        return _area(positives, sizes - positives)

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self.samples, self.edges = _Samples(), None

    def state_dict(self) -> dict[str, Any]:
        """The samples, or the bins and their counts: name -> tensor."""
        scores, positive = self.samples.all(self.samples.scores.device)
        state = {"scores": scores, "positive": positive} if self.edges is None else {"edges": self.edges}
        return super().state_dict() | state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.merge([state])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks together: exact where no rank has more than ``exact_samples``.

        Else the bins are those of the first rank that has some; samples that another has counted go there bin by bin, so
        that the area is off by up to twice as much.
        """
        edges = next((state["edges"] for state in states if "edges" in state), None)
        super().merge([{name: state[name] for name in ("nans", "unlabelled") if name in state} for state in states])
        self.edges = edges
        for state in states:
            if edges is None:
                self.samples.append(state["scores"], state["positive"])
                continue
            # The greatest score of each bin, of negatives and of positives, stands for the bin.
            tops = [state["edges"], edges.new_full((1,), math.inf)] * 2 if "edges" in state else [state["scores"]]
            positive = state.get("positive", torch.arange(2 * BINS, device=edges.device) >= BINS)
            self.add(bins=_bin_counts(torch.cat(tops).to(edges), positive, edges, state.get("bins")))

    def _from_bins(self, bins: Tensor, edges: Tensor) -> float:
        negatives, positives = bins.view(2, BINS)
        # Which bins hold one score only.
        next_up = edges.nextafter(torch.full_like(edges, math.inf))
        single = nn.functional.pad(edges[1:] <= next_up[:-1], (1, 1))
        mixed = (negatives * positives)[~single].sum() / 2
        self.error = float(mixed / negatives.sum() / positives.sum())
        if self.error > NOTICEABLE:
            why = f"scores after the first {self.exact_samples} samples are spread otherwise"
            remedy = f"mix the data, or set exact_samples to {int(bins.sum())}"
            logger.warning(f"AUC: may be off by {self.error:.2g}: {why}; {remedy}")
        return _area(positives, negatives)


class _Samples:
    """Scores and labels in buffers that grow by doubling: views of a batch would keep all of its memory."""

    def __init__(self) -> None:
        self.scores, self.positive = torch.empty(0), torch.empty(0, dtype=torch.bool)
        self.count = 0

    def append(self, scores: Tensor, positive: Tensor) -> None:
        end = self.count + len(scores)
        if end > len(self.scores) or self.scores.device != scores.device:
            earlier = self.all(scores.device)
            self.scores, self.positive = scores.new_empty(2 * end), positive.new_empty(2 * end)
            self.scores[: self.count], self.positive[: self.count] = earlier
        self.scores[self.count : end], self.positive[self.count : end] = scores, positive
        self.count = end

    def all(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.scores[: self.count].to(device), self.positive[: self.count].to(device)


def _edges(scores: Tensor) -> Tensor:
    """The greatest score of each bin but the last, [BINS - 1]."""
    position = torch.arange(1, BINS, device=scores.device) * len(scores) // BINS
    edges = scores.sort().values[position]
    # A score that is an edge twice or more has a bin to itself, which begins right below it.
    repeated = edges == torch.cat([edges[1:], edges.new_full((1,), math.nan)])
    return torch.where(repeated, edges.nextafter(torch.full_like(edges, -math.inf)), edges)


def _bin_counts(scores: Tensor, positive: Tensor, edges: Tensor, counts: Tensor | None = None) -> Tensor:
    """How many negatives and how many positives fall into each bin, [2 * BINS]; ``counts``: how many each score stands for."""
    place = torch.bucketize(scores, edges) + BINS * positive
    counts = torch.ones_like(place) if counts is None else counts
    return torch.zeros(2 * BINS, dtype=torch.int64, device=edges.device).index_add(0, place, counts)


def _area(positives: Tensor, negatives: Tensor) -> float:
    """The area from the numbers of each group of equal scores, in ascending order; nan where a class is absent."""
    below = negatives.cumsum(0) - negatives / 2
    return float((positives * below).sum() / positives.sum() / negatives.sum())
