"""What is done with the Brains of a run before they are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipeline.brain.brain import Brain
from pipeline.brain.internals import apply_options, overridden, place_modules
from pipeline.brain.run_options import RunOptions, options_of, run_options_for
from pipeline.checkpoint.weights import is_entry, module_of
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.engine.phase import begin_on_ranks
from pipeline.engine.unregistered import require_registered
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.user_code.tracebacks import error_context


def begin_fit(context: Context, phases: Sequence[PhaseSchema], runner: RunnerSchema) -> None:
    """Call ``on_fit_start`` of each Brain, before a restore, whichever runner stage trains it.

    What the network stage left for a phase is looked at by whoever trains it; without a Brain nobody is told.

    Raises:
        ConfigError: a model keeps layers in a plain list; the runner's options contradict each other, or the device
            cannot do them.
    """
    models, started = context.peek("model"), set[int]()
    _require_registered(models)
    for name in (phase.name for phase in phases) if isinstance(models, Mapping) else ():
        entry = models.get(name)
        brain = entry.get("brain") if isinstance(entry, Mapping) else None
        if isinstance(brain, Brain) and id(brain) not in started:
            started.add(id(brain))
            apply_options(brain, run_options_for(runner, context.peek("device")))
            optim_schedulers = entry.get("optim_schedulers") or {}
            for scheduler in optim_schedulers.values():
                if isinstance(scheduler, OptimScheduler):
                    scheduler.adopt_groups()
            type(brain).bind(brain, name, optim_schedulers, context, runner.nonfinite_patience)
            with error_context(f"phase.{name}"):
                brain.on_fit_start()
            begin_on_ranks([brain.modules], runner.seed)


def prepare_for_evaluation(brain: Brain, phase: str, context: Context, options: RunOptions) -> None:
    """Make a Brain ready to be evaluated in a run.

    Args:
        brain: the Brain.
        phase: the name of its phase.
        context: of the run.
        options: its run options.

    Raises:
        ConfigError: the device cannot compute in a precision.
    """
    apply_options(brain, options)
    type(brain).bind(brain, phase, {}, context)
    place_modules(brain)


def ignored_arguments(brain: Brain) -> list[str]:
    """Arguments of the constructor that a config would ignore: optimizer, checkpointer, options of the run."""
    # An init_optimizers of its own may use it.
    opt_class = () if overridden(brain, Brain, "init_optimizers") else ("opt_class",)
    names = [name for name in (*opt_class, "checkpointer") if getattr(brain, name) is not None]
    return names + sorted(options_of(brain).model_fields_set - {"device"})


def unregistered_modules(brain: Brain) -> list[str]:
    """Attributes with trainable parameters outside of ``modules``, which nothing trains or saves."""
    registered = set(brain.modules.parameters())
    modules = {name: value for name, value in vars(brain).items() if isinstance(value, nn.Module)}
    trained = {name: {own for own in module.parameters() if own.requires_grad} for name, module in modules.items()}
    return [name for name, parameters in trained.items() if parameters - registered]


def _require_registered(models: Any) -> None:
    """Raise for layers in plain containers, also of models that a network stage of the user's own has built."""
    entries = models if isinstance(models, Mapping) else {}
    modules = {phase: module_of(entry) for phase, entry in entries.items() if is_entry(entry)}
    for phase, module in modules.items():
        brain = entries[phase].get("brain")
        owner = brain if isinstance(brain, Brain) else None
        require_registered([module], f"phase.{phase}: ", owner, elsewhere=modules.values())
