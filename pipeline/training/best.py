"""The best that a run has been, by one number of its validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.errors import DataError, one_of


class Best:
    """Remembers when a number was best.

    Args:
        metric: its name, as the validation reports it: ``valid_loss``.
        mode: ``min`` or ``max``: which is better.

    Attributes:
        value: the best so far; nan before the first.
        iteration: when it was; 0 before the first.
    """

    def __init__(self, metric: str, mode: str) -> None:
        self.metric, self.mode = metric, mode
        self.value, self.iteration = math.nan, 0
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
        better = math.isnan(self.value) or (value > self.value if self.mode == "max" else value < self.value)
        if better:
            self.value, self.iteration = value, iteration
        return better

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

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and who reports what."""
        return {"value": self.value, "iteration": self.iteration, "reported": dict(self._reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another."""
        self.value, self.iteration, self._reported = state["value"], state["iteration"], dict(state["reported"])
