"""The encoder of both jobs."""

from torch import nn


class Encoder(nn.Sequential):
    """Points [batch, 2] -> features [batch, width]."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
