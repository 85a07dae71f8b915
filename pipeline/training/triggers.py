"""When something is due: every so many iterations, epochs or seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pipeline.config.schema import Interval, RunnerSchema, parse_intervals

# An iteration that no run reaches.
NEVER = 1 << 62

# Iterations that may pass between two checks of the clock.
LONGEST_STRIDE = 100

_SECONDS = {"second": 1, "minute": 60}


class Clock:
    """An interval of time, checked less often the faster iterations are.

    Args:
        seconds: its length.
        iteration: the iteration at which it starts.
    """

    def __init__(self, seconds: int, iteration: int) -> None:
        self.seconds, self.iteration, self.stride = seconds, iteration, 1
        self.fired_at = self.checked_at = time.monotonic()

    def fires(self, iteration: int) -> bool:
        """Whether the seconds have passed; the speed of the last iterations decides when to check again."""
        now = time.monotonic()
        due = now - self.fired_at >= self.seconds
        if due:
            self.fired_at = now
        remaining, elapsed = self.fired_at + self.seconds - now, now - self.checked_at
        # Half of the iterations that seem remaining, since later ones may be slower.
        likely = remaining * (iteration - self.iteration) / elapsed / 2 if elapsed > 0 else 1
        self.stride = max(1, min(LONGEST_STRIDE, int(likely)))
        self.checked_at, self.iteration = now, iteration
        return due


class Trigger:
    """Says when one thing is due: after any of its intervals.

    Args:
        intervals: the intervals; without any it is never due.
        iteration: the iteration from which it counts.
    """

    def __init__(self, intervals: Sequence[Interval], iteration: int = 0) -> None:
        self.intervals, self.iteration = intervals, iteration
        self.iterations = [length for length, unit in intervals if unit == "iteration"]
        self.epochs = [length for length, unit in intervals if unit == "epoch"]
        self.clocks = [Clock(length * _SECONDS[unit], iteration) for length, unit in intervals if unit in _SECONDS]

    def next_check(self) -> int:
        """The next iteration at which ``fires`` has to be called."""
        multiples = [(self.iteration // length + 1) * length for length in self.iterations]
        return min([*multiples, *(clock.iteration + clock.stride for clock in self.clocks)], default=NEVER)

    def fires(self, iteration: int) -> bool:
        """Whether it is due after an iteration; intervals of epochs never are."""
        due = [iteration // length > self.iteration // length for length in self.iterations]
        # All clocks are asked, since each keeps its own time.
        due += [clock.fires(iteration) for clock in self.clocks]
        self.iteration = iteration
        return any(due)

    def fires_after(self, epochs: int) -> bool:
        """Whether it is due after that many epochs."""
        return any(epochs % length == 0 for length in self.epochs)


class Schedule:
    """What is done during a training, and when: its intervals and limits.

    Args:
        iteration: the iteration from which the intervals count.
        intervals: of ``printing``, ``validating``, ``saving`` and ``exporting``; what is left out is never due.

    Attributes:
        printing, validating, saving, exporting: when each is due; exporting saves the weights alone.
        epochs, max_steps, max_updates: the limits; none at first.
    """

    def __init__(self, iteration: int, **intervals: Sequence[Interval]) -> None:
        self.printing, self.validating, self.saving, self.exporting = self._triggers = tuple(
            Trigger(intervals.get(name, ()), iteration) for name in ("printing", "validating", "saving", "exporting")
        )
        self._active = [trigger for trigger in self._triggers if trigger.intervals]
        self.epochs = self.max_steps = self.max_updates = NEVER

    @classmethod
    def of_runner(cls, runner: RunnerSchema, iteration: int) -> Schedule:
        """That of a runner of a config."""
        schedule = cls(
            iteration,
            printing=parse_intervals(runner.print_interval),
            validating=parse_intervals(runner.valid_interval),
            saving=parse_intervals(runner.save_interval),
            exporting=parse_intervals(runner.save_inference_interval, "epoch"),
        )
        schedule.epochs = min(runner.epochs or NEVER, runner.debug_epochs if runner.debug else NEVER)
        schedule.max_steps = runner.max_steps or NEVER
        schedule.max_updates = runner.optimizer_step_limit or NEVER
        return schedule

    def due(self, iteration: int) -> tuple[bool, ...]:
        """Whether to print, to validate, to save and to export after an iteration."""
        return tuple(trigger.fires(iteration) for trigger in self._triggers)

    def over(self, counters: Mapping[str, int]) -> bool:
        """Whether training has reached one of its limits."""
        ended = counters["epoch"] >= self.epochs or counters["iteration"] >= self.max_steps
        return ended or counters["update"] >= self.max_updates

    def next_check(self, counters: Mapping[str, int]) -> int:
        """The next iteration after which something may be due."""
        # An iteration makes one update at most.
        limit = counters["iteration"] + max(1, self.max_updates - counters["update"])
        return min(*(trigger.next_check() for trigger in self._active), self.max_steps, limit)
