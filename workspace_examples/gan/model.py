"""A generator that makes points, and a discriminator that tells them from real ones."""

import torch
from torch import Tensor, nn

from pipeline import Brain, Stage

from .metrics import nearest


class Layers(nn.Sequential):
    """[batch, inputs] -> [batch, outputs]."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        hidden = (nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2))
        super().__init__(*hidden, nn.Linear(width, outputs))


class Model(Brain):
    """Makes points that look like those of a batch.

    The losses are least squares (Mao et al., "Least Squares Generative Adversarial Networks", ICCV 2017): the
    discriminator is to answer 1 for a real point and 0 for one that was made, the generator wants 1 for its own.

    Args:
        width: units of each hidden layer.
        code_size: random numbers that the generator makes a point of.
    """

    def __init__(self, width: int, code_size: int) -> None:
        super().__init__({"generator": Layers(code_size, width, 2), "discriminator": Layers(2, width, 1)})
        self.code_size = code_size

    def compute_forward(self, batch: Tensor, stage: Stage) -> Tensor:
        """As many points [batch, 2] as the batch has; in an evaluation always of the same codes."""
        random = None if stage is Stage.TRAIN else torch.Generator(self.device).manual_seed(0)
        codes = torch.randn(len(batch), self.code_size, generator=random, device=self.device)
        made: Tensor = self.modules["generator"](codes)
        return made

    def compute_objectives(self, predictions: Tensor, batch: Tensor, stage: Stage) -> dict[str, Tensor]:
        """Two losses, each named after the module that it trains."""
        discriminator = self.modules["discriminator"]
        if stage is not Stage.TRAIN:
            # Reported as valid_on_ring: the share of the points made that are where real ones would be.
            self.log("on_ring", (nearest(predictions) >= 0).float().mean())
        fooled, real, made = discriminator(predictions), discriminator(batch), discriminator(predictions.detach())
        return {
            "generator": (fooled - 1).square().mean(),
            "discriminator": (real - 1).square().mean() + made.square().mean(),
        }

    def target(self, batch: Tensor) -> Tensor:
        """What metrics compare the points made with: the real ones."""
        return batch
