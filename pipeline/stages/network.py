"""The default network stage: what ``dataset:`` and ``phase:`` say, built. Each method may be overridden alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from loguru import logger
from torch import nn
from torch.utils.data import IterableDataset

from pipeline.brain.brain import Brain
from pipeline.brain.internals import apply_options, make_optimizers, overridden, wrap, wrappable
from pipeline.brain.module_brain import ModuleBrain, OwnLossBrain
from pipeline.brain.run_options import run_options_for
from pipeline.brain.start import ignored_arguments, unregistered_modules
from pipeline.compute.trainable import trainable_of
from pipeline.compute.unregistered import attributes_with_trainable, require_registered
from pipeline.config.load import Config
from pipeline.config.schema import MODEL_LOSS, READER_KEYS, DatasetSchema, PhaseSchema, RunnerSchema
from pipeline.context import ConfigView, Context, Phase
from pipeline.data.loader import SeededLoader, make_loader, with_parts
from pipeline.distributed.world import current_world
from pipeline.engine.phase import faults_at, phase_errors
from pipeline.errors import ConfigError, PluginError, StageError
from pipeline.optim.factory import maker_of
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.parameter_groups import Group, Groups
from pipeline.optim.schedules import Constant
from pipeline.slots.files import SlotFiles
from pipeline.stages.base import NetworkBase
from pipeline.updater.updater import StandardUpdater, Updater, UpdaterBase
from pipeline.user_code.class_path import MODULES, SCHEDULES, load_named, spelling
from pipeline.user_code.plugin_calls import each_answer
from pipeline.user_code.tracebacks import error_context
from pipeline.user_code.uncalled import BRAIN_REMEDIES, UPDATER_REMEDIES, uncalled_faults_of_class

_T = TypeVar("_T")


class Network(NetworkBase):
    """Builds datasets and loaders, then models, optimizers and updaters, as ``dataset:`` and ``phase:`` say."""

    writes = ("dataset", "model")

    def build_network(self, context: Context) -> None:
        """Write ``dataset`` (name -> loader) and ``model`` (phase -> model, brain, optim_schedulers, updater)."""
        config = cast("Config", context["config"])
        runner = config.runner(context["runner_name"])
        needed = self.needed(config.phases(runner), runner)
        loaders = {}
        for settings in config.settings.dataset:
            if settings.name in needed:
                loaders[settings.name] = self.build_loader(settings, runner, context)
        context["dataset"] = loaders
        self.build_models(context)

    def build_models(self, context: Context) -> None:
        """Write ``model`` alone."""
        runner = context["runner"]
        context["model"] = {}
        # Those that share a model come after those that build one.
        for phase in sorted(context["config"].phases(runner), key=lambda phase: phase.model_of is not None):
            with error_context(f"phase.{phase.name}"):
                shares = phase.model_of is not None
                entry = self.share_phase(phase, context) if shares else self.build_phase(phase, runner, context)
            context["model"][phase.name] = entry

    def needed(self, phases: list[PhaseSchema], runner: RunnerSchema) -> set[str | None]:
        """The names of the datasets that a runner uses: an infer runner just the one that it evaluates."""
        if runner.kind == "infer":
            return {name for phase in phases for name in phase.valid_datasets or (phase.dataset_name,)}
        return {name for phase in phases for name in (phase.dataset_name, *phase.valid_datasets)}

    def build_loader(self, settings: DatasetSchema, runner: RunnerSchema, context: Context) -> Any:
        """The same as ``build_dataset``; an evaluation does not shuffle what comes of it."""
        if runner.kind == "infer":
            return self.build_dataset(without_shuffle(settings), runner, context)
        loader = self.build_dataset(settings, runner, context)
        phases = context["config"].phases(runner)
        is_evaluated = any(settings.name in phase.valid_datasets for phase in phases)
        if is_evaluated and shuffles_by_class(settings, loader):
            # A loader cannot put in order what a class of the config shuffles.
            return with_parts(loader, evaluated=self.build_dataset(without_shuffle(settings), runner, context))
        return loader

    def build_dataset(self, settings: DatasetSchema, runner: RunnerSchema, context: Context) -> Any:
        """The loader of one item of ``dataset:``."""
        address, config = f"dataset.{settings.name}", context["config"]
        dataset_class = load_named(settings.class_path, f"{address}.class_path", "Dataset", config)
        init = settings.worker_init_fn and load_named(settings.worker_init_fn, f"{address}.worker_init_fn", "", config)
        keys = ("num_workers", "timeout", "multiprocessing_context", "persistent_workers", "prefetch_factor")
        workers = {key: value for key in keys if settings.num_workers and (value := getattr(settings, key)) is not None}
        pin = context["device"].type == "cuda" if settings.pin_memory is None else settings.pin_memory
        arguments = {"seed": runner.seed, "where": address, "pin_memory": pin, "worker_init_fn": init, **workers}
        arguments |= {"whole_batches": settings.whole_batches, "resume": settings.resume}
        arguments["shuffle_buffer"] = settings.shuffle_buffer
        with error_context(address):
            dataset = dataset_class(**reader_arguments(settings, dataset_class), **settings.args)
            arguments["collate_fn"] = self.build_collate(settings, config)
            return make_loader(dataset, **arguments, **self.build_order(settings, dataset, runner, config))

    def build_order(
        self, settings: DatasetSchema, dataset: Any, runner: RunnerSchema, config: ConfigView
    ) -> dict[str, Any]:
        """What decides the order of the samples, and how many make a batch: arguments of the loader."""
        batch_size, whole = settings.batch_size, settings.global_batch_size
        shuffle = settings.shuffle and not shuffles_itself(type(dataset))
        keys = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": settings.drop_last}
        # A sampler gives the order of all ranks.
        shared = whole or (batch_size and batch_size * current_world().size)
        ours = {"dataset": dataset, "data_source": dataset, "seed": runner.seed, **keys, "batch_size": shared}
        keys["global_batch_size"] = whole
        for key in ("sampler", "batch_sampler"):
            if own := getattr(settings, key):
                address = f"dataset.{settings.name}.{key}.class_path"
                cls = load_named(own.class_path, address, "Sampler", config)
                names = inspect.signature(cls).parameters
                arguments = {name: value for name, value in ours.items() if name in names} | own.args
                keys = {**keys, "shuffle": False} if key == "sampler" else {}
                keys[key] = make(cls, arguments, address, f"{key}.args", cast("type", Iterable))
        return keys

    def build_collate(self, settings: DatasetSchema, config: ConfigView) -> Any:
        """The function that makes a batch of samples, with ``collate_args``; None is torch's."""
        path, address = settings.collate_fn, f"dataset.{settings.name}.collate_fn"
        collate: Any = path and load_named(path, address, "collate", config)
        if isinstance(collate, type) and any("__call__" in vars(base) for base in collate.__mro__):
            return make(collate, settings.collate_args, address, "collate_args", collate)
        return partial(collate, **settings.collate_args) if settings.collate_args else collate

    def build_phase(self, phase: PhaseSchema, runner: RunnerSchema, context: Context) -> Phase:
        """What ``context["model"]`` holds for one item of ``phase:``; the model is in training mode."""
        model = self.build_model(phase, context)
        brain = self.build_brain(model, phase, context)
        default_runner = RunnerSchema.model_fields["runner_class_path"].default
        # An updater or a runner stage of the user may call what the default ones do not.
        if phase.updater is None and runner.runner_class_path == default_runner:
            refuse_uncalled(type(brain), Brain, BRAIN_REMEDIES, f"phase.{phase.name}.model", context)
        if phase.count_samples is not None:
            address = f"phase.{phase.name}.count_samples"
            config = context["config"]
            trainable_of(brain).count_with(load_named(phase.count_samples, address, "count_samples", config))
        # A factory such as from_pretrained returns its model in evaluation mode. From here on, modes are the user's.
        brain.modules.train()
        model = wrap_model(model, brain, phase.name, context)
        brain.modules.to(context["device"])
        optim_schedulers = {} if context["is_infer"] else self.build_optim_schedulers(phase, brain, runner, context)
        # The default runner binds again, for whatever network it gets; a runner of the user's own need not.
        type(brain).bind(brain, phase.name, optim_schedulers, context, runner.nonfinite_patience)
        updater = self.build_updater(phase, model, brain, optim_schedulers, context)
        entry = {"model": model, "brain": brain, "optim_schedulers": optim_schedulers, "updater": updater}
        return Phase(phase.name, entry)

    def share_phase(self, phase: PhaseSchema, context: Context) -> Phase:
        """The same for a phase with ``model_of``: the objects of the other phase, and an updater of its own."""
        owner = context["model"][phase.model_of or ""]
        updater = self.build_updater(phase, owner["model"], owner["brain"], owner["optim_schedulers"], context)
        return Phase(phase.name, {**owner, "updater": updater})

    def build_model(self, phase: PhaseSchema, context: Context) -> nn.Module | Brain:
        """The model, its parameters filled from ``modules`` and ``model_args``, else by name from ``hyper_parameters``."""
        address, hyper_parameters = f"phase.{phase.name}.model", context["hyper_parameters"]
        model_class = load_named(phase.model, address, "Model", context["config"])
        names = [name for name in inspect.signature(model_class).parameters if name in hyper_parameters]
        arguments = {name: hyper_parameters[name] for name in names} | phase.model_args
        bases: tuple[type[nn.Module | Brain], ...] = (nn.Module, Brain)
        if phase.modules:
            arguments["modules"], bases = self.build_modules(phase, context), (Brain,)
        return make(model_class, arguments, address, "hyper_parameters or model_args", *bases)

    def build_modules(self, phase: PhaseSchema, context: Context) -> dict[str, nn.Module]:
        """The ``modules`` of a phase, which its Brain is made with."""
        modules = {}
        for name, settings in phase.modules.items():
            address = f"phase.{phase.name}.modules.{name}"
            cls = load_named(settings["class"], f"{address}.class", "Module", context["config"], MODULES)
            modules[name] = make(cls, settings.get("args", {}), address, f"modules.{name}.args", nn.Module)
        return modules

    def build_brain(self, model: nn.Module | Brain, phase: PhaseSchema, context: Context) -> Brain:
        """The model itself where it is a Brain, else the Brain around it.

        Raises:
            ConfigError: a plain module has no loss; or something that is trained is kept where nobody trains or
                saves it.
            StageError: it is neither.
        """
        address, kind = f"phase.{phase.name}", type(model).__name__
        if isinstance(model, Brain):
            brain = model
        elif not isinstance(model, nn.Module):
            raise StageError(f"{type(self).__name__}.build_model: returned a {kind}; return a module or a Brain")
        elif phase.loss is None and phase.updater is not None:
            brain = OwnLossBrain(model)
        elif phase.loss is None:
            raise ConfigError(f"{address}.loss: {kind} is a plain module and needs a loss; add `loss:`")
        else:
            named, where = phase.loss != MODEL_LOSS, f"{address}.loss"
            loss = load_named(phase.loss, where, "Loss", context["config"]) if named else None
            with phase_errors(phase.name):
                loss = loss() if isinstance(loss, type) else loss
                brain = ModuleBrain(model, loss)
            refuse_trainable_loss(loss, model, where)
        what = f"{address}.model: {type(brain).__name__}"
        if ignored := ignored_arguments(brain):
            why = "which would be ignored: in a config the runner and the phase say this"
            raise ConfigError(f"{what} is made with {', '.join(ignored)}, {why}; remove it from super().__init__()")
        require_registered(brain.modules.values(), f"{address}.model: ", brain)
        if outside := unregistered_modules(brain):
            remedy = f"register it: super().__init__({{'{outside[0]}': …}})"
            why = "outside its modules, where nothing is trained or saved"
            raise ConfigError(f"{what} keeps {', '.join(outside)} {why}; {remedy}")
        return brain

    def build_optim_schedulers(
        self, phase: PhaseSchema, brain: Brain, runner: RunnerSchema, context: Context
    ) -> dict[str, OptimScheduler]:
        """The OptimSchedulers of the phase; without ``optim_schedulers`` there is one, "main", or those that the Brain makes.

        There are none if the config has no optimizer and the updater of the phase has its own.

        Raises:
            ConfigError: the config has an optimizer, and the Brain makes its own.
        """
        names = phase.optim_schedulers
        if overridden(brain, Brain, "init_optimizers"):
            refuse_two_optimizers(brain, phase, context)
            apply_options(brain, run_options_for(runner, context["device"]))
            with error_context(f"phase.{phase.name}"):
                return make_optimizers(brain, grad_clip_value=runner.grad_clip_value)
        built = {name: self.build_named_scheduler(name, phase, brain, runner, context) for name in names}
        has_own = phase.updater is not None and "optimizer" not in context["hyper_parameters"]
        if not built and not has_own:
            built["main"] = self.build_optim_scheduler(brain.modules, runner, context)
        return built

    def build_named_scheduler(
        self, name: str, phase: PhaseSchema, brain: Brain, runner: RunnerSchema, context: Context
    ) -> OptimScheduler:
        """One of ``optim_schedulers``; clipping and accumulation are the runner's where it says nothing."""
        settings, config = phase.optim_schedulers[name], context["config"]
        address = f"phase.{phase.name}.optim_schedulers.{name}"
        path = spelling(settings["class"], SCHEDULES)
        cls = load_named(path, f"{address}.class", "OptimScheduler", config, SCHEDULES)
        by_value = {"grad_clip_value": runner.grad_clip_value} if runner.grad_clip_value else {}
        shared = {"grad_clip": runner.grad_clip, **by_value, "accum_grad": runner.accum_grad}
        arguments = shared | settings.get("args", {})
        if "optim_type" in arguments:
            kind = load_optimizer(arguments["optim_type"], f"{address}.args.optim_type", config)
            conf, groups = arguments.get("optim_conf", {}), arguments.get("groups", ())
            lazily = arguments.get("lazy_mode", False)
            conf = with_fused(kind, conf, groups, brain.modules, context["device"], lazily=lazily)
            arguments |= {"optim_type": kind, "optim_conf": conf}
        with faults_at(address, config, ".args"):
            return cast("OptimScheduler", cls(model=brain.modules, **arguments))

    def build_optim_scheduler(self, module: nn.Module, runner: RunnerSchema, context: Context) -> OptimScheduler:
        """The optimizer that ``hyper_parameters.optimizer`` describes, with a constant rate."""
        settings, address = dict(context["hyper_parameters"]["optimizer"]), "hyper_parameters.optimizer"
        kind = load_optimizer(settings.pop("class"), f"{address}.class", context["config"])
        keys = ("groups", "remove_vector_weight_decay", "lazy_mode")
        arguments = {key: settings.pop(key) for key in keys if key in settings}
        groups, lazily = arguments.get("groups", ()), arguments.get("lazy_mode", False)
        settings = with_fused(kind, settings, groups, module, context["device"], lazily=lazily)
        with faults_at(address, context["config"]):
            arguments |= {"grad_clip": runner.grad_clip, "grad_clip_value": runner.grad_clip_value}
            return Constant(kind, settings, module, accum_grad=runner.accum_grad, **arguments)

    def build_updater(
        self,
        phase: PhaseSchema,
        model: nn.Module | Brain,
        brain: Brain,
        optim_schedulers: dict[str, OptimScheduler],
        context: Context,
    ) -> UpdaterBase:
        """What trains on one batch: the phase's updater, else the Brain; an infer runner has no training data, and the Brain."""
        if context["is_infer"] or phase.updater is None:
            return Updater(brain)
        address, loader = f"phase.{phase.name}.updater", context["dataset"][phase.dataset_name or ""]
        path, config = phase.updater.class_path, context["config"]
        cls = load_named(path, f"{address}.class_path", "Updater", config, base=UpdaterBase)
        ours = {"model": model, "brain": brain, "optim_schedulers": optim_schedulers, "loader": loader}
        ours["dataloader"] = loader
        if len(optim_schedulers) == 1:
            ours["optimizer"] = next(iter(optim_schedulers.values())).optimizer
        if issubclass(cls, StandardUpdater):
            refuse_uncalled(cls, StandardUpdater, UPDATER_REMEDIES, f"{address}.class_path", context)
        names = inspect.signature(cls).parameters
        arguments = {**phase.updater.args, **{name: value for name, value in ours.items() if name in names}}
        updater = make(cls, arguments, address, "updater.args", UpdaterBase)
        if isinstance(updater, StandardUpdater):
            updater.step_by(optim_schedulers)
        return updater


def refuse_trainable_loss(loss: object, model: nn.Module, address: str) -> None:
    """Raise for a loss that has parameters which require a gradient.

    Raises:
        ConfigError: it has some; the optimizer does not train them, and no checkpoint has them.
    """
    names = attributes_with_trainable(loss, model)
    if names:
        what = f"{address}: {type(loss).__name__} has trainable parameters in {', '.join(names)}"
        why = "a loss is neither trained nor saved"
        remedy = f"make it a part of the model and write `loss: {MODEL_LOSS}`, or freeze it: requires_grad_(False)"
        raise ConfigError(f"{what}, and {why}; {remedy}")


def refuse_uncalled(cls: type, base: type, remedies: Mapping[str, str], address: str, context: Context) -> None:
    """Raise for methods that the framework never calls, if ``check`` could not determine the base classes.

    Raises:
        ConfigError: there are some.
    """
    if faults := uncalled_faults_of_class(cls, base, remedies, context["config"].workspace):
        raise ConfigError("\n".join(f"{context['config'].origin(address)}: {address}: {fault}" for fault in faults))


def refuse_two_optimizers(brain: Brain, phase: PhaseSchema, context: Context) -> None:
    """Raise where the config has an optimizer for a phase whose Brain makes its own.

    Raises:
        ConfigError: it has one.
    """
    address = f"phase.{phase.name}.optim_schedulers" if phase.optim_schedulers else "hyper_parameters.optimizer"
    if phase.optim_schedulers or context["hyper_parameters"].get("optimizer"):
        what = f"{context['config'].origin(address)}: {address}: {type(brain).__name__}.init_optimizers makes those of"
        raise ConfigError(f"{what} phase '{phase.name}'; remove one or the other")


def without_shuffle(settings: DatasetSchema) -> DatasetSchema:
    """Return the settings of a dataset for an evaluation."""
    changes: dict[str, Any] = {"shuffle": False, "shuffle_buffer": 0}
    if settings.shuffle_filelist:
        changes["shuffle_filelist"] = False
    return settings.model_copy(update=changes)


def shuffles_by_class(settings: DatasetSchema, loader: Any) -> bool:
    """Return whether a class of the config shuffles the samples: the dataset or a sampler."""
    if not isinstance(loader, SeededLoader):
        return False
    if settings.shuffle_filelist:
        return True
    has_sampler = settings.sampler is not None or settings.batch_sampler is not None
    return settings.shuffle and (has_sampler or loader.streams)


def reader_arguments(settings: DatasetSchema, dataset_class: Any) -> dict[str, Any]:
    """The keys of a dataset that are arguments of its class, as far as they are set."""
    values = {key: getattr(settings, key) for key in READER_KEYS}
    named: dict[str, Any] = {"where": f"dataset.{settings.name}"} if dataset_class is SlotFiles else {}
    if settings.shuffle and shuffles_itself(dataset_class):
        named["shuffle"] = True
    return named | {key: value for key, value in values.items() if value is not None}


def shuffles_itself(dataset_class: Any) -> bool:
    """Whether ``shuffle`` is an argument of a class of streams: a loader can shuffle only what has indices."""
    if not (isinstance(dataset_class, type) and issubclass(dataset_class, IterableDataset)):
        return False
    parameters = inspect.signature(dataset_class).parameters.values()
    return any(each.name == "shuffle" or each.kind is each.VAR_KEYWORD for each in parameters)


def wrap_model(model: nn.Module | Brain, brain: Brain, phase: str, context: Context) -> nn.Module | Brain:
    """Have each plugin that wraps models wrap the one of a phase, in turn; what ``model`` is from here on.

    Raises:
        PluginError: one returned something else than a module that can take its place.
    """
    kind = nn.Module if isinstance(brain, ModuleBrain) else nn.ModuleDict
    wrapped: Any = wrappable(brain)
    values = {"context": context, "phase": phase, "model": wrapped}
    # pluggy would call each with the same model; it keeps the one that is called first at the end.
    for plugin, returned in each_answer(context["hooks"].wrap_model, values):
        if not isinstance(returned, kind | None):
            what = f"plugin '{plugin}', hook wrap_model returned a {type(returned).__name__}"
            raise PluginError(f"{what} for phase '{phase}'; return an nn.{kind.__name__}, or None to leave it as it is")
        if returned is not None:
            values["model"] = wrapped = returned
    wrap(brain, wrapped)
    return wrapped if isinstance(brain, ModuleBrain) else model


def with_fused(
    kind: Any,
    options: Mapping[str, Any],
    groups: Groups,
    module: nn.Module,
    device: torch.device,
    *,
    lazily: bool = False,
) -> Group:
    """The options of an optimizer; with torch's fused implementation, if it has one, for ``fused: auto``.

    On a GPU that is the default, where the config names neither ``fused`` nor ``foreach``: of a fused optimizer nobody
    waits for whether a step is finite. It takes neither sparse gradients, unless in ``lazy_mode``, nor complex parameters.
    """
    others = {key: value for key, value in options.items() if (key, value) != ("fused", "auto")}
    if any(place.keys() & {"fused", "foreach", "differentiable"} for place in (others, *groups)):
        return others
    maker, asked = maker_of(kind), "fused" in options
    fits = all(parameter.is_floating_point() for parameter in module.parameters())
    fits = fits and (lazily or not any(getattr(part, "sparse", False) for part in module.modules()))
    if (asked or device.type == "cuda") and fits and "fused" in inspect.signature(maker).parameters:
        logger.info(f"{maker.__name__} is torch's fused one on {device}; `fused: false` or `foreach: true` is another")
        others["fused"] = True
    return others


def load_optimizer(kind: Any, address: str, config: ConfigView) -> Any:
    """The class that a class path of the config names; the name of one of torch's, or a class, stays as it is."""
    return load_named(kind, address, "Optimizer", config) if isinstance(kind, str) and not kind.isidentifier() else kind


def make(cls: Callable[..., Any], arguments: Mapping[str, Any], address: str, place: str, *bases: type[_T]) -> _T:
    """What a class or function of the config makes of its arguments, which has to be an instance of one of the bases.

    Args:
        cls: the class or function.
        arguments: its keyword arguments.
        address: of the class.
        place: where the arguments are written.
        bases: the classes.

    Raises:
        ConfigError: it does not take these arguments, or needs others, or makes something else.
    """
    name = getattr(cls, "__name__", repr(cls))  # a functools.partial has none
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{address}: {name}: {error}; mend {place}") from error
    instance = cls(**arguments)
    if not isinstance(instance, bases):
        kinds = " or ".join(f"a {base.__name__}" for base in bases)
        raise ConfigError(f"{address}: {name} made a {type(instance).__name__}; name {kinds}")
    return instance
