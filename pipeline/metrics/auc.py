"""The area under the ROC curve: exact up to a number of samples, and from a histogram beyond it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from loguru import logger
from torch import Tensor, nn

from pipeline.errors import ConfigError, DataError
from pipeline.metrics.base import LABELS, SumMetric, count_wrong_labels, flat_pairs, wide

# How many bins the histogram has.
BINS = 4096

# ``compute`` warns if the area may be off by more than this.
NOTICEABLE = 0.001

# The entries of a state: the sums, without the counts of the bins, and the values of each sample.
_SUMS = ("nans", "unlabelled", "unweighable")
_COLUMNS = ("scores", "positive", "weights")


class AUC(SumMetric):
    """Area under the ROC curve.

    That is the probability that a positive sample scores above a negative one. A tie counts half.

    Up to ``exact_samples`` samples the area is exact: it is the rank sum of H. Mann and D. Whitney
    (1947), and equals ``BinaryAUROC`` of torchmetrics. From then on, scores are only counted in
    4096 bins. The first ``exact_samples`` samples determine the edges, and fill the bins equally; a
    score that would fill a whole bin gets a separate bin. Two different scores in one bin count as
    a tie, so the area is off by at most half the share of such pairs. That is below 1/2048, unless
    later scores are distributed differently from the first ones. ``compute`` warns if it is above
    0.001.

    With weights, a pair counts as the product of its two weights. The area is undefined, and
    therefore nan, if one of the classes is absent or a score is nan.

    Args:
        exact_samples: how many samples are kept. Each needs 9 to 18 bytes, and 8 to 16 more with
            weights.

    Attributes:
        error: how far the area that was computed last may be off; 0 if it is exact.
        samples: the samples that are kept.
        edges: the highest score of each bin except the last, [BINS - 1]; None as long as the area
            is exact.

    Raises:
        ConfigError: ``exact_samples`` is below 1.

    Example:
        >>> import torch
        >>> from pipeline.metrics import AUC
        >>> auc = AUC()
        >>> auc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        >>> auc.compute()
        0.75
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
        """Add one batch.

        Args:
            predictions: scores of any scale, such as probabilities or logits, [batch].
            target: labels [batch], 0 or 1, of any type.
            weights: one weight per sample, [batch]; None if all count the same.

        Raises:
            DataError: the shapes differ, or only some batches have weights.
        """
        pairs = "scores [batch] with labels [batch]"
        flat, labels = flat_pairs(self, predictions, target, pairs, "return one score per sample")
        scores = flat.to(wide(flat.device))
        positive = labels == 1
        self.add(nans=scores.isnan().sum(), unlabelled=count_wrong_labels(labels))
        columns = [scores, positive]
        if weights is not None:
            columns += [self.weights_of(weights, scores)]
        if self.edges is None:
            self.samples.append(*columns)
            if self.samples.count <= self.exact_samples:
                return
            # From here on, samples are only counted in bins, beginning with all samples so far.
            columns = self.samples.all(scores.device)
            self.samples = Columns(type(self).__name__)
            self.edges = _edges(columns[0][: self.exact_samples])
        self.edges = self.edges.to(scores.device)
        self.add(bins=_bin_counts(self.edges, *columns))

    def compute(self) -> float:
        """Return the area, from 0 to 1; nan if it is undefined.

        Raises:
            DataError: a label is neither 0 nor 1, or a weight is negative or not finite.
        """
        sums = self.read()
        self.error = 0.0
        if not sums or sums["nans"]:
            return math.nan
        if self.edges is not None:
            return self._from_bins(sums["bins"], self.edges.cpu())
        scores, positive, *weights = self.samples.all(torch.device("cpu"))
        # Equal scores are one group.
        values, group = torch.unique(scores, return_inverse=True)
        amount = weights[0].double() if weights else torch.ones(len(group), dtype=torch.float64)
        zeros = torch.zeros(len(values), dtype=torch.float64)
        positives = zeros.index_add(0, group, amount * positive)
        negatives = zeros.index_add(0, group, amount) - positives
        return _area(positives, negatives)

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self.samples = Columns(type(self).__name__)
        self.edges = None

    def state_dict(self) -> dict[str, Any]:
        """Return the samples, or the bins and their counts: name -> tensor."""
        if self.edges is not None:
            return super().state_dict() | {"edges": self.edges}
        return super().state_dict() | dict(zip(_COLUMNS, self.samples.all(), strict=False))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.merge([state])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks together.

        The area is exact if no rank has more than ``exact_samples`` samples. Otherwise the edges
        are those of the first rank that has bins, and the bins of other ranks are assigned to them
        as wholes, so the area may be off by up to twice as much.
        """
        edges = next((state["edges"] for state in states if "edges" in state), None)
        super().merge([{name: state[name] for name in _SUMS if name in state} for state in states])
        self.edges = edges
        for state in states:
            columns = [state[name] for name in _COLUMNS if name in state]
            if edges is None:
                self.samples.append(*columns)
                continue
            if "edges" in state:
                # The highest score of a bin represents the bin: of the negatives first, then of the
                # positives.
                tops = torch.cat([state["edges"], edges.new_full((1,), math.inf)] * 2)
                columns = [tops, torch.arange(2 * BINS, device=edges.device) >= BINS, state["bins"]]
            self.add(bins=_bin_counts(edges, columns[0].to(edges), *columns[1:]))

    def _from_bins(self, bins: Tensor, edges: Tensor) -> float:
        """Compute the area and ``error`` from the counts of the bins, and warn about an error."""
        negatives, positives = bins.double().view(2, BINS)
        # A bin has room for a single score only if its upper edge is the next number above its
        # lower edge.
        next_up = edges.nextafter(torch.full_like(edges, math.inf))
        has_one_score = nn.functional.pad(edges[1:] <= next_up[:-1], (1, 1))
        mixed = (negatives * positives)[~has_one_score].sum() / 2
        self.error = float(mixed / negatives.sum() / positives.sum())
        if self.error > NOTICEABLE:
            why = f"scores after the first {self.exact_samples} samples are spread otherwise"
            # With weights the counts are sums of weights, not of samples.
            count = "more" if bins.is_floating_point() else int(bins.sum())
            remedy = f"mix the data, or set exact_samples to {count}"
            logger.warning(f"AUC: may be off by {self.error:.2g}: {why}; {remedy}")
        return _area(positives, negatives)


class Columns:
    """Values of each sample, such as its score and its label, in buffers that grow by doubling.

    The values are copied, because a view of a batch would keep all memory of the batch.

    Args:
        owner: the name of the metric that keeps them, for messages.

    Attributes:
        count: how many samples there are.
        buffers: one tensor for each kind of value, with room for more samples.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.count = 0
        self.buffers: list[Tensor] = []

    def append(self, *columns: Tensor) -> None:
        """Add the samples of a batch.

        Args:
            columns: one tensor for each kind of value, of which the first dimension is the samples.

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
        """Return all samples: one tensor for each kind of value, or none before the first batch.

        Args:
            device: where the tensors are returned; None leaves them on their device.
        """
        return [buffer[: self.count].to(device or buffer.device) for buffer in self.buffers]


def _edges(scores: Tensor) -> Tensor:
    """Return the edges of bins that these scores fill equally.

    Args:
        scores: the scores, [samples].

    Returns:
        The highest score of each bin except the last, [BINS - 1].
    """
    position = torch.arange(1, BINS, device=scores.device) * len(scores) // BINS
    edges = scores.sort().values[position]
    # A score that is the edge of two or more bins gets a separate bin, whose lower edge is the next
    # number below it.
    repeated = edges == torch.cat([edges[1:], edges.new_full((1,), math.nan)])
    return torch.where(repeated, edges.nextafter(torch.full_like(edges, -math.inf)), edges)


def _bin_counts(edges: Tensor, scores: Tensor, positive: Tensor, amounts: Tensor | None = None) -> Tensor:
    """Count scores in bins.

    Args:
        edges: the highest score of each bin except the last, [BINS - 1].
        scores: the scores, [samples].
        positive: whether each sample is positive, [samples].
        amounts: how much each sample counts, [samples]; None counts each as 1.

    Returns:
        The counts of the negatives in each bin, then those of the positives, [2 * BINS].
    """
    place = torch.bucketize(scores, edges) + BINS * positive
    amounts = torch.ones_like(place) if amounts is None else amounts
    return torch.zeros(2 * BINS, dtype=amounts.dtype, device=edges.device).index_add(0, place, amounts)


def _area(positives: Tensor, negatives: Tensor) -> float:
    """Return the area; nan if a class is absent.

    Args:
        positives: how many positives each group of equal scores has, in ascending order.
        negatives: how many negatives each group has.
    """
    below = negatives.cumsum(0) - negatives / 2
    return float((positives * below).sum() / positives.sum() / negatives.sum())
