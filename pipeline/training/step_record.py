"""What becomes of the batch that a Brain is trained on: whoever trains fills it in, and the pass reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StepRecord:
    """The batch in work of a pass.

    Args:
        count: returns how many samples a batch has.

    Attributes:
        is_open: whether a pass is going on.
        batch: the batch; None between two batches.
        samples: how many samples it has; None: they are not counted yet.
        losses: the losses that it was trained on, by name; None: there are none yet.
        predictions: those of the Brain, where a plugin or a metric asks for them.
        trained: whether ``Brain.fit_batch`` has counted its loss, samples and update.
        scheduled: whether an OptimScheduler has taken part.
        updated: whether one has acted.
        updates_before: how many updates there were before the batch.
        epoch: the epoch that is running, from 0.
    """

    __slots__ = (
        "_count",
        "batch",
        "epoch",
        "is_open",
        "losses",
        "predictions",
        "samples",
        "scheduled",
        "trained",
        "updated",
        "updates_before",
    )

    def __init__(self, count: Callable[[Any], int]) -> None:
        self._count = count
        self.is_open = False
        self.batch: Any = None
        self.samples: int | None = 1
        self.losses: dict[str, Any] | None = None
        self.predictions: Any = None
        self.trained = self.scheduled = self.updated = False
        self.updates_before = self.epoch = 0

    def count_samples(self) -> int:
        """Return how many samples the batch has; they are counted once."""
        if self.samples is None:
            self.samples = self._count(self.batch)
        return self.samples

    def close(self) -> None:
        """End a pass: no batch is in work any more."""
        self.is_open, self.batch = False, None
