"""What a config names, loaded: devices, trainers and the classes of stages."""

from __future__ import annotations

from typing import Any

import torch

from pipeline import class_path
from pipeline.config.load import Config
from pipeline.config.schema import RunnerSchema
from pipeline.context import STAGES, PipelineStage, base_of
from pipeline.distributed import launch
from pipeline.errors import ClassPathError, ConfigError
from pipeline.user_code import user_frames


def device(config: Config, runner: RunnerSchema) -> torch.device:
    """Where a runner computes.

    Raises:
        ConfigError: the machine has no such device.
    """
    try:
        return launch.device(runner.device)
    except ConfigError as error:
        address = f"runner.{runner.name}.device"
        raise ConfigError([config.origin(address).fault(address, str(error))]) from error


def trainer_of(config: Config, runner: RunnerSchema, present: Any, base: type) -> Any:
    """What runs a runner: the trainer at hand, or one of the class that the runner names.

    Raises:
        ClassPathError: the class cannot be loaded, or built.
    """
    cls = load_class(config, runner, "trainer_class", "Trainer", base)
    if isinstance(present, cls):
        return present
    try:
        return cls(config)
    except Exception as error:
        address = f"runner.{runner.name}.trainer_class"
        message = f"{config.origin(address)}: {address}: {cls.__name__}(config) raised {type(error).__name__}: {error}"
        user_error = error.with_traceback(user_frames(error.__traceback__))
        raise ClassPathError(f"{message}; mend it", user_error) from error


def stage_classes_of(config: Config, runner: RunnerSchema) -> dict[str, type[PipelineStage]]:
    """Stage -> class.

    Raises:
        ClassPathError: one cannot be loaded.
    """
    return {
        stage: load_class(config, runner, f"{stage}_class_path", stage.capitalize(), base_class(stage))
        for stage in STAGES
    }


def base_class(stage: str) -> type:
    """The base class of a stage."""
    base: type = class_path.load(class_path.parse(base_of(stage)))
    return base


def load_class(config: Config, runner: RunnerSchema, key: str, name: str, base: type) -> Any:
    """The class that a key of a runner names, imported and checked.

    Raises:
        ClassPathError: it cannot be loaded; the message begins with where the config says so.
    """
    path = getattr(runner, key)
    try:
        if isinstance(path, str):
            path = class_path.parse(path, name=name, workspace=config.workspace)
        return class_path.load_class(path, base)
    except ClassPathError as error:
        address = f"runner.{runner.name}.{key}"
        raise ClassPathError(f"{config.origin(address)}: {address}: {error}", error.user_error) from error
