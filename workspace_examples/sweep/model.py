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
        sizes = [2, *[width] * depth]
        hidden = [layer for size in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(*size), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.layers(points)
        return scores
