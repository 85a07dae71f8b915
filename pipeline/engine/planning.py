"""How long the training is, for the learning rate schedules that depend on it."""

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


class PlannedLength(NamedTuple):
    """The length of the training for which schedules were planned.

    Attributes:
        batches: phase -> the batches of a pass.
        steps: phase -> the updates of the training; without phases whose schedules count epochs.
    """

    batches: dict[str, int]
    steps: dict[str, int]


def plan_schedules(runner: RunnerSchema, phases: list[PhaseSchema], context: Context, own: str = "") -> PlannedLength:
    """Say to each schedule that asks how long the training is, before the first step, how long it is.

    A debug run ends earlier, but it builds the schedules of the whole training. So it finds what is
    wrong with them, and trains with the rates of the first steps.

    Args:
        runner: what is trained.
        phases: its phases, in order.
        context: after network and startup.
        own: what of the user's decides how long it is; ``""``: the runner's keys and the data do.

    Returns:
        What the schedules were told.

    Raises:
        ConfigError: nobody knows; or a schedule would end before the training, or contradicts its length.
    """
    plan = PlannedLength({}, {})
    for phase in (phase for phase in phases if phase.model_of is None):
        for name, scheduler in context["model"][phase.name]["optim_schedulers"].items():
            if not isinstance(scheduler, PlannedSchedule):
                continue
            is_planned = scheduler.is_open and scheduler.per == "step"
            needed = own or _steps_needed(scheduler, phase, runner, phases, context)
            address = f"phase.{phase.name}.optim_schedulers.{name}"
            with faults_at(address, context["config"]):
                _plan(scheduler, needed)
            if is_planned and isinstance(needed, int):
                sharing = [own.name for own in phases if phase.name in (own.name, own.model_of)]
                plan.steps.update(dict.fromkeys(sharing, needed))
    if plan.steps:
        for phase in phases:
            loader = pass_loader(phase.dataset_name or "", runner, context)
            plan.batches[phase.name] = length(loader) or 0
    return plan


def _plan(scheduler: PlannedSchedule, needed: int | str) -> None:
    """Say to a schedule how many steps the training needs; a text is why nobody knows."""
    if isinstance(needed, str):
        if scheduler.is_open:
            raise ConfigError(f"nobody knows how many steps it has: {needed}; {_WRITE_STEPS}")
    elif scheduler.is_open:
        scheduler.take_length(needed)
    else:
        scheduler.check_length(needed)


_WRITE_STEPS = "give the runner max_steps, or write the schedule's total_steps, and warmup_steps as a number of steps"


def _steps_needed(
    schedule: PlannedSchedule, owner: PhaseSchema, runner: RunnerSchema, phases: list[PhaseSchema], context: Context
) -> int | str:
    """How many steps of the schedule the whole training takes; a text is why nobody knows."""
    models = context["model"]
    batches: dict[str, int | None] = {}
    for phase in phases:
        loader = pass_loader(phase.dataset_name or "", runner, context, ignore_debug=True)
        batches[phase.name] = length(loader)
    sharing = [phase.name for phase in phases if owner.name in (phase.name, phase.model_of)]
    for name in sharing:
        # One of the user's own makes as many steps as it likes.
        if not models[name]["updater"].is_plain(models[name]["brain"]):
            return f"phase '{name}' has an updater or a fit_batch of its own"
    unknown = [f"dataset.{phase.dataset_name} has no length" for phase in phases if batches[phase.name] is None]
    if unknown and len(phases) > 1:
        return unknown[0]
    # A single phase without a length is one pass that does not end.
    counts = {name: NEVER if count is None else count for name, count in batches.items()}
    windows = {phase.name: _window_of(models[phase.name]["optim_schedulers"].values()) for phase in phases}
    if runner.optimizer_step_limit and not all(windows.values()):
        return "the optimizers of a phase act after different numbers of batches"
    iterations = _iterations(runner, counts, windows)
    if iterations >= NEVER:
        return unknown[0] if unknown else "nothing that counts steps ends the training"
    whole, remaining = divmod(iterations, sum(counts.values()))
    passes, closed = {}, {}
    for name, count in counts.items():
        # The last epoch may be cut short.
        last = min(count, remaining)
        remaining -= last
        passes[name] = whole + bool(last)
        closed[name] = whole * -(-count // schedule.accum_grad) + -(-last // schedule.accum_grad)
    return max(passes[name] for name in sharing) if schedule.per == "epoch" else sum(closed[name] for name in sharing)


def _window_of(schedulers: Collection[WindowedOptimizer]) -> int:
    """The batches of an update of a phase: where one of its schedulers acts; 0 where they act at different batches."""
    windows = {scheduler.accum_grad for scheduler in schedulers}
    return windows.pop() if len(windows) == 1 and all(own.step_per_update == 1 for own in schedulers) else 0


def _iterations(runner: RunnerSchema, counts: Mapping[str, int], windows: Mapping[str, int]) -> int:
    """After how many iterations the runner's keys end the training; NEVER or more: nobody knows.

    Args:
        runner: has epochs, steps and updates.
        counts: phase -> the batches of one pass.
        windows: phase -> the batches of an update.
    """
    in_epoch, updates = sum(counts.values()), runner.optimizer_step_limit
    limits = [(runner.epochs or NEVER) * in_epoch, runner.max_steps or NEVER]
    if updates:
        whole, remaining = divmod(updates - 1, sum(-(-count // windows[name]) for name, count in counts.items()))
        limits.append(whole * in_epoch)
        # The last of them is made in this epoch, or ends with it.
        remaining += 1
        for name, count in counts.items():
            limits[-1] += min(remaining * windows[name], count)
            remaining -= min(remaining, -(-count // windows[name]))
    return min(limits)
