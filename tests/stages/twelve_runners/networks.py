"""The networks of the Runners here."""

from torch import nn


class Net(nn.Sequential):
    """Points [batch, 3] -> [batch, outputs]."""

    def __init__(self, dropout: float, outputs: int = 1) -> None:
        super().__init__(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, outputs))
