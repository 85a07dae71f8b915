"""Xavier weights and zero biases, as the paper has them."""

from torch import nn

from pipeline import Context, stages


def initialize(module: nn.Module, gain: float) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight, gain=gain)
        nn.init.zeros_(module.bias)


class Network(stages.Network):
    def __init__(self, context: Context, gain: float) -> None:
        super().__init__(context)
        self.gain = gain

    def build_network(self, context: Context) -> None:
        super().build_network(context)
        for module in context["model"]["ranking"]["model"].modules():
            initialize(module, self.gain)
