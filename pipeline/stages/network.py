"""The default network stage."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeline.config.load import Config
from pipeline.config.schema import DatasetSchema, PhaseSchema, RunnerSchema
from pipeline.context import Context
from pipeline.data.loader import build_loader
from pipeline.errors import ConfigError
from pipeline.stages.base import NetworkBase
from pipeline.stages.build import (
    build_brain,
    build_model,
    build_optim_schedulers,
    build_short_form,
    build_updater,
    load,
)
from pipeline.training.brain import Brain
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.training.updater import Updater, UpdaterBase
from pipeline.user_code.tracebacks import error_context


class Network(NetworkBase):
    """Builds datasets and loaders, then models, optimizers and updaters, as ``dataset:`` and ``phase:`` say."""

    writes = ("dataset", "model")

    def build_network(self, context: Context) -> None:
        """Write ``dataset`` (name -> loader) and ``model`` (phase -> model, brain, optim_schedulers, updater)."""
        config: Config = context["config"]
        runner = config.runner(context["runner_name"])
        phases = config.phases(runner)
        context["dataset"] = {
            each.name: self.build_dataset(each, runner, context)
            for each in config.settings.dataset
            if each.name in self.needed(phases, runner)
        }
        context["model"] = {}
        for phase in phases:
            if phase.model_of is None:
                with error_context(f"phase.{phase.name}"):
                    context["model"][phase.name] = self.build_phase(phase, runner, context)
        for phase in phases:
            if phase.model_of is not None:
                context["model"][phase.name] = self.share_phase(phase, context)

    def needed(self, phases: list[PhaseSchema], runner: RunnerSchema) -> set[str | None]:
        """The names of the datasets that a runner uses: an infer runner just the one that it evaluates."""
        if runner.kind == "infer":
            return {phase.valid_dataset_name or phase.dataset_name for phase in phases}
        return {name for phase in phases for name in (phase.dataset_name, phase.valid_dataset_name)}

    def build_dataset(self, settings: DatasetSchema, runner: RunnerSchema, context: Context) -> Any:
        """The loader of one item of ``dataset:``."""
        address = f"dataset.{settings.name}"
        dataset_class = load(settings.class_path, f"{address}.class_path", "Dataset", context["config"])
        with error_context(address):
            dataset = dataset_class(**settings.args)
        collate = settings.collate_fn and load(
            settings.collate_fn, f"{address}.collate_fn", "collate", context["config"]
        )
        with error_context(address):
            return build_loader(dataset, settings, runner.seed, context["device"], collate)

    def build_phase(self, phase: PhaseSchema, runner: RunnerSchema, context: Context) -> dict[str, Any]:
        """What ``context["model"]`` holds for one item of ``phase:``."""
        model = self.build_model(phase, context)
        brain = self.build_brain(model, phase, context)
        brain.modules.to(context["device"])
        optim_schedulers = {} if context["is_infer"] else self.build_optim_schedulers(phase, brain, runner, context)
        # The default runner binds again, for whatever network it gets; a runner of the user's own need not.
        type(brain).bind(brain, phase.name, optim_schedulers, context, runner.nonfinite_patience)
        updater = self.build_updater(phase, model, brain, optim_schedulers, context)
        return {"model": model, "brain": brain, "optim_schedulers": optim_schedulers, "updater": updater}

    def share_phase(self, phase: PhaseSchema, context: Context) -> dict[str, Any]:
        """The same for a phase that trains another's model: the same objects, and an updater of its own."""
        shared = context["model"][phase.model_of]
        model, brain, optim_schedulers = shared["model"], shared["brain"], shared["optim_schedulers"]
        updater = self.build_updater(phase, model, brain, optim_schedulers, context)
        return {"model": model, "brain": brain, "optim_schedulers": optim_schedulers, "updater": updater}

    def build_model(self, phase: PhaseSchema, context: Context) -> nn.Module | Brain:
        """The model, with its arguments from ``modules``, ``model_args`` and ``hyper_parameters``."""
        return build_model(phase, context["hyper_parameters"], context["config"])

    def build_brain(self, model: nn.Module | Brain, phase: PhaseSchema, context: Context) -> Brain:
        """The model itself, or the Brain around it.

        Raises:
            ConfigError: it keeps something that is trained where nobody trains or saves it.
        """
        brain = build_brain(model, phase, context["config"])
        if ignored := brain._set_by_hand():
            raise ConfigError(
                f"phase.{phase.name}.model: {type(brain).__name__} is made with {', '.join(ignored)}, which would be ignored: "
                "in a config the runner and the phase say this; remove it from the call of super().__init__"
            )
        if outside := brain._unregistered():
            remedy = f"register it: super().__init__({{'{outside[0]}': …}})"
            raise ConfigError(
                f"phase.{phase.name}.model: {type(brain).__name__} keeps {', '.join(outside)} outside its modules, "
                f"where nothing is trained or saved; {remedy}"
            )
        return brain

    def build_optim_schedulers(
        self, phase: PhaseSchema, brain: Brain, runner: RunnerSchema, context: Context
    ) -> dict[str, OptimScheduler]:
        """Those that the phase names; else one, "main"."""
        if phase.optim_schedulers:
            built = build_optim_schedulers(phase, brain.modules, runner, context["config"])
        else:
            built = {"main": self.build_optim_scheduler(brain.modules, runner, context)}
        for each in built.values():
            each.check_gradients = runner.check_gradients
        return built

    def build_optim_scheduler(self, module: nn.Module, runner: RunnerSchema, context: Context) -> OptimScheduler:
        """The optimizer that ``hyper_parameters.optimizer`` describes, with a constant rate."""
        return build_short_form(context["hyper_parameters"]["optimizer"], module, runner, context["config"])

    def build_updater(
        self,
        phase: PhaseSchema,
        model: nn.Module | Brain,
        brain: Brain,
        optim_schedulers: dict[str, OptimScheduler],
        context: Context,
    ) -> UpdaterBase:
        """What trains on one batch; an infer runner, which has no training data, gets the default."""
        if context["is_infer"]:
            return Updater(brain)
        loader = context["dataset"][phase.dataset_name]
        offered = {"model": model, "brain": brain, "optim_schedulers": optim_schedulers, "loader": loader}
        return build_updater(phase, offered, context["config"])
