"""A denoising autoencoder, as a Brain: what is computed for a batch, and what is minimized."""

import torch
from torch import Tensor, nn

from pipeline import Brain, Stage


class Model(Brain):
    """Waves [batch, 16] -> the same waves, through a code of few numbers.

    Args:
        code_size: length of the code.
        noise: standard deviation of what is added to a wave in training.
        sparsity: weight of the code's mean absolute value in the loss.
    """

    def __init__(self, code_size: int, noise: float, sparsity: float) -> None:
        # What is trained and saved is given to super().__init__, by name.
        encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, code_size))
        decoder = nn.Sequential(nn.Linear(code_size, 32), nn.ReLU(), nn.Linear(32, 16))
        super().__init__({"encoder": encoder, "decoder": decoder})
        self.noise = noise
        self.sparsity = sparsity

    def compute_forward(self, batch: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
        """The waves as they come out [batch, 16], and their codes [batch, code_size]."""
        waves = batch + self.noise * torch.randn_like(batch) if stage is Stage.TRAIN else batch
        code = self.modules["encoder"](waves)
        return self.modules["decoder"](code), code

    def compute_objectives(self, predictions: tuple[Tensor, Tensor], batch: Tensor, stage: Stage) -> dict[str, Tensor]:
        """`loss` is what is trained on; the others are there for plugins to see."""
        waves, code = predictions
        reconstruction = nn.functional.mse_loss(waves, batch)
        sparsity = code.abs().mean()
        return {"loss": reconstruction + self.sparsity * sparsity, "reconstruction": reconstruction}
