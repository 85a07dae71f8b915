"""Triggers: after iterations, updates, epochs or seconds, or when a number gets better."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import START, Interval, Intervals, RunnerSchema, parse_intervals, seconds_of, time_is_over
from pipeline.context import Context
from pipeline.errors import ConfigError, DataError, one_of

if TYPE_CHECKING:
    from pipeline.checkpoint.reader import LoadedCheckpoint
    from pipeline.distributed.agreement import Agreement

# An iteration that no run reaches.
NEVER = 1 << 62

# The most iterations between two checks of the clock.
LONGEST_STRIDE = 100


class Schedule:
    """What is done during a training, and when: its intervals and limits.

    Args:
        counters: the counters of the training, from which the intervals count.
        epochs: the limit of epochs; ``NEVER`` or more stands for no limit.
        max_steps: the limit of iterations; ``NEVER`` or more stands for no limit.
        max_updates: the limit of updates; ``NEVER`` or more stands for no limit.
        time_limit: the limit of the time; None stands for no limit.
        intervals: the intervals of ``printing``, ``validating``, ``saving`` and ``exporting``. What
            is left out is never scheduled.

    Attributes:
        printing: when numbers are printed.
        validating: when the phases are validated.
        saving: when checkpoints are saved.
        exporting: when the weights alone are saved.
        time_limit: the limit of the time; None if there is none.
    """

    def __init__(
        self,
        counters: Mapping[str, int],
        *,
        epochs: int = NEVER,
        max_steps: int = NEVER,
        max_updates: int = NEVER,
        time_limit: TimeLimit | None = None,
        **intervals: Sequence[Interval],
    ) -> None:
        self.printing = IntervalTrigger(intervals.get("printing", ()), counters)
        self.validating = IntervalTrigger(intervals.get("validating", ()), counters)
        self.saving = IntervalTrigger(intervals.get("saving", ()), counters)
        self.exporting = IntervalTrigger(intervals.get("exporting", ()), counters)
        self.epochs = epochs
        self.max_steps = max_steps
        self.max_updates = max_updates
        self.time_limit = time_limit
        self._triggers = (self.printing, self.validating, self.saving, self.exporting)
        self._active = [trigger for trigger in self._triggers if trigger.intervals]

    @classmethod
    def of_runner(cls, runner: RunnerSchema, counters: Mapping[str, int]) -> Schedule:
        """Return the schedule that the keys of a runner describe.

        Args:
            runner: the settings of the runner.
            counters: the counters of the training.
        """
        return cls(
            counters,
            epochs=min(runner.epochs or NEVER, runner.debug_epochs if runner.debug else NEVER),
            max_steps=runner.max_steps or NEVER,
            max_updates=runner.optimizer_step_limit or NEVER,
            printing=parse_intervals(runner.print_interval),
            validating=parse_intervals(runner.valid_interval, starts=True),
            saving=parse_intervals(runner.save_interval),
            exporting=parse_intervals(runner.save_inference_interval, "epoch"),
        )

    def due(self, counters: Mapping[str, int]) -> tuple[bool, ...]:
        """Return whether to print, to validate, to save and to export after an iteration.

        If the time is over, this stops the training.
        """
        if self.time_limit:
            self.time_limit.check()
        return tuple(bool(trigger.intervals) and trigger.fires(counters) for trigger in self._triggers)

    def over(self, counters: Mapping[str, int]) -> bool:
        """Return whether training has reached a limit of epochs, iterations or updates."""
        return (
            counters["epoch"] >= self.epochs
            or counters["iteration"] >= self.max_steps
            or counters["update"] >= self.max_updates
        )

    def next_check(self, counters: Mapping[str, int], agreement: Agreement | None = None) -> int:
        """Return the next iteration after which something may be scheduled.

        Args:
            counters: the counters of the training.
            agreement: the agreement of the ranks; None if there is one process. With it, the clocks
                are checked when the ranks agree, and not before.
        """
        # An iteration makes one update at most.
        update_limit = counters["iteration"] + max(1, self.max_updates - counters["update"])
        checks = [trigger.next_check(counters, timed=agreement is None) for trigger in self._active]
        checks += [self.max_steps, update_limit]
        if agreement is not None:
            checks.append(agreement.next)
        elif self.time_limit:
            checks.append(self.time_limit.iteration + self.time_limit.stride)
        return min(checks)

    def asked_updates(self) -> int | None:
        """Return the number of updates at the last call of ``due``.

        If no interval counts updates, it is None.
        """
        units = [unit for trigger in self._active for _, unit in trigger.intervals]
        return self.saving.last_counters["update"] if "update" in units else None

    def limit_time(self, max_time: str | None, context: Context, resumed: LoadedCheckpoint | None) -> None:
        """Limit the time from now on.

        Args:
            max_time: such as ``2 hour``; None stands for no limit.
            context: the context of the training.
            resumed: the checkpoint from which it continues.
        """
        if max_time is not None:
            spent = resumed.state.seconds if resumed and resumed.state else None
            self.time_limit = TimeLimit(max_time, spent or 0.0, context)


class Trigger:
    """Says in a hook of a plugin when to do something.

    It fires after an interval, or when a number has improved.

    ``fires`` compares with its last call. So it does not matter which hook calls it, and it returns
    True once for what has happened since then. The plugin keeps the ``state_dict`` of the trigger
    in its own::

        def __init__(self, every="100 iteration"):
            self.trigger = Trigger(every)

        @hookimpl
        def after_batch(self, context):
            if self.trigger.fires(context):
                ...

    An epoch is counted when ``after_epoch`` is called. After a resume everything continues as in an
    unbroken run. Intervals of seconds and minutes continue from the time that was counted.

    Args:
        intervals: as a runner's ``save_interval``: ``100`` (iterations), ``"5 update"``,
            ``"2 epoch"``, ``"10 minute"``, or a list of these; it fires after any of them. None
            stands for never.
        improves: a number of ``context["metrics"]`` as ``keep_best`` names it, such as
            ``valid_loss``; if multiple phases report it, ``phase.valid_loss``. The trigger fires as
            well when this number is better than the best before; a number that is nan is not.
        mode: ``min`` if lower numbers are better, ``max`` if higher ones are.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(self, intervals: Intervals = None, *, improves: str | None = None, mode: str = "min") -> None:
        if mode not in {"min", "max"}:
            raise ConfigError(f"Trigger: mode is {mode!r}; write min or max")
        try:
            parsed = parse_intervals(intervals)
        except ValueError as error:
            raise ConfigError(f"Trigger: {error}") from error
        self.improves = improves
        self.mode = mode
        zeros = {"iteration": 0, "update": 0, "epoch": 0}
        self._intervals = IntervalTrigger(parsed, zeros, tuple(zeros))
        # The best number so far, with a minus sign if the highest number is the best.
        self._least = math.inf

    def fires(self, context: Context) -> bool:
        """Return whether an interval has ended or the number has improved since the last call.

        Raises:
            DataError: multiple phases report the number, or none does.
        """
        improved = self.improves is not None and self._improved(self.improves, context)
        return self._intervals.fires(context.peek("train_state")) or improved

    def state_dict(self) -> dict[str, Any]:
        """Return what the trigger has counted, and the best number so far."""
        seconds = [time.monotonic() - clock.fired_at for clock in self._intervals.clocks]
        best = {f"{self.mode} {self.improves}": self._least}
        return {**self._intervals.last_counters, "seconds": seconds, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._intervals.load(state, state["seconds"])
        self._least = state["best"].get(f"{self.mode} {self.improves}", math.inf)

    def _improved(self, metric: str, context: Context) -> bool:
        metrics: Mapping[str, Mapping[str, float]] = context.peek("metrics", {})
        values = {(phase, name): value for phase, numbers in metrics.items() for name, value in numbers.items()}
        named = [(phase, name) for phase, name in values if metric in {name, f"{phase}.{name}"}]
        if len(named) > 1:
            which = " or ".join(map(".".join, named))
            raise DataError(f"Trigger watches '{metric}', which several phases report; write {which}")
        # What an experiment or an infer runner will report is not known.
        phases = () if context.peek("is_infer") else context.peek("phases")
        complete = [_is_complete(phase, metrics.get(phase["name"], {})) for phase in phases]
        if not named and complete and all(complete):
            known = one_of(metric, {name for _, name in values})
            raise DataError(f"Trigger watches '{metric}', which no phase reports{known}")
        value = float(values[named[0]]) if named else math.nan
        if self.mode == "max":
            value = -value
        improved = value < self._least
        self._least = min(self._least, value)
        return improved


def _is_complete(phase: Mapping[str, Any], numbers: Mapping[str, float]) -> bool:
    """Return whether a phase has reported all its numbers.

    They are the numbers of a training pass, and of a validation if the phase has validation data.
    """
    if "loss" not in numbers:
        return False
    datasets = phase.get("valid_dataset_name")
    if not datasets:
        return True
    names = datasets if isinstance(datasets, list) else ()
    prefixes = "valid_", *(f"{dataset}/" for dataset in names)
    return any(name.startswith(prefixes) for name in numbers)


class IntervalTrigger:
    """Says when one thing is done: after any of its intervals.

    Args:
        intervals: the intervals; without any it never fires.
        counters: the counters from which it counts.
        units: the counters that ``fires`` reads.

    Attributes:
        last_counters: the counters at the last call of ``fires``.
        starts: whether the thing is done before the first step, too.
    """

    def __init__(
        self, intervals: Sequence[Interval], counters: Mapping[str, int], units: Sequence[str] = ("iteration", "update")
    ) -> None:
        self.intervals = intervals
        self.last_counters = {unit: counters[unit] for unit in units}
        self.counted = [interval for interval in intervals if interval.unit in units]
        self.epochs = [length for length, unit in intervals if unit == "epoch"]
        self.starts = any(unit == START for _, unit in intervals)
        self.clocks = [Clock(interval.seconds, counters["iteration"]) for interval in intervals if interval.seconds]

    def next_check(self, counters: Mapping[str, int], *, timed: bool = True) -> int:
        """Return the next iteration at which ``fires`` has to be called.

        Args:
            counters: the counters of the training.
            timed: whether intervals of time are included.
        """
        # An iteration makes one update at most.
        remaining = [
            (self.last_counters[unit] // length + 1) * length - counters[unit] for length, unit in self.counted
        ]
        checks = [counters["iteration"] + max(0, count) for count in remaining]
        if timed:
            checks += [clock.iteration + clock.stride for clock in self.clocks]
        return min(checks, default=NEVER)

    def fires(self, counters: Mapping[str, int]) -> bool:
        """Return whether an interval has ended since the last call.

        Intervals of epochs only count here if ``epoch`` is one of the units.
        """
        ended = [counters[unit] // length > self.last_counters[unit] // length for length, unit in self.counted]
        # Each clock has to be read, even if an interval has ended already.
        ended += [clock.fires(counters["iteration"]) for clock in self.clocks]
        self.last_counters = {unit: counters[unit] for unit in self.last_counters}
        return any(ended)

    def fires_after(self, epochs: int) -> bool:
        """Return whether an interval ends after a number of epochs."""
        return any(epochs % length == 0 for length in self.epochs)

    def load(self, counters: Mapping[str, int], seconds: Sequence[float]) -> None:
        """Continue from a state.

        Args:
            counters: the counters at the last call of ``fires``.
            seconds: for each clock, the seconds that it has counted.
        """
        self.last_counters = {unit: counters[unit] for unit in self.last_counters}
        for clock, counted in zip(self.clocks, seconds, strict=False):
            clock.fired_at = time.monotonic() - counted


class Clock:
    """An interval of time. The faster iterations are, the less often it is checked.

    Args:
        seconds: its length.
        iteration: the iteration at which it starts.
    """

    def __init__(self, seconds: int, iteration: int) -> None:
        now = time.monotonic()
        self.seconds = seconds
        self.iteration = iteration
        self.stride = 1
        self.fired_at = now
        self.checked_at = now

    def fires(self, iteration: int) -> bool:
        """Return whether the seconds have passed.

        The speed of the last iterations decides when to check again.
        """
        now = time.monotonic()
        is_over = now - self.fired_at >= self.seconds
        if is_over:
            self.fired_at = now
        remaining = self.fired_at + self.seconds - now
        elapsed = now - self.checked_at
        # Half of the iterations that seem to remain, since later ones may be slower.
        likely = remaining * (iteration - self.iteration) / elapsed / 2 if elapsed > 0 else 1
        self.stride = max(1, min(LONGEST_STRIDE, int(likely)))
        self.checked_at = now
        self.iteration = iteration
        return is_over


class TimeLimit(Clock):
    """A runner's ``max_time``: the time that its runner stage may take.

    The time is counted over all parts of a resumed run. If the time is over already, the training is stopped at once.

    Args:
        length: such as ``2 hour``.
        spent: the seconds that earlier parts of a resumed run have taken.
        context: the context of the training, whose ``stop`` ends it.
    """

    def __init__(self, length: str, spent: float, context: Context) -> None:
        super().__init__(seconds_of(length), context["train_state"]["iteration"])
        self.context = context
        self.reason = time_is_over(length)
        self.fired_at -= spent
        self.started_at = self.fired_at
        self.check()

    def check(self) -> None:
        """Stop the training if its time is over."""
        if self.fires(self.context.peek("train_state")["iteration"]):
            self.context.stop(self.reason)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the spent time, and why the training was stopped.

        A stop at the end of the time is left out, since a resumed run may have more time.
        """
        why = self.context.stop_reason
        return {"seconds": time.monotonic() - self.started_at, "stopped": None if why == self.reason else why}
