"""The best that a run has been, by one number of its validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import DataError, one_of


class Best:
    """Remembers when a number was best.

    Args:
        metric: its name, as the validation reports it: ``valid_loss``.
        mode: ``min`` or ``max``: which is better.

    Attributes:
        value: the best so far; nan before the first.
        iteration: when it was.
    """

    def __init__(self, metric: str, mode: str) -> None:
        self.metric, self.mode = metric, mode
        self.value, self.iteration = math.nan, 0

    def improves(self, numbers: Mapping[str, float], iteration: int) -> bool:
        """Whether these numbers are better than all before, which they then replace; nan never is."""
        value = numbers.get(self.metric, math.nan)
        if math.isnan(value):
            return False
        better = math.isnan(self.value) or (value > self.value if self.mode == "max" else value < self.value)
        if better:
            self.value, self.iteration = value, iteration
        return better

    def check_reported(self, reported: Iterable[str]) -> None:
        """After every phase has been validated.

        Raises:
            DataError: none of them reports the number.
        """
        names = list(reported)
        if self.metric not in names:
            raise DataError(
                f"keep_best watches '{self.metric}', which no validation reports{one_of(self.metric, names)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """For ``context["best"]``."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "iteration": self.iteration}
