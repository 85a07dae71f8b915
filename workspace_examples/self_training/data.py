"""Two clouds of points, few of which have labels, made on the spot."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Clouds(Dataset[tuple[Tensor, Tensor]]):
    """Points [10] of two normal distributions five standard deviations apart, and of which (0 or 1) each is.

    It has the samples whose label is known; ``label`` adds to them.

    Args:
        size: how many points there are.
        seed: decides the points.
        labelled: of how many the label is known.
    """

    def __init__(self, size: int, seed: int, labelled: int) -> None:
        random = torch.Generator().manual_seed(seed)
        cloud = torch.arange(size) % 2
        self.points = torch.randn(size, 10, generator=random)
        self.points[:, 0] += 5 * (cloud - 0.5)
        self.labels = torch.where(torch.arange(size) < labelled, cloud, -1)

    def __len__(self) -> int:
        return int((self.labels >= 0).sum())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = (self.labels >= 0).nonzero()[index, 0]
        return self.points[place], self.labels[place]

    def label(self, labels: Tensor, sure: Tensor) -> None:
        """Take these labels [size] for points that have none, where it is sure [size] of them."""
        self.labels = torch.where((self.labels < 0) & sure, labels, self.labels)

    def state_dict(self) -> dict[str, Any]:
        """The labels, for a checkpoint."""
        return {"labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the labels of a checkpoint."""
        self.labels = state["labels"]
