"""An encoder, whose weights come from a file, and a head, which is trained."""

from torch import Tensor, nn


class Encoder(nn.Sequential):
    """Points [batch, 2] -> features [batch, width]."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


class Model(nn.Module):
    """Points [batch, 2] -> scores [batch, 2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = Encoder(width)
        self.head = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(points))
        return scores
