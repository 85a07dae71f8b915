"""What is due during a pass, and when to look next: one iteration for all of it."""

from __future__ import annotations

from pipeline.config.schema import RunnerSchema
from pipeline.config.values import Interval
from pipeline.training.triggers import NEVER, Triggers


class Agenda:
    """The intervals and limits of a runner.

    Args:
        runner: says how often.
        iteration: from which they count.

    Attributes:
        printing, validating, saving, exporting: the intervals of each; what is exported are the weights alone.
        epochs, max_steps, max_updates: the limits.
    """

    def __init__(self, runner: RunnerSchema, iteration: int) -> None:
        every = runner.print_interval
        self.printing = Triggers([Interval(every, "iteration")] if every else [], iteration)
        self.validating = Triggers(runner.valid_intervals, iteration)
        self.saving = Triggers(runner.intervals, iteration)
        self.exporting = Triggers(runner.inference_intervals, iteration)
        self.epochs = min(runner.epochs or NEVER, runner.debug_epochs if runner.debug else NEVER)
        self.max_steps = runner.max_steps or NEVER
        self.max_updates = runner.optimizer_step_limit or NEVER

    @property
    def _each(self) -> tuple[Triggers, Triggers, Triggers, Triggers]:
        return self.printing, self.validating, self.saving, self.exporting

    def due(self, iteration: int) -> tuple[bool, ...]:
        """Whether it is time to print, to validate, to save, to export; all are asked, since each keeps its own count."""
        return tuple(each.fires(iteration) for each in self._each)

    def over(self, state: dict[str, int]) -> bool:
        """Whether training has reached one of its limits."""
        ended = state["epoch"] >= self.epochs or state["iteration"] >= self.max_steps
        return ended or state["update"] >= self.max_updates

    def next_look(self, state: dict[str, int]) -> int:
        """The next iteration after which something may be due."""
        # An iteration makes one update at most.
        limit = state["iteration"] + max(1, self.max_updates - state["update"])
        return min(*(each.next_look() for each in self._each), self.max_steps, limit)
