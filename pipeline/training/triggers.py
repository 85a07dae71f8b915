"""When something is due: every so many iterations, updates, epochs or seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.config.schema import Interval, RunnerSchema

NEVER = 1 << 62

"""An iteration that no run reaches."""

LONGEST_STRIDE = 100

"""Iterations that may pass between two looks at the clock."""


class Trigger:
    """Says when an interval has passed.

    Args:
        interval: its length.
        iteration: the iteration from which it counts.
    """

    def __init__(self, interval: Interval, iteration: int = 0) -> None:
        self.interval = interval
        self.seconds = interval.length * {"second": 1, "minute": 60}.get(interval.unit, 0)
        self.since = self.looked = time.monotonic()
        self.passed = iteration
        self.stride = 1

    def next_look(self) -> int:
        """The next iteration at which it must be asked. Epochs end elsewhere."""
        if self.interval.unit == "iteration":
            return (self.passed // self.interval.length + 1) * self.interval.length
        return self.passed + self.stride if self.seconds else NEVER

    def fires(self, iteration: int) -> bool:
        """Whether it is due after ``iteration`` iterations."""
        if self.seconds:
            return self._fires_by_the_clock(iteration)
        due = iteration >= self.next_look()
        self.passed = iteration
        return due

    def _fires_by_the_clock(self, iteration: int) -> bool:
        """Whether the seconds are over; when to look again is told by how long the last iterations took."""
        now = time.monotonic()
        due = now - self.since >= self.seconds
        if due:
            self.since = now
        left, took = self.since + self.seconds - now, now - self.looked
        # Half of what seems left, since iterations may become slower, and not so many that it would matter.
        likely = left * (iteration - self.passed) / took / 2 if took > 0 else 1
        self.stride = max(1, min(LONGEST_STRIDE, int(likely)))
        self.looked, self.passed = now, iteration
        return due

    def fires_after(self, epochs: int) -> bool:
        """Whether it is due after that many epochs."""
        return self.interval.unit == "epoch" and epochs % self.interval.length == 0


class Triggers:
    """Several intervals for one thing: it is due when any of them is."""

    def __init__(self, intervals: Sequence[Interval], iteration: int = 0) -> None:
        self.each = [Trigger(interval, iteration) for interval in intervals]

    def next_look(self) -> int:
        """The next iteration at which one of them must be asked."""
        return min((trigger.next_look() for trigger in self.each), default=NEVER)

    def fires(self, iteration: int) -> bool:
        """Whether one of them is due; all are asked, since each keeps its own count."""
        fired = [trigger.fires(iteration) for trigger in self.each]
        return any(fired)

    def fires_after(self, epochs: int) -> bool:
        """Whether one of them is due after that many epochs."""
        return any(trigger.fires_after(epochs) for trigger in self.each)


class Schedule:
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
