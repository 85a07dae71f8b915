"""A model that takes the noise off a wave; as a stage of `config.yaml`, and alone with `python experiment.py` or torchrun."""

import math
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import ExperimentBase
from pipeline.data.loader import make_loader

LENGTH = 32


def waves(count: int, seed: int) -> Tensor:
    """Waves [count, LENGTH] of random pitch and phase."""
    random = torch.Generator().manual_seed(seed)
    pitch, phase = 1 + 2 * torch.rand(count, 1, generator=random), 2 * math.pi * torch.rand(count, 1, generator=random)
    return torch.sin(pitch * torch.linspace(0, 2 * math.pi, LENGTH) + phase)


class Denoising(ExperimentBase):
    """Trains on fresh noise in every batch, and says how much of it is left.

    Args:
        config: `learning_rate`, `batch_size`, `training.noise`; the intervals are in `training` too.
        args: device, output folder and the like.
        width: units of the hidden layer.
    """

    def __init__(self, config: Any, args: Any, width: int = 32) -> None:
        super().__init__(config, args)
        self.width = width

    def setup_dataloader(self) -> None:
        """500 waves to train on, 100 to validate on."""
        size = self.config.batch_size
        self.train_loader = make_loader(waves(500, seed=1), seed=0, shuffle=True, batch_size=size)
        self.valid_loader = make_loader(waves(100, seed=2), seed=0, batch_size=size)

    def setup_model(self) -> None:
        """Noisy waves [batch, LENGTH] -> waves [batch, LENGTH]."""
        layers = (nn.Linear(LENGTH, self.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(self.width, LENGTH))
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.learning_rate)

    def train_batch(self) -> None:
        """One step on the next batch; after the last one, a new epoch begins by itself."""
        wave = self.read_batch()
        loss = self.error(wave, torch.randn_like(wave))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.visualizer.add_scalar("loss", loss, self.iteration)

    def valid(self) -> None:
        """The error on waves that were not trained on, always with the same noise."""
        random = torch.Generator().manual_seed(3)
        errors = [self.error(wave, torch.randn(wave.shape, generator=random)) for wave in self.valid_loader]
        left = torch.stack(errors).mean().item() / self.config.training.noise**2
        self.visualizer.add_scalar("noise_left", left, self.iteration)
        self.logger.info("iteration {}: {:.0%} of the noise is left", self.iteration, left)

    def error(self, wave: Tensor, noise: Tensor) -> Tensor:
        """How far from the waves the model is, given them with noise."""
        wave, noise = wave.to(self.device), noise.to(self.device)
        return nn.functional.mse_loss(self.model(wave + self.config.training.noise * noise), wave)


if __name__ == "__main__":
    torch.manual_seed(0)
    training = SimpleNamespace(max_iteration=200, valid_interval=50, save_interval=100, noise=0.5)
    config = SimpleNamespace(learning_rate=0.01, batch_size=32, training=training)
    args = SimpleNamespace(
        device="cpu", nprocs=int(os.environ.get("WORLD_SIZE", "1")), output="runs/denoising", checkpoint_path=None
    )
    experiment = Denoising(config, args)
    experiment.setup()
    experiment.run()
