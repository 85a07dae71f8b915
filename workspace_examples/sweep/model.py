"""A network whose size is two hyper-parameters."""

from torch import Tensor, nn


class Model(nn.Module):
    """Points [batch, 2] -> scores [batch, 2].

    Args:
        width: units of a hidden layer.
        depth: how many hidden layers there are.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        inputs = [2, *[width] * (depth - 1)]
        hidden = [layer for size in inputs for layer in (nn.Linear(size, width), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.layers(points)
        return scores
