"""Whether the schedules of a training are as long as it is, where its data say how long that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.checks.scheduler_check import too_short
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.errors import ConfigError
from pipeline.training.configured import pass_loader
from pipeline.training.passes import length
from pipeline.training.schedules import TorchSchedule
from pipeline.training.triggers import NEVER
from pipeline.training.updates import is_plain


def refuse_short_schedules(runner: RunnerSchema, phases: list[PhaseSchema], epochs: int, context: Context) -> None:
    """Before the first step: a schedule of torch's that would be over before the training is.

    Args:
        runner: what is trained.
        phases: its phases, in order.
        epochs: after which training ends at the latest.
        context: after network and startup.

    Raises:
        ConfigError: there is one.
    """
    for phase in phases:
        for name, each in context["model"][phase.name]["optim_schedulers"].items():
            if isinstance(each, TorchSchedule) and each.steps is not None and phase.model_of is None:
                needed = _needed(each, phase, runner, phases, epochs, context)
                if needed > each.steps:
                    address = f"phase.{phase.name}.optim_schedulers.{name}"
                    kind = type(each.schedule).__name__
                    message = too_short(kind, each.steps, needed, per_epoch=each.per == "epoch")
                    raise ConfigError(f"{context['config'].origin(address)}: {address}: {message}")


def _needed(
    schedule: TorchSchedule,
    owner: PhaseSchema,
    runner: RunnerSchema,
    phases: list[PhaseSchema],
    epochs: int,
    context: Context,
) -> int:
    """How many steps of the schedule the whole training takes; 0 where that cannot be told."""
    models = context["model"]
    sharing = [each.name for each in phases if owner.name in (each.name, each.model_of)]
    own = not all(is_plain(models[name]["brain"], models[name]["updater"]) for name in sharing)
    batches = {each.name: length(pass_loader(each.dataset_name or "", runner, context)) or 0 for each in phases}
    # An updater of the user's own makes as many steps as it likes.
    if own or runner.optimizer_step_limit or not all(batches.values()):
        return 0
    passes = list(_passes(batches, epochs, runner.max_steps or NEVER))
    if schedule.per == "epoch":
        return max(sum(times for each, _, times in passes if each == name) for name in sharing)
    return sum(times * -(-count // schedule.accum_grad) for name, count, times in passes if name in sharing)


def _passes(batches: Mapping[str, int], epochs: int, max_steps: int) -> Iterator[tuple[str, int, int]]:
    """(phase, batches in a pass, how many such passes): those of the whole epochs, then those of the one that is cut short."""
    whole = min(epochs, max_steps // sum(batches.values()))
    left = max_steps - whole * sum(batches.values()) if whole < epochs else 0
    for name, count in batches.items():
        yield name, count, whole
    for name, count in batches.items():
        if cut := min(count, left):
            yield name, cut, 1
        left -= cut
