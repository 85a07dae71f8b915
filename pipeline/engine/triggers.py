"""When something is due: every so many iterations, updates, epochs or seconds, or when a number gets better."""

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

# Iterations that may pass between two checks of the clock.
LONGEST_STRIDE = 100


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


class TimeLimit(Clock):
    """A runner's ``max_time``: the time that its runner stage may take, over all parts of a resumed run.

    Args:
        length: such as ``2 hour``.
        spent: the seconds that are over, of a resumed run.
        context: whose training it ends, with ``stop``; at once where the time is over.
    """

    def __init__(self, length: str, spent: float, context: Context) -> None:
        super().__init__(seconds_of(length), context["train_state"]["iteration"])
        self.context, self.reason = context, time_is_over(length)
        self.began = self.fired_at = self.fired_at - spent
        self.check()

    def check(self) -> None:
        """End the training, if its time is over."""
        if self.fires(self.context.peek("train_state")["iteration"]):
            self.context.stop(self.reason)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the time, and no ``stop`` for its sake, as a resumed run may have more of it."""
        why = self.context.stop_reason
        return {"seconds": time.monotonic() - self.began, "stopped": None if why == self.reason else why}


class IntervalTrigger:
    """Says when one thing is due: after any of its intervals.

    Args:
        intervals: the intervals; without any it is never due.
        counters: from which it counts.
        units: those of the counters that ``fires`` looks at.

    Attributes:
        asked: the counters when it was last asked.
        starts: whether it is due before the first step, too.
    """

    def __init__(
        self, intervals: Sequence[Interval], counters: Mapping[str, int], units: Sequence[str] = ("iteration", "update")
    ) -> None:
        self.intervals, self.asked = intervals, {unit: counters[unit] for unit in units}
        self.counted = [interval for interval in intervals if interval.unit in units]
        self.epochs = [length for length, unit in intervals if unit == "epoch"]
        self.starts = any(unit == START for _, unit in intervals)
        self.clocks = [Clock(own.seconds, counters["iteration"]) for own in intervals if own.seconds]

    def next_check(self, counters: Mapping[str, int], *, timed: bool = True) -> int:
        """The next iteration at which ``fires`` has to be called; without ``timed``, intervals of time are left out."""
        # An iteration makes one update at most.
        remaining = [(self.asked[unit] // length + 1) * length - counters[unit] for length, unit in self.counted]
        counted = [counters["iteration"] + max(0, count) for count in remaining]
        clocks = self.clocks if timed else ()
        return min([*counted, *(clock.iteration + clock.stride for clock in clocks)], default=NEVER)

    def fires(self, counters: Mapping[str, int]) -> bool:
        """Whether it is due after an iteration; of epochs only with ``epoch`` among its units."""
        due = [counters[unit] // length > self.asked[unit] // length for length, unit in self.counted]
        # All clocks are asked, since each keeps its own time.
        due += [clock.fires(counters["iteration"]) for clock in self.clocks]
        self.asked = {unit: counters[unit] for unit in self.asked}
        return any(due)

    def fires_after(self, epochs: int) -> bool:
        """Whether it is due after that many epochs."""
        return any(epochs % length == 0 for length in self.epochs)


class Trigger:
    """Says in a hook of a plugin whether something is due: every so often, or when a number has become better.

    It compares with the last time that it was asked, so whichever hook asks, what is crossed is said once. The plugin keeps
    its ``state_dict`` in its own::

        def __init__(self, every="100 iteration"):
            self.trigger = Trigger(every)

        @hookimpl
        def after_batch(self, context):
            if self.trigger.fires(context):
                ...

    Epochs are counted when ``after_epoch`` is called. After a resume everything goes on as if there had been none; of seconds
    and minutes, those go on that were counted.

    Args:
        intervals: as a runner's ``save_interval``: ``100`` (iterations), ``"5 update"``, ``"2 epoch"``, ``"10 minute"``,
            a list of these; it fires after any of them. None: never.
        improves: a number of ``context["metrics"]`` as ``keep_best`` names it, such as ``valid_loss``; where several phases
            report it, ``phase.valid_loss``. It fires too when the number is better than the best before; nan is not.
        mode: ``min`` or ``max``: which is better.

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
        self.improves, self.mode = improves, mode
        zeros = {"iteration": 0, "update": 0, "epoch": 0}
        self._every = IntervalTrigger(parsed, zeros, tuple(zeros))
        # The best number, negative where the highest is the best.
        self._least = math.inf

    def fires(self, context: Context) -> bool:
        """Whether it is due since the last time that it was asked.

        Raises:
            DataError: several phases report the number, or none does.
        """
        improved = self.improves is not None and self._improved(self.improves, context)
        return self._every.fires(context.peek("train_state")) or improved

    def _improved(self, metric: str, context: Context) -> bool:
        metrics: Mapping[str, Mapping[str, float]] = context.peek("metrics", {})
        values = {(phase, name): value for phase, numbers in metrics.items() for name, value in numbers.items()}
        named = [(phase, name) for phase, name in values if metric in {name, f"{phase}.{name}"}]
        if len(named) > 1:
            which = " or ".join(map(".".join, named))
            raise DataError(f"Trigger watches '{metric}', which several phases report; write {which}")
        # Of an experiment, and of an infer runner, it is not known what they report.
        phases = () if context.peek("is_infer") else context.peek("phases")
        complete = [_is_complete(phase, metrics.get(phase["name"], {})) for phase in phases]
        if not named and complete and all(complete):
            known = one_of(metric, {name for _, name in values})
            raise DataError(f"Trigger watches '{metric}', which no phase reports{known}")
        value = float(values[named[0]] if named else math.nan) * (-1 if self.mode == "max" else 1)
        improved = value < self._least
        self._least = min(self._least, value)
        return improved

    def state_dict(self) -> dict[str, Any]:
        """What it has counted, and the best number so far."""
        seconds = [time.monotonic() - clock.fired_at for clock in self._every.clocks]
        return {**self._every.asked, "seconds": seconds, "best": {f"{self.mode} {self.improves}": self._least}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``."""
        self._every.asked = {unit: state[unit] for unit in self._every.asked}
        for clock, seconds in zip(self._every.clocks, state["seconds"], strict=False):
            clock.fired_at = time.monotonic() - seconds
        self._least = state["best"].get(f"{self.mode} {self.improves}", math.inf)


def _is_complete(phase: Mapping[str, Any], numbers: Mapping[str, float]) -> bool:
    """Whether the numbers are those of a pass of training, and of a validation where there is one."""
    datasets = phase.get("valid_dataset_name")
    of_validation = "valid_", *(f"{dataset}/" for dataset in (datasets if isinstance(datasets, list) else ()))
    return "loss" in numbers and (not datasets or any(name.startswith(of_validation) for name in numbers))


class Schedule:
    """What is done during a training, and when: its intervals and limits.

    Args:
        counters: of the training, from which the intervals count.
        epochs, max_steps, max_updates: the limits; ``NEVER`` or more: there is none.
        time_limit: that of the time; None: there is none.
        intervals: of ``printing``, ``validating``, ``saving`` and ``exporting``; what is left out is never due.

    Attributes:
        printing, validating, saving, exporting: when each is due; exporting saves the weights alone.
        time_limit: that of the time; None: there is none.
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
        names = ("printing", "validating", "saving", "exporting")
        self._triggers = tuple(IntervalTrigger(intervals.get(name, ()), counters) for name in names)
        self.printing, self.validating, self.saving, self.exporting = self._triggers
        self._active = [trigger for trigger in self._triggers if trigger.intervals]
        self.epochs, self.max_steps, self.max_updates = epochs, max_steps, max_updates
        self.time_limit = time_limit

    @classmethod
    def of_runner(cls, runner: RunnerSchema, counters: Mapping[str, int]) -> Schedule:
        """That of a runner of a config."""
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
        """Whether to print, to validate, to save and to export after an iteration; the time limit stops the training."""
        if self.time_limit:
            self.time_limit.check()
        return tuple(bool(trigger.intervals) and trigger.fires(counters) for trigger in self._triggers)

    def over(self, counters: Mapping[str, int]) -> bool:
        """Whether training has reached one of its limits."""
        ended = counters["epoch"] >= self.epochs or counters["iteration"] >= self.max_steps
        return ended or counters["update"] >= self.max_updates

    def next_check(self, counters: Mapping[str, int], agreement: Agreement | None = None) -> int:
        """The next iteration after which something may be due; intervals of time are for the looks of an agreement."""
        # An iteration makes one update at most.
        limit = counters["iteration"] + max(1, self.max_updates - counters["update"])
        clock = self.time_limit.iteration + self.time_limit.stride if self.time_limit else NEVER
        checks = (trigger.next_check(counters, timed=agreement is None) for trigger in self._active)
        return min(*checks, self.max_steps, limit, clock if agreement is None else agreement.next)

    def asked_updates(self) -> int | None:
        """The updates when it was last asked what is due; None where nothing is due after so many updates."""
        units = [unit for trigger in self._active for _, unit in trigger.intervals]
        return self.saving.asked["update"] if "update" in units else None

    def limit_time(self, max_time: str | None, context: Context, resumed: LoadedCheckpoint | None) -> None:
        """Limit the time from now on.

        Args:
            max_time: such as ``2 hour``; None: there is no limit.
            context: of the training.
            resumed: the checkpoint from which it continues.
        """
        if max_time is not None:
            spent = resumed.state.seconds if resumed and resumed.state else None
            self.time_limit = TimeLimit(max_time, spent or 0.0, context)
