"""An encoder, which two trainings share, and a head, of which each has its own."""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Waves [batch, 64] -> scores [batch, classes]."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, width, kernel_size=17), nn.ReLU(), nn.Conv1d(width, width, kernel_size=9), nn.ReLU()
        )
        self.head = nn.Linear(width, classes)

    def forward(self, waves: Tensor) -> Tensor:
        features = torch.amax(self.encoder(waves.unsqueeze(1)), dim=2)
        scores: Tensor = self.head(features)
        return scores
