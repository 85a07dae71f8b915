"""A metric that is a formula of sums over all samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipeline.errors import DataError
from pipeline.training.metrics.mean import wide

LABELS = "labels are neither 0 nor 1; make them so, e.g. (rating > 3).float()"
CLASSES = "numbers in the target are of no score; count from 0, and leave out what is to be ignored"


class Summed:
    """Sums by name, kept on the device of the predictions until they are read.

    A batch is added out of place: a state that was handed out stays as it is.

    Attributes:
        mistakes: sums that count what a metric cannot take, with the message that tells them.
    """

    mistakes: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, **parts: Tensor) -> None:
        """Add the sums of one batch."""
        for name, part in parts.items():
            before = self.sums.get(name)
            self.sums[name] = part if before is None else before.to(part.device) + part

    def read(self) -> dict[str, Tensor]:
        """The sums, brought to the CPU.

        Raises:
            DataError: there were mistakes among the values.
        """
        sums = {name: each.cpu() for name, each in self.sums.items()}
        for name, message in self.mistakes.items():
            if name in sums and (count := int(sums[name])):
                raise DataError(f"{type(self).__name__}: {count} {message}")
        return sums

    def reset(self) -> None:
        """Start again."""
        self.sums = {}

    def state_dict(self) -> dict[str, Any]:
        """All that was taken in since the last reset: name -> tensor."""
        return dict(self.sums)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another."""
        self.sums = dict(state)


class Averaged(Summed):
    """The mean of a number per sample."""

    def add_each(self, values: Tensor) -> None:
        """Add one number per sample, [samples]."""
        samples = torch.full((), values.numel(), device=values.device)
        self.add(total=values.sum(dtype=wide(values.device)), samples=samples)

    def compute(self) -> float:
        """The mean over samples; nan if there were none."""
        sums = self.read()
        return float(sums["total"] / sums["samples"]) if sums else math.nan


def outside(values: Tensor, low: float, high: float) -> Tensor:
    """How many values are below ``low`` or above ``high``; a nan is neither."""
    return ((values < low) | (values > high)).sum()


def no_labels(labels: Tensor) -> Tensor:
    """How many labels are neither 0 nor 1."""
    return ((labels != 0) & (labels != 1)).sum()
