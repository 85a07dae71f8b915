"""The context of a training, as the config and the processes decide it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from pipeline import hookspecs
from pipeline.checkpoint.gradients import TrainingGradients
from pipeline.config.load import Config
from pipeline.config.schema import RunnerSchema
from pipeline.config.usage import TrackedDict
from pipeline.context import TRAIN_STATE, Context, EngineMode
from pipeline.distributed.world import World
from pipeline.user_code.plugin_calls import hook_or_none, running_hook


def new_context(config: Config, settings: RunnerSchema, world: World, kind: type[Context] = Context) -> Context:
    """Return a context with what the config and the processes decide.

    Args:
        config: the config.
        settings: the settings of the runner.
        world: the processes.
        kind: the class of the context.
    """
    modes = EngineMode.CLUSTER, EngineMode.LOCAL_CLUSTER
    env = copy.deepcopy(config.plain())
    phases = {phase["name"]: phase for phase in env["phase"]}
    env["phase"] = [phases[phase.name] for phase in config.phases(settings)]
    values = {
        "status": "uninit",
        "is_exit": False,
        "config_yaml": str(config.path) if config.path else None,
        "config": config,
        "env": env,
        "runner_name": settings.name,
        "runner": settings,
        "phases": [TrackedDict(copy.deepcopy(phase), f"phase.{phase['name']}", config.reads) for phase in env["phase"]],
        "hyper_parameters": TrackedDict(copy.deepcopy(env["hyper_parameters"]), "hyper_parameters", config.reads),
        "engine": EngineMode.SINGLE if world.size == 1 else modes[world.local_size == world.size],
        "is_fleet": world.size > 1,
        "fleet_mode": "collective" if world.size > 1 else "",
        "is_infer": settings.kind == "infer",
        "rank": world.rank,
        "local_rank": world.local_rank,
        "world_size": world.size,
        "world": world,
        "train_state": dict.fromkeys(TRAIN_STATE, 0),
        "checkpoints": {},
    }
    return kind.for_training(values, TrainingGradients, running_hook)


def listen(context: Context, resources: ExitStack) -> None:
    """Have ``observe`` call the plugins, but not in processes forked from this one, nor in an export.

    Args:
        context: of the training.
        resources: closed at its end, and then ``observe`` calls what it called before.
    """
    on_observe, process = hook_or_none(context["hooks"], "on_observe"), os.getpid()
    if on_observe is None:
        return

    def observer(name: str, value: Any) -> None:
        if os.getpid() == process and not torch.compiler.is_exporting():
            on_observe(context=context, name=name, value=value)

    resources.callback(setattr, hookspecs, "observer", hookspecs.observer)
    # Where code is compiled, a plugin gets real tensors.
    outside_of_graphs: Callable[..., Any] = torch.compiler.disable
    hookspecs.observer = outside_of_graphs(observer)
