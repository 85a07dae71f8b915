"""PassNumbers: the loss of a pass so far, and what was logged in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.errors import ConfigError
from pipeline.metrics.meters import Meter, Meters, count_together
from pipeline.optim.nonfinite import NonFiniteGuard, check_divergence


class PassNumbers:
    """The numbers of one pass.

    Args:
        count_samples: returns how many samples the active batch has.
        began: the iteration before the pass.

    Attributes:
        loss: the loss of each training batch.
        logged: what ``log`` was called with, by name.
        began: the iteration before the pass.
        average: the mean loss if a Brain averages it itself, with SpeechBrain's ``update_average``;
            otherwise None.
        nonfinite: how many losses were not finite, as a Brain itself counts them.
    """

    def __init__(self, count_samples: Callable[[], int], began: int = 0) -> None:
        self.loss = Meter()
        self.logged = Meters(count_samples)
        self.began = began
        self.average: float | None = None
        self.nonfinite = 0

    def replace(self, *, average: float | None = None, nonfinite: int | None = None) -> None:
        """Take numbers that a Brain has computed itself.

        Args:
            average: as the attribute; None leaves it as it is.
            nonfinite: as the attribute; None leaves it as it is.
        """
        if average is not None:
            self.average = average
        if nonfinite is not None:
            self.nonfinite = nonfinite

    def mean_loss(self) -> float:
        """Return the mean loss so far; nan if there is none.

        It is the mean that the Brain has computed, or else the mean of ``loss``. On a GPU this
        waits.
        """
        return self.loss.mean() if self.average is None else self.average

    def nonfinite_losses(self) -> int:
        """Return how many losses were not finite so far. On a GPU this waits."""
        self.loss.read()
        return max(self.loss.nonfinite, self.nonfinite)

    def reported_loss(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Log the losses, and return the one to report, detached.

        That is the loss named ``loss``, which is not logged. Without it, it is the sum of all.
        """
        for name in losses:
            if name != "loss":
                self.logged.log(name, losses[name])
        if "loss" in losses:
            return losses["loss"].detach()
        return torch.stack([loss.detach() for loss in losses.values()]).sum()

    def with_logged(self, numbers: Mapping[str, float], where: str) -> dict[str, float]:
        """Return the numbers of a pass together with those that were logged.

        Args:
            numbers: the loss and the metrics, by name.
            where: the start of messages.

        Raises:
            ConfigError: a number that was logged has the name of the loss or of a metric.
        """
        logged = self.logged.means()
        for name in logged:
            # If an updater returns nothing, the loss is nan, and the updater may log one.
            if not math.isnan(numbers.get(name, math.nan)):
                replaced = f"{where}log('{name}', …) would replace the {'loss' if name == 'loss' else 'metric'}"
                raise ConfigError(f"{replaced} of the pass, which is reported by that name; give it another")
        return {**numbers, **logged}

    def gather(self, samples: int, world: World) -> int:
        """Add up the numbers of all ranks. All ranks call it.

        Args:
            samples: a number of this rank that is added up with the others.
            world: the ranks.

        Returns:
            The sum of ``samples`` over all ranks.
        """
        return count_together(self.loss, self.logged, samples, world)

    def check_divergence(self, guards: Sequence[NonFiniteGuard], patience: int, where: str) -> None:
        """Read the losses so far, and raise if too many were not finite. On a GPU this waits.

        Args:
            guards: the guards of the optimizers.
            patience: how many losses and gradients may be non-finite.
            where: the start of messages.

        Raises:
            DivergedError: more than ``patience`` were not finite.
        """
        check_divergence(self.loss, guards, patience, where, self.began)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue. On a GPU this waits."""
        return {
            "began": self.began,
            "average": self.average,
            "nonfinite": self.nonfinite,
            "train_loss": self.loss.state_dict(),
            "logged": self.logged.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.began = state["began"]
        self.average = state["average"]
        self.nonfinite = state["nonfinite"]
        self.loss.load_state_dict(state["train_loss"])
        self.logged.load_state_dict(state["logged"])
