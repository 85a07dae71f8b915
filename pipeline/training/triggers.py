"""When something is due: every so many iterations, epochs, seconds or minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.config.values import Interval

NEVER = 1 << 62
"""An iteration that no run reaches."""


class Trigger:
    """Says when an interval has passed.

    Args:
        interval: its length.
        iteration: the iteration from which it counts.
    """

    def __init__(self, interval: Interval, iteration: int = 0) -> None:
        self.interval = interval
        self.seconds = interval.length * {"second": 1, "minute": 60}.get(interval.unit, 0)
        self.since = time.monotonic()
        self.passed = iteration

    def next_look(self) -> int:
        """The next iteration at which it must be asked. Time passes at every iteration; epochs end elsewhere."""
        if self.interval.unit == "iteration":
            return (self.passed // self.interval.length + 1) * self.interval.length
        return self.passed + 1 if self.seconds else NEVER

    def fires(self, iteration: int) -> bool:
        """Whether it is due after ``iteration`` iterations."""
        due = iteration >= self.next_look() if not self.seconds else time.monotonic() - self.since >= self.seconds
        self.passed = iteration
        if due and self.seconds:
            self.since = time.monotonic()
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
