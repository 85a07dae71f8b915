"""The encoder that both jobs use, and a head of this one's own."""

from torch import Tensor, nn

from ..encoder import Encoder


class Model(nn.Module):
    """Points [batch, 2] -> distances [batch, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = Encoder(width)
        self.head = nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(points))
        return output
