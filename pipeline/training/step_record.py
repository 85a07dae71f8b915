"""StepRecord: what happens to the active batch of a pass. The code that trains fills it in, and the pass reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StepRecord:
    """What happens to the active batch of a Brain.

    A Brain has one record, since only one pass at a time may train it.

    Args:
        count: returns how many samples a batch has.

    Attributes:
        is_open: whether a pass has started and not ended.
        batch: the batch; None between two batches.
        samples: the number of samples in the batch; None until they are counted.
        losses: name -> loss that the batch was trained on; None if there is none yet.
        predictions: the predictions of the Brain, if a plugin or a metric needs them.
        trained: whether ``Brain.fit_batch`` has counted its loss, samples and update.
        scheduled: whether an OptimScheduler has counted the batch.
        updated: whether an OptimScheduler has ended an update.
        updates_before: the number of updates before the batch.
        epoch: the current epoch, counted from 0.
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
        """Return the number of samples in the batch. They are counted once."""
        if self.samples is None:
            self.samples = self._count(self.batch)
        return self.samples

    def close(self) -> None:
        """Mark the pass as ended. It has no active batch any more."""
        self.is_open, self.batch = False, None
