"""The head's bias starts at the log of how often each class occurs (Karpathy's recipe)."""

import torch

from pipeline import Context
from pipeline.stages import Startup as DefaultStartup


class Startup(DefaultStartup):
    def startup(self, context: Context) -> None:
        super().startup(context)
        labels = context["dataset"]["train_data"].dataset.labels
        prior = torch.bincount(labels, minlength=2) / len(labels)
        head = context["model"]["ranking"].model.head
        with torch.no_grad():
            head.bias.copy_(prior.clamp(min=1e-6).log().to(context["device"]))
