"""The training numbers of one pass: since the last print, and over the whole of it."""

from __future__ import annotations

import time

from pipeline.context import Context
from pipeline.training.brain import Brain


class Report:
    """Tells the plugins how training goes.

    Args:
        context: the run's.
        phase: the phase that is trained.
        brain: its Brain, which gathers the numbers.
    """

    def __init__(self, context: Context, phase: str, brain: Brain) -> None:
        self.context, self.phase, self.brain = context, phase, brain
        self.state: dict[str, int] = context["train_state"]
        self.since, self.samples = time.perf_counter(), self.state["samples"]

    def print(self) -> None:
        """Read the numbers since the last time: on a GPU this waits for the work so far."""
        numbers = {"loss": self.brain._pass_loss.recent(), **self.brain._pass_numbers.recent()}
        now, samples = time.perf_counter(), self.state["samples"]
        numbers["samples_per_second"] = (samples - self.samples) / (now - self.since)
        self.since, self.samples = now, samples
        self.context["hooks"].on_print_interval(context=self.context, phase=self.phase, metrics=numbers)
