"""How well points cover the ring."""

import torch
from torch import Tensor

from .data import MODES, SIGMA, centres


def nearest(points: Tensor) -> Tensor:
    """The mode [points] within three standard deviations of which a point is; -1 where there is none."""
    distance, mode = torch.cdist(points, centres().to(points.device)).min(dim=1)
    return torch.where(distance < 3 * SIGMA, mode, -1)


class Modes:
    """How many modes have at least a quarter of the points that they would have if all had the same."""

    def __init__(self) -> None:
        self.reset()

    def update(self, predictions: Tensor, target: Tensor) -> None:
        """Take in the points made [batch, 2]; real ones are not needed."""
        self.counts += torch.bincount(nearest(predictions).cpu() + 1, minlength=MODES + 1)

    def compute(self) -> int:
        """From 0 to MODES."""
        share = self.counts[1:] / self.counts.sum()
        return int((share > 0.25 / MODES).sum())

    def reset(self) -> None:
        """Start again."""
        self.counts = torch.zeros(MODES + 1, dtype=torch.long)
