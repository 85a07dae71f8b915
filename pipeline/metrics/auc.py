"""The area under the ROC curve, exact up to a number of samples and from a histogram beyond it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from loguru import logger
from torch import Tensor, nn

from pipeline.errors import ConfigError, DataError
from pipeline.metrics.base import LABELS, SumMetric, flat_pairs, no_labels, wide

BINS = 4096
NOTICEABLE = 0.001

# In a state, beside the samples or the bins.
_SUMS = ("nans", "unlabelled", "unweighable")


class AUC(SumMetric):
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counting half.

    Exact for up to ``exact_samples`` (the rank sum of H. Mann and D. Whitney, 1947). A pass with more has its scores
    counted in 4096 bins, which the samples up to there fill alike; a score that would fill one alone gets a bin of its own.
    Two different scores in one bin then count as a tie: the area is off by at most half the share of such pairs, which is
    below 1/2048 unless later scores are spread otherwise than the first. ``compute`` warns where it is above 0.001.

    With weights, a pair counts as much as the product of its two. Not defined, and so nan, where one of the classes is
    absent or a score is nan.

    Args:
        exact_samples: how many samples are kept, at 9 to 18 bytes each, and 8 to 16 more with weights.

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
        self.samples = Columns(type(self).__name__)
        self.edges: Tensor | None = None

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Scores [batch] of any scale (logits do), labels [batch], 0 or 1 of whatever type, and weights [batch]."""
        pairs = "scores [batch] with labels [batch]"
        flat, labels = flat_pairs(self, predictions, target, pairs, "return one score per sample")
        scores, positive = flat.to(wide(flat.device)), labels == 1
        self.add(nans=scores.isnan().sum(), unlabelled=no_labels(labels))
        columns = [scores, positive] if weights is None else [scores, positive, self.weights_of(weights, scores)]
        if self.edges is None:
            self.samples.append(*columns)
            if self.samples.count <= self.exact_samples:
                return
            columns = self.samples.all(scores.device)
            self.samples, self.edges = Columns(type(self).__name__), _edges(columns[0][: self.exact_samples])
        self.edges = self.edges.to(scores.device)
        self.add(bins=_bin_counts(self.edges, *columns))

    def compute(self) -> float:
        """The area."""
        sums = self.read()
        self.error = 0.0
        if not sums or sums["nans"]:
            return math.nan
        if self.edges is not None:
            return self._from_bins(sums["bins"], self.edges.cpu())
        scores, positive, *weights = self.samples.all(torch.device("cpu"))
        values, group = torch.unique(scores, return_inverse=True)
        amount = weights[0].double() if weights else torch.ones(len(group), dtype=torch.float64)
        none = torch.zeros(len(values), dtype=torch.float64)
        positives = none.index_add(0, group, amount * positive)
        return _area(positives, none.index_add(0, group, amount) - positives)

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self.samples, self.edges = Columns(type(self).__name__), None

    def state_dict(self) -> dict[str, Any]:
        """The samples, or the bins and their counts: name -> tensor."""
        columns = zip(("scores", "positive", "weights"), self.samples.all(), strict=False)
        return super().state_dict() | (dict(columns) if self.edges is None else {"edges": self.edges})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.merge([state])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks together: exact where no rank has more than ``exact_samples``.

        Else the bins are those of the first rank that has some; samples that another has counted go there bin by bin, so
        that the area is off by up to twice as much.
        """
        edges = next((state["edges"] for state in states if "edges" in state), None)
        super().merge([{name: state[name] for name in _SUMS if name in state} for state in states])
        self.edges = edges
        for state in states:
            own = [state[name] for name in ("scores", "positive", "weights") if name in state]
            if edges is None:
                self.samples.append(*own)
                continue
            if "edges" in state:
                # The greatest score of each bin, of negatives and of positives, stands for the bin.
                tops = torch.cat([state["edges"], edges.new_full((1,), math.inf)] * 2)
                own = [tops, torch.arange(2 * BINS, device=edges.device) >= BINS, state["bins"]]
            self.add(bins=_bin_counts(edges, own[0].to(edges), *own[1:]))

    def _from_bins(self, bins: Tensor, edges: Tensor) -> float:
        negatives, positives = bins.double().view(2, BINS)
        # Which bins hold one score only.
        next_up = edges.nextafter(torch.full_like(edges, math.inf))
        single = nn.functional.pad(edges[1:] <= next_up[:-1], (1, 1))
        mixed = (negatives * positives)[~single].sum() / 2
        self.error = float(mixed / negatives.sum() / positives.sum())
        if self.error > NOTICEABLE:
            why = f"scores after the first {self.exact_samples} samples are spread otherwise"
            # With weights, their sum is no number of samples.
            many = "more" if bins.is_floating_point() else int(bins.sum())
            remedy = f"mix the data, or set exact_samples to {many}"
            logger.warning(f"AUC: may be off by {self.error:.2g}: {why}; {remedy}")
        return _area(positives, negatives)


class Columns:
    """Values of each sample, such as its score and label, in buffers that grow by doubling.

    Views of a batch would keep all of its memory.

    Args:
        owner: who keeps them, for messages.

    Attributes:
        count: how many samples there are.
        buffers: a tensor for each of their values, with room for more.
    """

    def __init__(self, owner: str) -> None:
        self.owner, self.count = owner, 0
        self.buffers: list[Tensor] = []

    def append(self, *columns: Tensor) -> None:
        """Take in the samples of a batch.

        Raises:
            DataError: only some batches have weights.
        """
        if not columns:
            return
        if self.buffers and len(columns) != len(self.buffers):
            raise DataError(f"{self.owner}: some batches have weights and some have none; give all of them weights")
        end = self.count + len(columns[0])
        if not self.buffers or end > len(self.buffers[0]) or self.buffers[0].device != columns[0].device:
            earlier = self.all(columns[0].device)
            self.buffers = [column.new_empty((2 * end, *column.shape[1:])) for column in columns]
            for buffer, values in zip(self.buffers, earlier, strict=False):
                buffer[: self.count] = values
        for buffer, column in zip(self.buffers, columns, strict=True):
            buffer[self.count : end] = column
        self.count = end

    def all(self, device: torch.device | None = None) -> list[Tensor]:
        """All samples, a tensor for each of their values; none before the first batch."""
        return [buffer[: self.count].to(device or buffer.device) for buffer in self.buffers]


def _edges(scores: Tensor) -> Tensor:
    """The greatest score of each bin but the last, [BINS - 1]."""
    position = torch.arange(1, BINS, device=scores.device) * len(scores) // BINS
    edges = scores.sort().values[position]
    # A score that is an edge twice or more has a bin to itself, which begins right below it.
    repeated = edges == torch.cat([edges[1:], edges.new_full((1,), math.nan)])
    return torch.where(repeated, edges.nextafter(torch.full_like(edges, -math.inf)), edges)


def _bin_counts(edges: Tensor, scores: Tensor, positive: Tensor, amounts: Tensor | None = None) -> Tensor:
    """How much of negatives and of positives falls into each bin, [2 * BINS]; ``amounts``: what each score counts as."""
    place = torch.bucketize(scores, edges) + BINS * positive
    amounts = torch.ones_like(place) if amounts is None else amounts
    return torch.zeros(2 * BINS, dtype=amounts.dtype, device=edges.device).index_add(0, place, amounts)


def _area(positives: Tensor, negatives: Tensor) -> float:
    """The area from the numbers of each group of equal scores, in ascending order; nan where a class is absent."""
    below = negatives.cumsum(0) - negatives / 2
    return float((positives * below).sum() / positives.sum() / negatives.sum())
