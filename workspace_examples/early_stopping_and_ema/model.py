"""A plain module, with more weights than its data need."""

from torch import Tensor, nn


class Model(nn.Module):
    """Points [batch, 2] -> scores [batch, 3]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.layers(points)
        return scores
