"""Which parameters are in which group of an optimizer, and with what options: the phases are built for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pipeline.checkpoint.weights import module_of
from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import TRAIN_STATE, Context
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.stages.network import Network
from pipeline.user_code import plugins

_NETWORK = "pipeline.stages.network:Network"


def groups(config: Config, address: str) -> Iterator[str]:
    """A line for each group, and under it one for each of its parameters.

    Args:
        config: without faults.
        address: of an optimizer, or of a key in it.
    """
    match = re.match(r"phase\.([^.]+)\.optim_schedulers\.([^.]+)", address)
    shown = set[str]()
    for runner in (runner for runner in config.runners if runner.kind == "train"):
        for phase in config.phases(runner):
            own = phase.name == match[1] if match else not phase.optim_schedulers
            if own and phase.model_of is None and phase.name not in shown:
                shown.add(phase.name)
                yield from _of_phase(phase, runner, config, match[2] if match else "main")


def _of_phase(phase: PhaseSchema, runner: RunnerSchema, config: Config, name: str) -> Iterator[str]:
    if runner.network_class_path != _NETWORK:
        yield f"phase {phase.name}: built by {runner.network_class_path}, which is not called here"
        return
    entry, scheduler = _built(phase, runner, config, name)
    names = {parameter: name for name, parameter in module_of(entry).named_parameters()}
    for group in scheduler.optimizer.param_groups:
        own, defaults = group["params"], scheduler.optimizer.defaults
        options = {key: group[key] for key in defaults if key == "lr" or group[key] != defaults[key]}
        numbers = sum(parameter.numel() for parameter in own)
        words = ", ".join(
            f"{key} {value:g}" if type(value) is float else f"{key} {value}" for key, value in options.items()
        )
        yield f"phase {phase.name}, {words}: {len(own)} parameter{'s' * (len(own) > 1)}, {numbers:,} numbers"
        yield from (f"    {names[parameter]} {list(parameter.shape)}" for parameter in own)


def _built(
    phase: PhaseSchema, runner: RunnerSchema, config: Config, name: str
) -> tuple[Mapping[str, Any], OptimScheduler]:
    """What the network stage builds for a phase, and one of its schedulers; without memory where the model allows it."""
    for device in (torch.device("meta"), torch.device("cpu")):
        context = Context(
            config=config,
            hyper_parameters=config.plain()["hyper_parameters"],
            runner_name=runner.name,
            device=device,
            is_infer=True,
            hooks=plugins.plugin_manager().hook,
            train_state=dict.fromkeys(TRAIN_STATE, 0),
        )
        try:
            with device:
                entry = Network(context).build_phase(phase.model_copy(deep=True), runner, context)
            return entry, Network(context).build_optim_schedulers(phase, entry["brain"], runner, context)[name]
        except Exception:
            if device.type == "cpu":
                raise
    raise AssertionError("the last device returns or raises")
