"""A network that is large enough to learn false labels by heart."""

from torch import nn


class Model(nn.Sequential):
    """Points [batch, 2] -> scores of the two rings [batch, 2]."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
