"""The default network stage."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from pipeline import class_path
from pipeline.checks.scheduler_check import SCHEDULES, schedule_name
from pipeline.class_path import ClassPath
from pipeline.config.load import Config
from pipeline.config.schema import DatasetSchema, PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.data.loader import build_loader
from pipeline.errors import ClassPathError, ConfigError
from pipeline.stages.base import NetworkBase
from pipeline.training.brain import Brain, ModuleBrain
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.schedules import Constant
from pipeline.training.updater import Updater


class Network(NetworkBase):
    """Builds datasets and loaders, then models, optimizers and updaters, as ``dataset:`` and ``phase:`` say."""

    writes = ("dataset", "model")

    def build_network(self, context: Context) -> None:
        """Write ``dataset`` (name -> loader) and ``model`` (phase -> model, brain, optim_schedulers, updater)."""
        config: Config = context["config"]
        runner = next(each for each in config.runners if each.name == context["runner_name"])
        phases = config.phases(runner)
        context["dataset"] = {
            each.name: self.build_dataset(each, runner, context)
            for each in config.settings.dataset
            if each.name in self.needed(phases, runner)
        }
        context["model"] = {phase.name: self.build_phase(phase, runner, context) for phase in phases}

    def needed(self, phases: list[PhaseSchema], runner: RunnerSchema) -> set[str | None]:
        """The names of the datasets that a runner uses: an infer runner just the one that it evaluates."""
        if runner.kind == "infer":
            return {phase.valid_dataset_name or phase.dataset_name for phase in phases}
        return {name for phase in phases for name in (phase.dataset_name, phase.valid_dataset_name)}

    def build_dataset(self, settings: DatasetSchema, runner: RunnerSchema, context: Context) -> Any:
        """The loader of one item of ``dataset:``."""
        address = f"dataset.{settings.name}"
        dataset_class = load(settings.class_path, f"{address}.class_path", "Dataset", context["config"])
        dataset = dataset_class(**settings.args)
        collate = settings.collate_fn and load(
            settings.collate_fn, f"{address}.collate_fn", "collate", context["config"]
        )
        return build_loader(dataset, settings, runner.seed, context["device"], collate)

    def build_phase(self, phase: PhaseSchema, runner: RunnerSchema, context: Context) -> dict[str, Any]:
        """What ``context["model"]`` holds for one item of ``phase:``."""
        model = self.build_model(phase, context)
        brain = model if isinstance(model, Brain) else self.wrap(model, phase, context["config"])
        if outside := brain.unregistered():
            remedy = f"register it: super().__init__({{'{outside[0]}': …}})"
            raise ConfigError(
                f"phase.{phase.name}.model: {type(brain).__name__} keeps {', '.join(outside)} outside its modules, "
                f"where nothing is trained or saved; {remedy}"
            )
        brain.modules.to(context["device"])
        optim_schedulers = {} if context["is_infer"] else self.build_optim_schedulers(phase, brain, runner, context)
        # The default runner binds again, for whatever network it gets; a runner of the user's own need not.
        brain.bind(phase.name, optim_schedulers, context, runner.nonfinite_patience)
        return {"model": model, "brain": brain, "optim_schedulers": optim_schedulers, "updater": Updater(brain)}

    def build_model(self, phase: PhaseSchema, context: Context) -> nn.Module | Brain:
        """The model, its parameters filled by name from ``model_args``, else from ``hyper_parameters``."""
        address = f"phase.{phase.name}.model"
        model_class = load(phase.model, address, "Model", context["config"])
        taken = inspect.signature(model_class).parameters
        given = context["hyper_parameters"]
        filled = {name: given[name] for name in taken if name in given}
        arguments = filled | phase.model_args
        missing = [
            name
            for name, each in taken.items()
            if each.default is each.empty
            and each.kind is not each.VAR_POSITIONAL
            and each.kind is not each.VAR_KEYWORD
            and name not in arguments
        ]
        if missing:
            raise ConfigError(
                f"{address}: {model_class.__name__} needs {', '.join(missing)}; add it to hyper_parameters or model_args"
            )
        model = model_class(**arguments)
        if not isinstance(model, nn.Module | Brain):
            raise ConfigError(
                f"{address}: {model_class.__name__} made a {type(model).__name__}; name an nn.Module or a Brain"
            )
        return model

    def wrap(self, module: nn.Module, phase: PhaseSchema, config: Config) -> Brain:
        """The Brain around a plain module."""
        if phase.loss is None:
            raise ConfigError(
                f"phase.{phase.name}.loss: {type(module).__name__} is a plain module and needs a loss; add `loss:`"
            )
        loss = load(phase.loss, f"phase.{phase.name}.loss", "Loss", config)
        return ModuleBrain(module, loss() if isinstance(loss, type) else loss)

    def build_optim_schedulers(
        self, phase: PhaseSchema, brain: Brain, runner: RunnerSchema, context: Context
    ) -> dict[str, OptimScheduler]:
        """Those that the phase names; else one, "main"."""
        if not phase.optim_schedulers:
            return {"main": self.build_optim_scheduler(brain.modules, runner, context)}
        shared = {"grad_clip": runner.grad_clip, "accum_grad": runner.accum_grad}
        built = {}
        for name, settings in phase.optim_schedulers.items():
            address = f"phase.{phase.name}.optim_schedulers.{name}"
            cls = load(
                schedule_name(settings["class"]), f"{address}.class", "OptimScheduler", context["config"], SCHEDULES
            )
            arguments = {**shared, **settings.get("args", {})}
            try:
                built[name] = cls(model=brain.modules, **arguments)
            except ConfigError as error:
                raise ConfigError(f"{context['config'].origin(address)}: {address}: {error}") from error
        return built

    def build_optim_scheduler(self, module: nn.Module, runner: RunnerSchema, context: Context) -> OptimScheduler:
        """The optimizer that ``hyper_parameters.optimizer`` describes, with a constant rate."""
        settings = dict(context["hyper_parameters"]["optimizer"])
        kind = settings.pop("class")
        if isinstance(kind, str) and not kind.isidentifier():
            kind = load(kind, "hyper_parameters.optimizer.class", "Optimizer", context["config"])
        if "learning_rate" in settings:
            settings["lr"] = settings.pop("learning_rate")
        return Constant(kind, settings, module, grad_clip=runner.grad_clip, accum_grad=runner.accum_grad)


def load(path: Any, address: str, name: str, config: Config, module: str = "") -> Any:
    """What a class path of the config names; a class or function given from Python is itself.

    Raises:
        ClassPathError: it cannot be loaded; the message begins with where the config says so.
    """
    if not isinstance(path, str):
        return path
    try:
        parsed: ClassPath = class_path.parse(path, name=name, workspace=config.workspace, module=module)
        return class_path.load(parsed)
    except ClassPathError as error:
        raise ClassPathError(f"{config.origin(address)}: {address}: {error}", error.user_error) from error
