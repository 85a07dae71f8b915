"""What the keys of a runner mean for its Brains and its passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.data.limits import limited, overfitted
from pipeline.errors import ConfigError
from pipeline.training.brain import Brain
from pipeline.training.entry import loader_of
from pipeline.training.run_options import RunOptions
from pipeline.user_code import belonging_to

_NAMES = {
    "max_grad_norm": "grad_clip",
    "grad_accumulation_factor": "accum_grad",
    "skip_nonfinite_grads": "check_gradients",
}
"""SpeechBrain's name of an option -> ours, where they differ."""


def options_of(runner: RunnerSchema, device: torch.device) -> RunOptions:
    """The options of a Brain that a runner trains or evaluates.

    Raises:
        ConfigError: they contradict each other, or the device cannot do it.
    """
    given = {}
    for option in fields(RunOptions):
        key = _NAMES.get(option.name, option.name)
        if key in RunnerSchema.model_fields and key != "device":
            given[option.name] = getattr(runner, key)
    try:
        return RunOptions(device=str(device), **given)
    except ConfigError as error:
        raise ConfigError(f"runner.{runner.name}: {error}") from error


def begin_fit(context: Context, phases: Sequence[PhaseSchema], runner: RunnerSchema) -> None:
    """Tell each Brain that a train runner trains it, whichever runner stage comes: first of all, before a restore.

    What the network stage left for a phase is looked at by whoever trains it; without a Brain nobody is told.

    Raises:
        ConfigError: the runner's options contradict each other, or the device cannot do them.
    """
    models = dict.get(context, "model")
    entries = {each.name: models.get(each.name) for each in phases} if isinstance(models, Mapping) else {}
    begun = set[int]()
    for name, entry in entries.items():
        brain = entry.get("brain") if isinstance(entry, Mapping) else None
        if isinstance(entry, Mapping) and isinstance(brain, Brain) and id(brain) not in begun:
            begun.add(id(brain))
            brain._take_options(options_of(runner, dict.__getitem__(context, "device")))
            type(brain).bind(brain, name, entry.get("optim_schedulers") or {}, context, runner.nonfinite_patience)
            with belonging_to(f"phase.{name}"):
                brain.on_fit_start()


def pass_loader(dataset: str, runner: RunnerSchema, context: Context) -> Any:
    """The batches of one pass over a dataset: all, or as many as the runner says."""
    loader = loader_of(dataset, context)
    if runner.overfit_batches:
        loader = overfitted(loader, runner.overfit_batches)
    limits = [runner.limit_batches, runner.debug_batches if runner.debug else None]
    most = min((limit for limit in limits if limit), default=0)
    return limited(loader, most) if most else loader
