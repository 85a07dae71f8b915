"""Lightning's own checkpoint of a model that has made a step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer, __version__
from torch import nn

NAME = f"Lightning {__version__}'s save_checkpoint, no fsync"


class Module(LightningModule):
    """What its users write, around a model that is there already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """A loss that reaches every parameter."""
        return sum(each.mean() for each in self.model.parameters())  # type: ignore[return-value]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer whose state is saved too."""
        return torch.optim.AdamW(self.parameters())


def saver(model: nn.Module) -> Callable[[Path], None]:
    """What saves the model and its optimizer to a path."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(max_steps=1, accelerator="cpu", **off)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(Module(model), [torch.zeros(1)])
    return trainer.save_checkpoint
