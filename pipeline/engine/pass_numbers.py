"""PassNumbers: what a training pass has come to so far, its loss and what was logged."""

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
        average: the mean loss if a Brain averages it itself, with SpeechBrain's ``update_average``; else None.
        nonfinite: the losses that are not finite, as a Brain itself counts them.
    """

    def __init__(self, count_samples: Callable[[], int], began: int = 0) -> None:
        self.loss = Meter()
        self.logged = Meters(count_samples)
        self.began = began
        self.average: float | None = None
        self.nonfinite = 0

    def replace(self, *, average: float | None = None, nonfinite: int | None = None) -> None:
        """Take numbers that a Brain has computed itself; None leaves a number as it is."""
        if average is not None:
            self.average = average
        if nonfinite is not None:
            self.nonfinite = nonfinite

    def mean_loss(self) -> float:
        """The mean loss so far as the Brain computes it, else ours; nan if there is none. On a GPU this waits."""
        return self.loss.mean() if self.average is None else self.average

    def nonfinite_losses(self) -> int:
        """How many losses were not finite so far; on a GPU this waits."""
        self.loss.read()
        return max(self.loss.nonfinite, self.nonfinite)

    def reported_loss(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Log all losses but the one named ``loss``, and return that one, or else their sum; detached."""
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
            where: what messages begin with.

        Raises:
            ConfigError: one that was logged has the name of another.
        """
        logged = self.logged.means()
        # If an updater returns nothing, there is no other loss than the one that it logs.
        for name in (name for name in logged if not math.isnan(numbers.get(name, math.nan))):
            replaced = f"{where}log('{name}', …) would replace the {'loss' if name == 'loss' else 'metric'}"
            raise ConfigError(f"{replaced} of the pass, which is reported by that name; give it another")
        return {**numbers, **logged}

    def gather(self, samples: int, world: World) -> int:
        """Make the numbers those of all ranks. All of them call it.

        Args:
            samples: any number of this rank.
            world: the ranks.

        Returns:
            The sum of ``samples`` of all ranks.
        """
        return count_together(self.loss, self.logged, samples, world)

    def check_divergence(self, guards: Sequence[NonFiniteGuard], patience: int, where: str) -> None:
        """Read the losses so far; on a GPU this waits.

        Args:
            guards: those of the optimizers.
            patience: how many losses and gradients may be other than finite.
            where: what messages begin with.

        Raises:
            DivergedError: there were more.
        """
        check_divergence(self.loss, guards, patience, where, self.began)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue; on a GPU this waits."""
        own = {"began": self.began, "average": self.average, "nonfinite": self.nonfinite}
        return {**own, "train_loss": self.loss.state_dict(), "logged": self.logged.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.began, self.average, self.nonfinite = state["began"], state["average"], state["nonfinite"]
        self.loss.load_state_dict(state["train_loss"])
        self.logged.load_state_dict(state["logged"])
