"""The trained model for those who serve it: traced, with an example beside it."""

import warnings
from typing import Any

import torch

from pipeline import Context, stages


class Export(stages.Terminal):
    def __init__(self, context: Context, phase: str, file: str = "model.pt") -> None:
        super().__init__(context)
        self.phase, self.file = phase, file

    def terminal(self, context: Context) -> None:
        super().terminal(context)
        model = context["model"][self.phase]["model"].eval()
        example = next(iter(context["dataset"]["valid_data"]))[0].to(context["device"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace: Any = torch.jit.trace
            trace(model, example).save(str(context["run_dir"] / self.file))
