"""What the network stage built for a phase; and what the keys of a runner mean for its passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeline.config.schema import PhaseSchema, RunnerSchema, too_short
from pipeline.context import ConfigView, Context, Phase, RunnerSettings
from pipeline.data.loader import LimitedLoader, length, overfit_batches
from pipeline.data.rng import mix, seed_generators
from pipeline.distributed.strategy import broadcast_tensors
from pipeline.distributed.world import current_world
from pipeline.engine.run_options import RunOptions
from pipeline.engine.triggers import NEVER
from pipeline.errors import ConfigError, ContextError, DataError, one_of
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.schedules import PlannedSchedule, TorchSchedule
from pipeline.user_code.tracebacks import error_context


def phase_of(name: str, context: Context) -> Phase:
    """``context["model"][name]``.

    Raises:
        ContextError: the network stage left no such entry.
    """
    entry = _entry_of(context, "model", name, "entry for phase")
    if not isinstance(entry, Mapping):
        keys = "{model, brain, optim_schedulers, updater}"
        raise ContextError(f"context['model']['{name}'] is a {type(entry).__name__}, not a dict; write {keys} there")
    return entry if isinstance(entry, Phase) else Phase(name, entry)


def _entry_of(context: Context, key: str, name: str, what: str) -> Any:
    """``context[key][name]``; ``what`` it is, for the message."""
    entries = context[key]
    if isinstance(entries, Mapping) and name in entries:
        return entries[name]
    known = one_of(name, map(str, entries)) if isinstance(entries, Mapping) else f"; it is a {type(entries).__name__}"
    raise ContextError(f"context['{key}'] has no {what} '{name}'{known}; the network stage has to write it")


def loader_of(dataset: str, context: Context) -> Any:
    """``context["dataset"][dataset]``.

    Raises:
        ContextError: the network stage left no such loader.
    """
    return _entry_of(context, "dataset", dataset, "loader")


@contextmanager
def phase_errors(name: str) -> Iterator[None]:
    """What is wrong with data, losses or options is reported with the phase in which it was found."""
    address = f"phase.{name}"
    with error_context(address):
        try:
            yield
        except (DataError, ConfigError) as error:
            if str(error).startswith("phase."):
                raise
            raise type(error)(f"{address}: {error}") from error


@contextmanager
def faults_at(address: str, config: ConfigView, arguments: str = "") -> Iterator[None]:
    """Say where in the config is what an OptimScheduler refuses; one of ``groups`` is among its ``arguments``, like ``optim_conf``."""
    try:
        yield
    except ConfigError as error:
        inside, _, message = str(error).partition(": ")
        if inside.startswith("groups."):
            address = f"{address}{arguments}.{inside}"
        elif inside == "optim_conf":
            # The keys of hyper_parameters.optimizer are the arguments of the optimizer.
            address = f"{address}{arguments}.{inside}" if arguments else address
        else:
            message = str(error)
        raise ConfigError(f"{config.origin(address)}: {address}: {message}") from error


# SpeechBrain's name of an option -> the runner's key, where they differ.
_KEYS = {
    "max_grad_norm": "grad_clip",
    "grad_accumulation_factor": "accum_grad",
    "skip_nonfinite_grads": "check_gradients",
}


def run_options_for(runner: RunnerSchema, device: torch.device) -> RunOptions:
    """The options of a Brain that a runner trains or evaluates.

    Raises:
        ConfigError: they contradict each other, or the device cannot do it.
    """
    keys = {name: _KEYS.get(name, name) for name in RunOptions.model_fields}
    options = {name: getattr(runner, key) for name, key in keys.items() if key in RunnerSchema.model_fields}
    try:
        return RunOptions(**{**options, "device": str(device)})
    except ConfigError as error:
        raise ConfigError(f"runner.{runner.name}: {error}") from error


def pass_loader(dataset: str, runner: RunnerSchema, context: Context, *, ignore_debug: bool = False) -> Any:
    """Return the batches of one pass over a dataset, as many as it and the runner allow.

    Args:
        dataset: its name.
        runner: whose pass it is.
        context: after the network stage.
        ignore_debug: whether to return the pass of the whole training, also in a debug run.
    """
    loader = loader_of(dataset, context)
    if runner.overfit_batches:
        loader = overfit_batches(loader, runner.overfit_batches)
    own_limit = context["config"].get(f"dataset.{dataset}.limit_batches")
    return limited(loader, runner, own_limit, ignore_debug=ignore_debug)


def limited(loader: Any, runner: RunnerSettings, own_limit: int | None = None, *, ignore_debug: bool = False) -> Any:
    """Limit a loader to its own ``limit_batches``, else the runner's, and to a debug run's."""
    is_debug = runner.debug and not ignore_debug
    limits = [own_limit or runner.limit_batches, runner.debug_batches if is_debug else None]
    most = min((limit for limit in limits if limit), default=0)
    return LimitedLoader(loader, most) if most else loader


def begin_on_ranks(modules: Iterable[nn.Module], seed: int | None) -> None:
    """Where several ranks train: all take the first weights of rank 0, and others than that draw numbers of their own.

    Args:
        modules: what is trained; a restore comes after it.
        seed: what rank 0 was seeded with; None: nothing.
    """
    world = current_world()
    if world.size > 1:
        broadcast_tensors([own for module in modules for own in (*module.parameters(), *module.buffers())], world)
    if world.rank:
        own = mix(torch.initial_seed() if seed is None else seed, world.rank)
        torch.manual_seed(own)
        seed_generators(own)


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
    elif isinstance(scheduler, TorchSchedule) and scheduler.steps is not None and needed > scheduler.steps:
        kind = scheduler.schedule_class.__name__
        raise ConfigError(too_short(kind, scheduler.steps, needed, per_epoch=scheduler.per == "epoch"))


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


def _window_of(schedulers: Collection[OptimScheduler]) -> int:
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
