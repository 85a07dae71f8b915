"""Rare classes count more: the weights come from the labels, and the model's scores are shifted by them."""

import torch

from pipeline import Context, InstanceBase, stages

from .data import Clicks


class Instance(InstanceBase):
    def instance(self, context: Context) -> None:
        torch.manual_seed(context["runner"].seed or 0)
        counts = torch.bincount(Clicks(seed=1).labels, minlength=2)
        context["class_weights"] = counts.sum() / counts.clamp(min=1)


class Network(stages.Network):
    def build_network(self, context: Context) -> None:
        super().build_network(context)
        weights = context["class_weights"].to(context["device"])
        for phase in context["model"].values():
            phase["model"].register_buffer("class_weights", weights)
