"""A network of any width: wide as the teacher, narrow as the student."""

from torch import nn


class Model(nn.Sequential):
    """Points [batch, 2] -> scores of the two spirals [batch, 2].

    Args:
        width: units of each hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
