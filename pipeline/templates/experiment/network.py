"""What is trained, and what it is trained on."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Context, NetworkBase

Loader = DataLoader[tuple[Tensor, ...]]


class Network(NetworkBase):
    """Writes `dataset`, `model` and `optimizer`.

    Args:
        width: units of the hidden layer.
    """

    reads = ("device", "hyper_parameters")
    writes = ("dataset", "model", "optimizer")

    def __init__(self, context: Context, width: int) -> None:
        super().__init__(context)
        self.width = width

    def build_network(self, context: Context) -> None:
        """Set up data, then model and optimizer."""
        settings = context["hyper_parameters"]
        context["dataset"] = {
            "train_data": self.setup_dataloader(1, settings),
            "valid_data": self.setup_dataloader(2, settings),
        }
        model = self.setup_model().to(context["device"])
        # Where the default startup loads weights, and the checkpointer takes them from.
        context["model"] = {"sine": {"model": model}}
        context["optimizer"] = torch.optim.Adam(model.parameters(), lr=settings["learning_rate"])

    def setup_dataloader(self, seed: int, settings: dict[str, Any]) -> Loader:
        """Places x [batch, 1] and the sine y [batch, 1] of each, made on the spot."""
        random = torch.Generator().manual_seed(seed)
        x = math.pi * (2 * torch.rand(500, 1, generator=random) - 1)
        y = torch.sin(x) + 0.05 * torch.randn(500, 1, generator=random)
        return DataLoader(TensorDataset(x, y), batch_size=settings["batch_size"], shuffle=True, generator=random)

    def setup_model(self) -> nn.Module:
        """Places [batch, 1] -> values [batch, 1]."""
        return nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Linear(self.width, 1))
