"""A small network."""

from torch import nn


class Model(nn.Sequential):
    """Points [batch, 10] -> scores of the two clouds [batch, 2]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
