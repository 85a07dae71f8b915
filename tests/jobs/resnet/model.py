"""Trains the ResNet on blends of pictures."""

from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeline import Brain, Stage

from .data import mixed
from .network import ResNet


class Model(Brain):
    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__({"net": ResNet(channels, blocks)})

    def compute_forward(self, batch: tuple[Tensor, Tensor], stage: Stage) -> Tensor:
        pictures, self.targets = mixed(*batch) if stage is Stage.TRAIN else batch
        return self.modules["net"](pictures)

    def compute_objectives(self, predictions: Tensor, batch: tuple[Tensor, Tensor], stage: Stage) -> Tensor:
        return cross_entropy(predictions, self.targets)
