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
        printing, validating, saving: the intervals of each.
    """

    def __init__(self, runner: RunnerSchema, iteration: int) -> None:
        every = runner.print_interval
        self.printing = Triggers([Interval(every, "iteration")] if every else [], iteration)
        self.validating = Triggers(runner.valid_intervals, iteration)
        self.saving = Triggers(runner.intervals, iteration)
        self.max_steps = runner.max_steps or NEVER
        self.max_updates = runner.optimizer_step_limit or NEVER

    def due(self, iteration: int) -> tuple[bool, bool, bool]:
        """Whether it is time to print, to validate, to save; all are asked, since each keeps its own count."""
        return self.printing.fires(iteration), self.validating.fires(iteration), self.saving.fires(iteration)

    def over(self, state: dict[str, int]) -> bool:
        """Whether training has reached one of its limits."""
        return state["iteration"] >= self.max_steps or state["update"] >= self.max_updates

    def next_look(self, state: dict[str, int]) -> int:
        """The next iteration after which something may be due."""
        # An iteration makes one update at most.
        limit = state["iteration"] + max(1, self.max_updates - state["update"])
        each = (self.printing.next_look(), self.validating.next_look(), self.saving.next_look())
        return min(*each, self.max_steps, limit)
