"""Tracks in which iteration a number was best, and which checkpoints are the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import DataError, no_loss, one_of


class BestEntry(NamedTuple):
    """A number of a validation.

    Attributes:
        value: the number.
        iteration: the iteration that was validated.
    """

    value: float
    iteration: int


class BestTracker:
    """Tracks when a number was best, and which saved checkpoints are the best.

    Args:
        metric: the name of the number, as the validation reports it: ``valid_loss``.
        mode: ``min`` if lower numbers are better, ``max`` if higher ones are.
        count: how many checkpoints are kept.

    Attributes:
        value: the best number so far; nan before the first.
        iteration: the iteration of the best number; 0 before the first.
        pending: the entries whose checkpoint is not known to be on disk yet.
        kept: the entries with a checkpoint on disk, best first, at most ``count``.
    """

    def __init__(self, metric: str, mode: str, count: int = 1) -> None:
        self.metric = metric
        self.mode = mode
        self.count = count
        self.value = math.nan
        self.iteration = 0
        self.pending: list[BestEntry] = []
        self.kept: list[BestEntry] = []
        # Name of a number -> the phase that has reported it.
        self._reported: dict[str, str] = {}

    def improves(self, phase: str, numbers: Mapping[str, float], iteration: int) -> bool:
        """Take the numbers of a phase, and return whether its number is better than all before.

        A number that is nan is never better.

        Raises:
            DataError: another phase has reported the number too. The two cannot be compared.
        """
        if self.metric in numbers:
            other = self._reported.get(self.metric, phase)
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
        is_best = self._is_better(value, self.value)
        if is_best:
            self.value = value
            self.iteration = iteration
        return is_best

    def move(self, before: int, now: int) -> None:
        """Assign the numbers of an iteration without a checkpoint to another iteration."""
        moved = [entry.value for entry in self.pending if entry.iteration == before]
        if self.iteration == before and self.value in moved:
            self.iteration = now
        others = [entry for entry in self.pending if entry.iteration != before]
        self.pending = [*others, *(BestEntry(value, now) for value in moved)]

    def deserves_checkpoint(self, iteration: int) -> bool:
        """Return whether an iteration is one of the best and has no checkpoint yet."""
        return any(entry.iteration == iteration for entry in self.pending)

    def kept_with(self, iteration: int) -> list[BestEntry]:
        """Return the entries that are kept once the checkpoint of an iteration is on disk."""
        of_iteration = [entry for entry in self.pending if entry.iteration == iteration]
        return self._best_of([*self.kept, *of_iteration])

    def mark_saved(self, iteration: int) -> None:
        """Note that the checkpoint of an iteration is on disk.

        No checkpoint of an earlier iteration is expected any more.
        """
        self.kept = self.kept_with(iteration)
        self.pending = [entry for entry in self.pending if entry.iteration > iteration]

    def check_reported(self) -> None:
        """Raise if no phase has reported the number. Call it once all phases were validated.

        Raises:
            DataError: none of the phases reports the number.
        """
        if self.metric not in self._reported:
            known = no_loss(self.metric, self._reported) or one_of(self.metric, self._reported)
            raise DataError(f"keep_best watches '{self.metric}', which no validation reports{known}")

    @property
    def has_numbers(self) -> bool:
        """Whether a validation has reported numbers."""
        return bool(self._reported)

    def as_dict(self) -> dict[str, Any]:
        """Return the value of ``context["best"]``."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "iteration": self.iteration}

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """Return the state that the checkpoint of an iteration keeps.

        Its entries are the ones that are kept once this checkpoint is on disk.
        """
        return {
            "value": self.value,
            "iteration": self.iteration,
            "kept": [list(entry) for entry in self.kept_with(iteration)],
            "reported": dict(self._reported),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.value = state["value"]
        self.iteration = state["iteration"]
        self._reported = dict(state["reported"])
        self.kept = [BestEntry(*entry) for entry in state["kept"]][: self.count]

    def _best_of(self, entries: list[BestEntry]) -> list[BestEntry]:
        # The sort is stable, so of two equal entries the older one comes first.
        ranked = sorted(entries, key=lambda entry: entry.value, reverse=self.mode == "max")
        return ranked[: self.count]

    def _is_better(self, value: float, other: float) -> bool:
        if math.isnan(other):
            return True
        return value > other if self.mode == "max" else value < other
