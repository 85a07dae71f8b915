"""The best that a run has been, by one number of its validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import DataError, one_of


class Moment(NamedTuple):
    """A number, and the iteration in which it was reported."""

    value: float
    iteration: int


class Best:
    """Remembers when a number was best, and which checkpoints are the best that were saved.

    Args:
        metric: its name, as the validation reports it: ``valid_loss``.
        mode: ``min`` or ``max``: which is better.
        count: how many checkpoints are kept.

    Attributes:
        value: the best so far; nan before the first.
        iteration: when it was; 0 before the first.
        pending: moments that are to have a checkpoint, which may not be on disk yet.
        kept: those of which there is one, best first, at most ``count``.
    """

    def __init__(self, metric: str, mode: str, count: int = 1) -> None:
        self.metric, self.mode, self.count = metric, mode, count
        self.value, self.iteration = math.nan, 0
        self.pending: list[Moment] = []
        self.kept: list[Moment] = []
        self._reported: dict[str, str] = {}

    def improves(self, phase: str, numbers: Mapping[str, float], iteration: int) -> bool:
        """Whether the numbers of a phase are better than all before, which they then replace; nan never is.

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
            self.pending.append(Moment(value, iteration))
        better = self._is_better(value, self.value)
        if better:
            self.value, self.iteration = value, iteration
        return better

    def deserves_checkpoint(self, iteration: int) -> bool:
        """Whether this iteration is one of the best."""
        return any(each.iteration == iteration for each in self.pending)

    def kept_with(self, iteration: int) -> list[Moment]:
        """What is kept once there is a checkpoint of an iteration."""
        return self._best_of([*self.kept, *(each for each in self.pending if each.iteration == iteration)])

    def saved(self, iteration: int) -> None:
        """There is a checkpoint of an iteration now; of one before it there will be none any more."""
        self.kept = self.kept_with(iteration)
        self.pending = [each for each in self.pending if each.iteration > iteration]

    def check_reported(self) -> None:
        """After every phase has been validated.

        Raises:
            DataError: none of them reports the number.
        """
        if self.metric not in self._reported:
            known = one_of(self.metric, self._reported)
            raise DataError(f"keep_best watches '{self.metric}', which no validation reports{known}")

    def as_dict(self) -> dict[str, Any]:
        """For ``context["best"]``."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "iteration": self.iteration}

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """The best so far, what is kept of it once there is a checkpoint of this iteration, and who reports what."""
        kept = [list(each) for each in self.kept_with(iteration)]
        return {"value": self.value, "iteration": self.iteration, "kept": kept, "reported": dict(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another."""
        self.value, self.iteration, self._reported = state["value"], state["iteration"], dict(state["reported"])
        self.kept = [Moment(*each) for each in state["kept"]][: self.count]

    def _best_of(self, moments: list[Moment]) -> list[Moment]:
        # Of equals the older stays: Python's sort keeps their order.
        return sorted(moments, key=lambda each: each.value, reverse=self.mode == "max")[: self.count]

    def _is_better(self, value: float, other: float) -> bool:
        return math.isnan(other) or (value > other if self.mode == "max" else value < other)
