"""The mean of a number per batch. It stands in the training loop, so it is as cheap as it can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.training.metrics.shapes import tensor


def wide(device: torch.device) -> torch.dtype:
    """The type in which a device sums up: float64, which MPS doesn't have."""
    return torch.float32 if device.type == "mps" else torch.float64


class Mean:
    """The mean of a number, weighted by samples; kept on the device until it is read.

    As a metric it is the mean of the predictions, such as the click rate that a model expects.

    Attributes:
        count: how many samples there were.
    """

    def __init__(self) -> None:
        self.total, self.count = _zero(0.0), 0

    def add(self, value: Tensor | float, count: int) -> None:
        """Take in a scalar, detached, that is a mean over ``count`` samples."""
        if not self.count:
            self.total = _zero(value)
        self.total = self.total + value * count
        self.count += count

    def update(self, predictions: Tensor, target: Any = None) -> None:
        """Take in predictions [batch] of any unit; each number counts alike, in whatever shape. There is no target."""
        values = tensor(self, predictions)
        if not self.count:
            self.total = _zero(values)
        self.total = self.total + values.sum(dtype=self.total.dtype)
        self.count += values.numel()

    def compute(self) -> float:
        """The mean; nan if there was nothing."""
        return float(self.total) / self.count if self.count else math.nan

    def reset(self) -> None:
        """Start again."""
        self.total, self.count = _zero(0.0), 0

    def state_dict(self) -> dict[str, Any]:
        """The sum and the number of samples."""
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another."""
        self.total, self.count = state["total"], state["count"]


def _zero(like: Tensor | float) -> Tensor:
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return torch.zeros((), dtype=wide(device), device=device)
