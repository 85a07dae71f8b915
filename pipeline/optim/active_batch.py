"""What an optimizer knows of the batch whose losses it gets."""

from __future__ import annotations

from typing import Protocol

from pipeline.optim.losses import Losses


class ActiveBatch(Protocol):
    """What an optimizer knows of the active batch. The ``StepRecord`` of a Brain is one."""

    @property
    def is_open(self) -> bool:
        """Whether the batch belongs to a pass of training."""

    @property
    def number(self) -> int:
        """The number of the batch in all passes."""

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""

    @property
    def under_autocast(self) -> bool:
        """Whether the code that trains may run under autocast."""

    def count_samples(self) -> int:
        """Return how many samples the batch has."""

    def add_losses(self, losses: Losses) -> None:
        """Record losses that the batch was trained on."""


class AnyBatch:
    """An unknown batch, for an optimizer without a Brain. All batches have the same weight."""

    is_open = False
    number = 0
    epoch = 0
    under_autocast = True

    def count_samples(self) -> int:
        """Return 1."""
        return 1

    def add_losses(self, losses: Losses) -> None:
        """Record nothing, because nothing reads it."""
