"""When something is due: every so many iterations, epochs, seconds or minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.config.values import Interval

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
