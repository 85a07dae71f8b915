"""What a phase of the config is made of: its modules, its model with a Brain around it, its optimizers, its updater."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.errors import ClassPathError, ConfigError
from pipeline.training.brain import Brain, ModuleBrain
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.schedules import Constant
from pipeline.training.updater import Updater, UpdaterBase
from pipeline.user_code import class_path
from pipeline.user_code.class_path import MODULES, SCHEDULES, schedule_name


def build_modules(phase: PhaseSchema, config: Config) -> dict[str, nn.Module]:
    """The modules that the config names for a Brain.

    Raises:
        ConfigError: a class or function makes something else, or does not take its arguments.
    """
    built = {}
    for name, settings in phase.modules.items():
        address = f"phase.{phase.name}.modules.{name}"
        cls = load(settings["class"], f"{address}.class", "Module", config, MODULES)
        built[name] = _make(cls, settings.get("args", {}), address, f"modules.{name}.args", nn.Module)
    return built


def build_model(phase: PhaseSchema, hyper_parameters: Mapping[str, Any], config: Config) -> nn.Module | Brain:
    """The model, its parameters filled from ``modules`` and ``model_args``, else by name from ``hyper_parameters``.

    Raises:
        ConfigError: it does not take these arguments, or needs others, or what is made is no model.
    """
    address = f"phase.{phase.name}.model"
    model_class = load(phase.model, address, "Model", config)
    taken = inspect.signature(model_class).parameters
    arguments = {name: hyper_parameters[name] for name in taken if name in hyper_parameters} | phase.model_args
    if phase.modules:
        arguments["modules"] = build_modules(phase, config)
    kinds = (Brain,) if phase.modules else (nn.Module, Brain)
    model: nn.Module | Brain = _make(model_class, arguments, address, "hyper_parameters or model_args", *kinds)
    return model


def build_brain(model: nn.Module | Brain, phase: PhaseSchema, config: Config) -> Brain:
    """The model itself where it is a Brain, else the Brain around it.

    Raises:
        ConfigError: a plain module has no loss.
    """
    if isinstance(model, Brain):
        return model
    if phase.loss is None:
        raise ConfigError(
            f"phase.{phase.name}.loss: {type(model).__name__} is a plain module and needs a loss; add `loss:`"
        )
    loss = load(phase.loss, f"phase.{phase.name}.loss", "Loss", config)
    return ModuleBrain(model, loss() if isinstance(loss, type) else loss)


def build_optim_schedulers(
    phase: PhaseSchema, modules: nn.Module, runner: RunnerSchema, config: Config
) -> dict[str, OptimScheduler]:
    """Those that the phase names; clipping and accumulation are the runner's where they say nothing.

    Raises:
        ConfigError: one of them cannot be built so.
    """
    shared = {"grad_clip": runner.grad_clip, "accum_grad": runner.accum_grad}
    built = {}
    for name, settings in phase.optim_schedulers.items():
        address = f"phase.{phase.name}.optim_schedulers.{name}"
        cls = load(schedule_name(settings["class"]), f"{address}.class", "OptimScheduler", config, SCHEDULES)
        arguments = {**shared, **settings.get("args", {})}
        kind = arguments.get("optim_type")
        if isinstance(kind, str) and not kind.isidentifier():
            arguments["optim_type"] = load(kind, f"{address}.args.optim_type", "Optimizer", config)
        try:
            built[name] = cls(model=modules, **arguments)
        except ConfigError as error:
            raise ConfigError(f"{config.origin(address)}: {address}: {error}") from error
    return built


def build_short_form(
    settings: Mapping[str, Any], modules: nn.Module, runner: RunnerSchema, config: Config
) -> OptimScheduler:
    """The optimizer that ``hyper_parameters.optimizer`` describes, with a constant rate."""
    settings = dict(settings)
    kind = settings.pop("class")
    if isinstance(kind, str) and not kind.isidentifier():
        kind = load(kind, "hyper_parameters.optimizer.class", "Optimizer", config)
    if "learning_rate" in settings:
        settings["lr"] = settings.pop("learning_rate")
    return Constant(kind, settings, modules, grad_clip=runner.grad_clip, accum_grad=runner.accum_grad)


def build_updater(phase: PhaseSchema, offered: Mapping[str, Any], config: Config) -> UpdaterBase:
    """What trains on one batch: the phase's updater, else the Brain itself.

    Args:
        phase: the phase.
        offered: model, brain, optim_schedulers and loader, which an updater is given where its constructor names them.
        config: the config.

    Raises:
        ClassPathError: it is no updater.
        ConfigError: an argument of its constructor has no value.
    """
    if phase.updater is None:
        return Updater(offered["brain"])
    address = f"phase.{phase.name}.updater"
    cls = load(phase.updater.class_path, f"{address}.class_path", "Updater", config, base=UpdaterBase)
    taken = inspect.signature(cls).parameters
    arguments = {**phase.updater.args, **{name: each for name, each in offered.items() if name in taken}}
    updater: UpdaterBase = _make(cls, arguments, address, "updater.args", UpdaterBase)
    return updater


def _make(cls: Callable[..., Any], arguments: Mapping[str, Any], address: str, home: str, *kinds: type) -> Any:
    """What a class or function makes of arguments, which are written at ``home``; it has to be of one of these kinds."""
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{address}: {_name_of(cls)}: {error}; mend {home}") from error
    made = cls(**arguments)
    if not isinstance(made, kinds):
        wanted = " or ".join(f"a {kind.__name__}" for kind in kinds)
        raise ConfigError(f"{address}: {_name_of(cls)} made a {type(made).__name__}; name {wanted}")
    return made


def _name_of(cls: Callable[..., Any]) -> str:
    """What a class or function is called; a ``functools.partial`` has no name."""
    return getattr(cls, "__name__", repr(cls))


def load(path: Any, address: str, name: str, config: Config, module: str = "", base: type | None = None) -> Any:
    """What a class path of the config names; a class or function given from Python is itself.

    Args:
        path: the class path.
        address: its address.
        name: the class meant where the path names only a file.
        config: the config.
        module: where a bare name is looked up.
        base: what the class has to derive from; None where a function does as well.

    Raises:
        ClassPathError: it cannot be loaded; the message begins with where the config says so.
    """
    try:
        if isinstance(path, str):
            path = class_path.parse(path, name=name, workspace=config.workspace, module=module)
        if base is not None:
            return class_path.load_class(path, base)
        return class_path.load(path) if isinstance(path, class_path.ClassPath) else path
    except ClassPathError as error:
        raise ClassPathError(f"{config.origin(address)}: {address}: {error}", error.user_error) from error
