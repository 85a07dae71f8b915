"""An average of the weights, kept while training and written at the end."""

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from pipeline import Context, stages


class Network(stages.Network):
    def __init__(self, context: Context, decay: float) -> None:
        super().__init__(context)
        self.decay = decay

    def build_network(self, context: Context) -> None:
        super().build_network(context)
        model = context["model"]["ranking"]["model"]
        context["average"] = AveragedModel(model, avg_fn=lambda mean, new, _: mean.lerp(new, 1 - self.decay))


class Runner(stages.Runner):
    def train_batch(self, context: Context, phase: Any, batch: Any) -> Any:
        loss = super().train_batch(context, phase, batch)
        context["average"].update_parameters(phase.model)
        return loss

    def run(self, context: Context) -> None:
        super().run(context)
        torch.save(context["average"].module.state_dict(), context["run_dir"] / "average.pt")
