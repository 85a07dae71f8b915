"""The first weights; written as PaddleRec's users write theirs."""

import torch

from pipeline import Context, EngineMode, StartupBase


class Startup(StartupBase):
    """Starts the model at zero."""

    reads = ("engine", "line")

    def startup(self, context: Context) -> None:
        if context["engine"] == EngineMode.SINGLE:
            for parameter in context["line"].parameters():
                torch.nn.init.zeros_(parameter)
        context["status"] = "train_pass"
        print(f"startup: reads engine ({context['engine'].name}), line; writes status (train_pass)")
