"""A small network that shows an intermediate value to the plugins."""

from torch import Tensor, nn

from pipeline import observe


class Model(nn.Module):
    """x [batch, 1] -> y [batch, 1].

    Args:
        width: units of the hidden layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, width)
        self.output = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The values; `observe` returns what it is called with, and costs nothing where no plugin listens."""
        hidden = observe("hidden", self.hidden(x).relu())
        y: Tensor = self.output(hidden)
        return y
