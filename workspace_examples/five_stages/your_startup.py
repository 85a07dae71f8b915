"""The first weights; written as PaddleRec's users write theirs."""

import torch

from pipeline import Context, EngineMode, StartupBase


class Startup(StartupBase):
    """Starts the model at zero."""

    reads = ("engine", "model")

    def startup(self, context: Context) -> None:
        if context["engine"] == EngineMode.SINGLE:
            for parameter in context["model"].parameters():
                torch.nn.init.zeros_(parameter)
        context["status"] = "train_pass"
        print(f"startup: reads engine ({context['engine'].name}), model; writes status (train_pass)")
