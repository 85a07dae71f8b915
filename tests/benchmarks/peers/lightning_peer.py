"""The small job in Lightning, with everything off that can be."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer, __version__
from side_by_side import Clock
from small_job import cross_entropy, in_memory, model

NAME = f"Lightning {__version__}, everything off"


class Module(LightningModule):
    """What its users write."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.model = model()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss."""
        inputs, target = batch
        return cross_entropy(self.model(inputs), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        """The loop begins."""
        self.clock.start()

    def on_train_epoch_end(self) -> None:
        """The loop is over."""
        self.clock.stop()


def train(steps: int, clock: Clock) -> None:
    """Train."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with warnings.catch_warnings(action="ignore"):
        Trainer(max_epochs=1, accelerator="cpu", **off).fit(Module(clock), in_memory(steps))
