"""What is trained; nothing in it knows the framework."""

from torch import Tensor, nn


class Model(nn.Module):
    """Points [batch, 2] -> scores of the two classes [batch, 2].

    Args:
        width: units of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        """The scores."""
        scores: Tensor = self.layers(points)
        return scores
