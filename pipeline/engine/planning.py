"""The length of the training, for learning rate schedules that depend on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.data.loader import length
from pipeline.engine.phase import faults_at, pass_loader
from pipeline.engine.triggers import NEVER
from pipeline.errors import ConfigError
from pipeline.optim.planned_schedule import PlannedSchedule
from pipeline.optim.windowed_optimizer import WindowedOptimizer

_WRITE_STEPS = "give the runner max_steps, or write the schedule's total_steps, and warmup_steps as a number of steps"


class PlannedLength(NamedTuple):
    """The length of the training for which schedules were planned.

    Attributes:
        batches: phase -> the batches of a pass.
        steps: phase -> the updates of the training; without phases whose schedules count epochs.
    """

    batches: dict[str, int]
    steps: dict[str, int]


def plan_schedules(runner: RunnerSchema, phases: list[PhaseSchema], context: Context, own: str = "") -> PlannedLength:
    """Give the length of the training to each schedule that depends on it, before the first step.

    A debug run ends earlier, but its schedules are planned for the whole training. So it finds the
    faults of the schedules, and trains with the rates of the first steps.

    Args:
        runner: the runner that trains.
        phases: the phases of the runner, in order.
        context: after the network and startup stages.
        own: the user code that decides how long the training is; ``""`` if the runner's keys and
            the data decide.

    Returns:
        The lengths that the schedules were given.

    Raises:
        ConfigError: a schedule needs the length and it is not known; or a schedule would end before
            the training, or contradicts its length.
    """
    plan = PlannedLength({}, {})
    for phase in phases:
        # A phase that trains the model of another one uses its optimizers.
        if phase.model_of is not None:
            continue
        for name, schedule in context["model"][phase.name]["optim_schedulers"].items():
            if not isinstance(schedule, PlannedSchedule):
                continue
            counts_steps = schedule.is_open and schedule.per == "step"
            needed = own or _steps_needed(schedule, phase, runner, phases, context)
            address = f"phase.{phase.name}.optim_schedulers.{name}"
            with faults_at(address, context["config"]):
                _plan(schedule, needed)
            if counts_steps and isinstance(needed, int):
                sharing = [other.name for other in phases if phase.name in (other.name, other.model_of)]
                plan.steps.update(dict.fromkeys(sharing, needed))
    if plan.steps:
        for phase in phases:
            loader = pass_loader(phase.dataset_name or "", runner, context)
            plan.batches[phase.name] = length(loader) or 0
    return plan


def _plan(schedule: PlannedSchedule, needed: int | str) -> None:
    """Give a schedule the steps of the training; a text says why they are not known."""
    if isinstance(needed, str):
        if schedule.is_open:
            raise ConfigError(f"nobody knows how many steps it has: {needed}; {_WRITE_STEPS}")
    elif schedule.is_open:
        schedule.take_length(needed)
    else:
        schedule.check_length(needed)


def _steps_needed(
    schedule: PlannedSchedule, owner: PhaseSchema, runner: RunnerSchema, phases: list[PhaseSchema], context: Context
) -> int | str:
    """Return how many steps of a schedule the whole training has.

    Args:
        schedule: counts windows or epochs.
        owner: the phase whose optimizer the schedule belongs to.
        runner: the runner that trains.
        phases: the phases of the runner, in order.
        context: after the network and startup stages.

    Returns:
        A text if it is not known, which says why.
    """
    models = context["model"]
    batches: dict[str, int | None] = {}
    for phase in phases:
        loader = pass_loader(phase.dataset_name or "", runner, context, ignore_debug=True)
        batches[phase.name] = length(loader)
    sharing = [phase.name for phase in phases if owner.name in (phase.name, phase.model_of)]
    for name in sharing:
        # User code may make any number of steps per batch.
        if not models[name]["updater"].is_plain(models[name]["brain"]):
            return f"phase '{name}' has an updater or a fit_batch of its own"
    unknown = [f"dataset.{phase.dataset_name} has no length" for phase in phases if batches[phase.name] is None]
    if unknown and len(phases) > 1:
        return unknown[0]
    # The pass of a single phase without a length does not end.
    counts = {name: NEVER if count is None else count for name, count in batches.items()}
    windows = {phase.name: _window_of(models[phase.name]["optim_schedulers"].values()) for phase in phases}
    if runner.optimizer_step_limit and not all(windows.values()):
        return "the optimizers of a phase act after different numbers of batches"
    iterations = _iterations(runner, counts, windows)
    if iterations >= NEVER:
        return unknown[0] if unknown else "nothing that counts steps ends the training"
    whole_epochs, remaining = divmod(iterations, sum(counts.values()))
    passes: dict[str, int] = {}
    closed_windows: dict[str, int] = {}
    for name, count in counts.items():
        # The last epoch may be cut short.
        last_pass = min(count, remaining)
        remaining -= last_pass
        passes[name] = whole_epochs + bool(last_pass)
        per_pass = _rounded_up(count, schedule.accum_grad)
        closed_windows[name] = whole_epochs * per_pass + _rounded_up(last_pass, schedule.accum_grad)
    if schedule.per == "epoch":
        return max(passes[name] for name in sharing)
    return sum(closed_windows[name] for name in sharing)


def _window_of(optimizers: Collection[WindowedOptimizer]) -> int:
    """Return the batches of an update of a phase; 0 if its optimizers act at different batches."""
    windows = {optimizer.accum_grad for optimizer in optimizers}
    act_together = len(windows) == 1 and all(optimizer.step_per_update == 1 for optimizer in optimizers)
    return windows.pop() if act_together else 0


def _iterations(runner: RunnerSchema, counts: Mapping[str, int], windows: Mapping[str, int]) -> int:
    """Return after how many iterations the runner's keys end the training.

    Args:
        runner: limits epochs, iterations and updates.
        counts: phase -> the batches of one pass.
        windows: phase -> the batches of an update.

    Returns:
        NEVER or more if it is not known.
    """
    in_epoch = sum(counts.values())
    limits = [(runner.epochs or NEVER) * in_epoch, runner.max_steps or NEVER]
    if runner.optimizer_step_limit:
        updates_in_epoch = sum(_rounded_up(count, windows[name]) for name, count in counts.items())
        whole_epochs, remaining = divmod(runner.optimizer_step_limit - 1, updates_in_epoch)
        limit = whole_epochs * in_epoch
        # The last update is made in the epoch after these, at the latest with its last batch.
        remaining += 1
        for name, count in counts.items():
            limit += min(remaining * windows[name], count)
            remaining -= min(remaining, _rounded_up(count, windows[name]))
        limits.append(limit)
    return min(limits)


def _rounded_up(batches: int, window: int) -> int:
    """Return how many windows some batches close in a pass, whose end closes the last window."""
    return -(-batches // window)
