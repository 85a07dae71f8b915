"""Looks at one batch before anything is trained; a wrong shape ends the run here."""

import torch

from pipeline import Context, stages
from pipeline.errors import DataError


class Network(stages.Network):
    def __init__(self, context: Context, dataset: str, phase: str) -> None:
        super().__init__(context)
        self.dataset = dataset
        self.phase = phase

    def build_network(self, context: Context) -> None:
        super().build_network(context)
        pairs, labels = next(iter(context["dataset"][self.dataset]))
        with torch.no_grad():
            scores = context["model"][self.phase]["model"](pairs.to(context["device"]))
        if scores.shape[0] != labels.shape[0] or scores.isnan().any():
            raise DataError(f"{self.dataset}: the model makes {tuple(scores.shape)} of {tuple(pairs.shape)}")
