"""Tracks which iteration of a training had the best number, and which checkpoints are the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import DataError, no_loss, one_of


class BestEntry(NamedTuple):
    """A number, and the iteration of which it is."""

    value: float
    iteration: int


class BestTracker:
    """Tracks when a number was best, and which saved checkpoints are the best.

    Args:
        metric: its name, as the validation reports it: ``valid_loss``.
        mode: ``min`` or ``max``: which is better.
        count: how many checkpoints are kept.

    Attributes:
        value: the best so far; nan before the first.
        iteration: when it was; 0 too before the first.
        pending: entries whose checkpoint is not known to be on disk yet.
        kept: entries with a checkpoint on disk, best first, at most ``count``.
    """

    def __init__(self, metric: str, mode: str, count: int = 1) -> None:
        self.metric, self.mode, self.count = metric, mode, count
        self.value, self.iteration = math.nan, 0
        self.pending: list[BestEntry] = []
        self.kept: list[BestEntry] = []
        self._reported: dict[str, str] = {}

    def improves(self, phase: str, numbers: Mapping[str, float], iteration: int) -> bool:
        """Take the numbers of a phase, and say whether they are better than all before; nan never is.

        Raises:
            DataError: another phase has reported the number too, which is not to be compared with this one's.
        """
        other = self._reported.get(self.metric, phase) if self.metric in numbers else phase
        if other != phase:
            both = f"which phases '{other}' and '{phase}' both report"
            raise DataError(f"keep_best watches '{self.metric}', {both}; name a metric that only one of them has")
        self._reported |= dict.fromkeys(numbers, phase)
        value = numbers.get(self.metric, math.nan)
        if math.isnan(value):
            return False
        ranked = self._best_of([*self.kept, *self.pending])
        if len(ranked) < self.count or self._is_better(value, ranked[-1].value):
            self.pending.append(BestEntry(value, iteration))
        better = self._is_better(value, self.value)
        if better:
            self.value, self.iteration = value, iteration
        return better

    def move(self, before: int, now: int) -> None:
        """Assign the numbers of an iteration without a checkpoint to another iteration."""
        moved = [entry.value for entry in self.pending if entry.iteration == before]
        if self.iteration == before and self.value in moved:
            self.iteration = now
        others = [entry for entry in self.pending if entry.iteration != before]
        self.pending = [*others, *(BestEntry(value, now) for value in moved)]

    def deserves_checkpoint(self, iteration: int) -> bool:
        """Whether this iteration is one of the best."""
        return any(entry.iteration == iteration for entry in self.pending)

    def kept_with(self, iteration: int) -> list[BestEntry]:
        """The entries that are kept once a checkpoint of an iteration is on disk."""
        return self._best_of([*self.kept, *(entry for entry in self.pending if entry.iteration == iteration)])

    def mark_saved(self, iteration: int) -> None:
        """A checkpoint of an iteration is on disk; of earlier ones none will come any more."""
        self.kept = self.kept_with(iteration)
        self.pending = [entry for entry in self.pending if entry.iteration > iteration]

    def check_reported(self) -> None:
        """Raise if no phase has reported the number, once all were validated.

        Raises:
            DataError: none of them reports the number.
        """
        if self.metric not in self._reported:
            known = no_loss(self.metric, self._reported) or one_of(self.metric, self._reported)
            raise DataError(f"keep_best watches '{self.metric}', which no validation reports{known}")

    @property
    def has_numbers(self) -> bool:
        """Whether a validation has reported numbers."""
        return bool(self._reported)

    def as_dict(self) -> dict[str, Any]:
        """The value of ``context["best"]``."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "iteration": self.iteration}

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """The best so far, the entries kept once a checkpoint of this iteration is on disk, and which phase reports what."""
        kept = [list(entry) for entry in self.kept_with(iteration)]
        return {"value": self.value, "iteration": self.iteration, "kept": kept, "reported": dict(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that state."""
        self.value, self.iteration, self._reported = state["value"], state["iteration"], dict(state["reported"])
        self.kept = [BestEntry(*entry) for entry in state["kept"]][: self.count]

    def _best_of(self, entries: list[BestEntry]) -> list[BestEntry]:
        # Of equals the older stays: Python's sort keeps their order.
        return sorted(entries, key=lambda entry: entry.value, reverse=self.mode == "max")[: self.count]

    def _is_better(self, value: float, other: float) -> bool:
        return math.isnan(other) or (value > other if self.mode == "max" else value < other)
