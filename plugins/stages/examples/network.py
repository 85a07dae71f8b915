from typing import Any

from torch import nn

from pipeline import Context, stages


class Network(stages.Network):
    def build_model(self, phase: Any, context: Context) -> nn.Module:
        width = context["hyper_parameters"]["width"]
        hidden = [nn.Linear(2, width), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(width, 2))
