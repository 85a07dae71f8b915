"""Prepares the Brains of a run before they are trained or evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipeline.brain.brain import Brain
from pipeline.brain.internals import apply_options, overridden, place_modules
from pipeline.brain.run_options import RunOptions, options_of, run_options_for
from pipeline.checkpoint.weights import is_entry, module_of
from pipeline.compute.unregistered import require_registered
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.engine.phase import begin_on_ranks
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.user_code.tracebacks import error_context


def begin_fit(context: Context, phases: Sequence[PhaseSchema], runner: RunnerSchema) -> None:
    """Call ``on_fit_start`` of each Brain, before a restore, whichever runner stage trains it.

    A phase without a Brain is skipped without an error. The runner stage that trains it checks what the
    network stage left for it.

    Args:
        context: the context after the network and startup stages.
        phases: the phases of the runner, in order.
        runner: the runner.

    Raises:
        ConfigError: a model keeps layers in a plain list; the runner's options contradict each other, or
            the device does not support them.
    """
    models = context.peek("model")
    _require_registered(models)
    if not isinstance(models, Mapping):
        return
    started: set[int] = set()
    for phase in phases:
        entry = models.get(phase.name)
        if not isinstance(entry, Mapping):
            continue
        brain = entry.get("brain")
        # Phases may share a Brain.
        if not isinstance(brain, Brain) or id(brain) in started:
            continue
        started.add(id(brain))
        apply_options(brain, run_options_for(runner, context.peek("device")))
        optim_schedulers = entry.get("optim_schedulers") or {}
        for scheduler in optim_schedulers.values():
            if isinstance(scheduler, OptimScheduler):
                scheduler.adopt_groups()
        type(brain).bind(brain, phase.name, optim_schedulers, context, runner.nonfinite_patience)
        with error_context(f"phase.{phase.name}"):
            brain.on_fit_start()
        begin_on_ranks([brain.modules], runner.seed)


def prepare_for_evaluation(brain: Brain, phase: str, context: Context, options: RunOptions) -> None:
    """Prepare a Brain for an evaluation in a run.

    Args:
        brain: the Brain.
        phase: the name of its phase.
        context: the context of the run.
        options: its run options.

    Raises:
        ConfigError: the device cannot compute in a precision.
    """
    apply_options(brain, options)
    type(brain).bind(brain, phase, {}, context)
    place_modules(brain)


def ignored_arguments(brain: Brain) -> list[str]:
    """Return the arguments of the constructor that a config would ignore.

    They are the optimizer, the checkpointer and the run options.
    """
    names = ["opt_class", "checkpointer"]
    if overridden(brain, Brain, "init_optimizers"):
        # It may use the argument.
        names.remove("opt_class")
    given = [name for name in names if getattr(brain, name) is not None]
    return given + sorted(options_of(brain).model_fields_set - {"device"})


def unregistered_modules(brain: Brain) -> list[str]:
    """Return the attributes with trainable parameters that are not in ``modules``.

    Such parameters would not be trained or saved.
    """
    registered = set(brain.modules.parameters())
    unregistered: list[str] = []
    for name, value in vars(brain).items():
        if isinstance(value, nn.Module):
            trainable = {parameter for parameter in value.parameters() if parameter.requires_grad}
            if trainable - registered:
                unregistered.append(name)
    return unregistered


def _require_registered(models: Any) -> None:
    """Raise for layers in plain containers, also in models that a custom network stage has built.

    Raises:
        ConfigError: there is such a layer.
    """
    entries = models if isinstance(models, Mapping) else {}
    modules = {phase: module_of(entry) for phase, entry in entries.items() if is_entry(entry)}
    for phase, module in modules.items():
        brain = entries[phase].get("brain")
        owner = brain if isinstance(brain, Brain) else None
        require_registered([module], f"phase.{phase}: ", owner, elsewhere=modules.values())
