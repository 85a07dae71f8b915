"""The training: its data, its model, a step of it, and its validation."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeline import ExperimentBase, make_loader


class Experiment(ExperimentBase):
    """Fits a sine.

    Args:
        config: the `hyper_parameters`, and `training` with the runner's intervals.
        args: device, output folder and the like.
        width: units of the hidden layer; the `runner_args`.
    """

    def __init__(self, config: Any, args: Any, width: int) -> None:
        super().__init__(config, args)
        self.width = width

    def setup_dataloader(self) -> None:
        """Two sets of points on a sine with noise."""
        self.train_loader = self.points(seed=1)
        self.valid_loader = self.points(seed=2)

    def points(self, seed: int) -> DataLoader[Any]:
        """Places x [batch, 1] and the sine y [batch, 1] of each, made on the spot."""
        random = torch.Generator().manual_seed(seed)
        x = math.pi * (2 * torch.rand(500, 1, generator=random) - 1)
        y = torch.sin(x) + 0.05 * torch.randn(500, 1, generator=random)
        return make_loader(TensorDataset(x, y), seed=seed, shuffle=True, batch_size=self.config.batch_size)

    def setup_model(self) -> None:
        """Places [batch, 1] -> values [batch, 1]."""
        self.model = nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Linear(self.width, 1)).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.learning_rate)

    def train_batch(self) -> None:
        """One step."""
        x, y = self.read_batch()
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        # The plugins write and log its mean.
        self.visualizer.add_scalar("loss", loss, self.iteration)

    def valid(self) -> None:
        """One pass over the validation data, without gradients and in evaluation mode."""
        losses: list[Tensor] = []
        for x, y in self.valid_loader:
            losses.append(nn.functional.mse_loss(self.model(x.to(self.device)), y.to(self.device)))
        self.visualizer.add_scalar("valid_loss", torch.stack(losses).mean(), self.iteration)
