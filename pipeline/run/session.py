"""Everything before the first stage: the run directory and the log of a run; classes, plugins and context of a runner."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import pluggy
import torch
from loguru import logger

from pipeline import workspaces
from pipeline.check.runner import absent
from pipeline.checkpoint import store
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config import yaml_tree
from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.config.usage import TrackedDict
from pipeline.context import STAGES, TRAIN_STATE, Context, EngineMode, PipelineStage, base_of
from pipeline.errors import ClassPathError, ConfigError, ContextError, ExitCode
from pipeline.run import log, mid_epoch, provenance
from pipeline.run.device import describe_hardware, deterministic, refuse_several_processes, resolve_device
from pipeline.run.directory import (
    RunDirectory,
    begins_anew,
    furthest_runner,
    is_done,
    is_resumable,
    mark_done,
    read_status,
)
from pipeline.run.mid_epoch import MidEpoch
from pipeline.run.provenance import Provenance
from pipeline.run.resume import NEVER, PreviousRun, as_begun, find_previous, reconcile
from pipeline.user_code import class_path, context_flow
from pipeline.user_code.plugins import Plugin, load_plugins, plugin_manager, register_plugins
from pipeline.user_code.tracebacks import user_traceback


def device(config: Config, runner: RunnerSchema) -> torch.device:
    """Where a runner computes.

    Raises:
        ConfigError: the machine has no such device.
    """
    try:
        return resolve_device(runner.device)
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
        user_error = error.with_traceback(user_traceback(error.__traceback__))
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


BeginFit = Callable[[Context, list[PhaseSchema], RunnerSchema], None]

"""Has the Brains of some phases begin their training."""

OWN = ("config", "runner_name", "hooks", "run_dir", "checkpointer", "train_state", "resources")

"""Context keys whose objects the trainer itself goes on with."""


@dataclass
class RunnerSession:
    """A runner that is ready for its first stage.

    Attributes:
        settings: its part of the config.
        context: the context.
        classes: stage -> class.
        plugins: the plugins of this runner, once they are built.
        chosen: what they are built from.
        directory: the run directory.
        mid_epoch: what may not change in the middle of an epoch.
        over: whether every stage has run.
        stopped: whether ``is_exit`` has ended it before its terminal stage: it is not through.
        resumes: whether it goes on from a checkpoint, once it comes to the runner stage.
        trains: whether it has come to the runner stage.
        begin_fit: has the Brains begin their training.
    """

    begin_fit: BeginFit
    settings: RunnerSchema
    context: Context
    classes: dict[str, type[PipelineStage]]
    plugins: pluggy.PluginManager
    chosen: list[Plugin]
    directory: RunDirectory
    over: bool = False
    stopped: bool = False
    resumes: bool = False
    trains: bool = False

    def __post_init__(self) -> None:
        config: Config = dict.__getitem__(self.context, "config")
        self._note_own()
        self.mid_epoch = MidEpoch(self.context, self.settings, config.phases(self.settings))

    @property
    def hooks(self) -> pluggy.HookRelay:
        """What calls the plugins."""
        return self.plugins.hook

    def build_plugins(self) -> None:
        """Build the plugins: from here on, the hooks call them, and checkpoints keep the state of those that have one."""
        register_plugins(self.chosen, self.plugins)
        checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
        checkpointer.add_recoverable(mid_epoch.MID_EPOCH, self.mid_epoch)
        for name, plugin in self.plugins.list_name_plugin():
            if hasattr(plugin, "state_dict") and hasattr(plugin, "load_state_dict"):
                checkpointer.add_recoverable(f"plugin:{name}", plugin)

    def build(self, stage: str) -> PipelineStage:
        """The stage, built with its ``<stage>_args``."""
        arguments: dict[str, Any] = getattr(self.settings, f"{stage}_args")
        return self.classes[stage].from_context(self.context, **arguments)

    def run_stage(self, stage: str) -> None:
        """Build the stage and call its method; it is held to the keys that it declares.

        Raises:
            ContextError: a key that it reads is not there before, or one that it writes is not there after.
        """
        if stage == "runner" and not self.trains:
            self.trains = True
            self.begin()
        # Plugins may have put theirs there.
        self._note_own()
        place, built, method = self.place(stage), self.build(stage), STAGES[stage]
        context_flow.check_reads(built, method, place, self.context)
        if stage == "runner":
            self.tell_unread()
        getattr(built, method)(self.context)
        self.check_own(place)
        # What the stage has saved is on disk before the next begins, or it is this stage that has failed.
        dict.__getitem__(self.context, "checkpointer").wait()
        context_flow.check_writes(built, method, place, self.context)

    def tell_unread(self) -> None:
        """Before the first batch: log each hyper-parameter that nobody has read, and that no source names."""
        config: Config = dict.__getitem__(self.context, "config")
        # Of `env`, which is the whole config as plain data, nobody knows what was read.
        if not any(each.key == "env" and each.stage != "trainer" for each in self.context.accesses):
            for line in config.reads.unread_so_far(config.tree):
                logger.warning(line)

    def _note_own(self) -> None:
        self._own = {key: dict.__getitem__(self.context, key) for key in OWN}

    def check_own(self, place: str) -> None:
        """After a stage: what the trainer goes on with is what it was, and the device is one.

        Raises:
            ContextError: it is not.
        """
        if replaced := self.take_back():
            what = f"replaced context['{replaced[0]}'], with which the trainer goes on"
            raise ContextError(f"{place} {what}; change what is in it, or use a key of your own")
        device = dict.get(self.context, "device")
        if not isinstance(device, torch.device):
            raise ContextError(f"{place} wrote context['device'] = {device!r}; write a torch.device")

    def take_back(self) -> list[str]:
        """Put back what the trainer goes on with, where a stage has put something else in its place; which that was."""
        replaced = [key for key, own in self._own.items() if dict.get(self.context, key) is not own]
        for key in replaced:
            dict.__setitem__(self.context, key, self._own[key])
        return replaced

    def begin(self) -> None:
        """Have the Brains begin; then, of a run that is resumed, everything is as it was."""
        if self.settings.kind == "train":
            config: Config = dict.__getitem__(self.context, "config")
            self.begin_fit(self.context, config.phases(self.settings), self.settings)
            checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
            checkpointer.begin(dict.get(self.context, "model"))
        if self.resumes:
            self.restore()

    def restore(self) -> None:
        """Go on from the newest valid checkpoint, whichever startup stage has run.

        Raises:
            NoCheckpointError: some were committed, and none is valid.
            CheckpointError: the run is not the one that saved it.
        """
        checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
        checkpointer.restore(self.context)
        if checkpointer.resumed:
            self.mid_epoch.check(checkpointer.resumed)
        else:
            logger.warning(f"{checkpointer.folder}: no checkpoint was ever saved; beginning again")

    def place(self, stage: str) -> str:
        """``startup (tdm_startup.Startup, config.yaml:12)``, for messages."""
        config: Config = dict.__getitem__(self.context, "config")
        origin = config.origin(f"runner.{self.settings.name}.{stage}_class_path")
        cls = self.classes.get(stage)
        return (
            f"{stage} ({cls.__module__.rpartition('.')[2]}.{cls.__name__}, {origin})" if cls else f"{stage} ({origin})"
        )

    def tell_status(self) -> None:
        """Say in ``status.json`` that the runner is running."""
        train_state = dict.__getitem__(self.context, "train_state")
        self.directory.write_status("running", resumable=is_resumable(self.directory), train_state=train_state)


@dataclass
class Run:
    """A run with its directory made and its classes loaded.

    Attributes:
        config: the config, ``{run_dir}`` replaced.
        directory: the run directory.
        trainers: runner name -> the trainer that runs it, in the order of ``mode``.
        stage_classes: runner name -> stage -> class.
        devices: runner name -> device.
        record: runner name -> the accesses of its context.
        resumed: whether the run goes on in the directory of an earlier one.
        ended: whether a runner has failed, and told of it.
    """

    config: Config
    directory: RunDirectory
    trainers: dict[str, Any]
    stage_classes: dict[str, dict[str, type[PipelineStage]]]
    devices: dict[str, torch.device]
    record: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    resumed: bool = False
    ended: bool = False

    def is_done(self, name: str) -> bool:
        """Whether a runner need not run: it was finished before the run was interrupted."""
        done = self.resumed and is_done(self.directory, name)
        if done:
            logger.info(f"{name} is finished already")
        return done

    def close_runner(self, runner: RunnerSession) -> None:
        """Keep the record of a runner that is over, and that it is, unless ``is_exit`` has ended it."""
        self.keep_record(runner.context)
        if not runner.stopped:
            mark_done(self.directory, runner.settings.name, dict.__getitem__(runner.context, "train_state"))

    def keep_record(self, context: Context) -> None:
        """Bring ``context.json`` up to date with a runner's accesses."""
        self.record[str(dict.get(context, "runner_name"))] = context.record()
        self.directory.write_json("context.json", self.record)

    def tell_unread(self, contexts: Mapping[str, Context]) -> None:
        """Log what the config says and nobody read: a setting without effect, or a name misspelt."""
        reads = self.config.reads
        # Of `env`, which is the whole config as plain data, nobody knows what was read.
        took = {(access.stage, access.key) for context in contexts.values() for access in context.accesses}
        reads.everything |= any(key == "env" and stage != "trainer" for stage, key in took)
        for line in reads.unread(self.config.tree, list(contexts)):
            logger.warning(line)

    def finish(self, contexts: Mapping[str, Context]) -> None:
        """Say in ``status.json`` that all is done, with the counters of the runner that trained furthest; or is to go on."""
        # An infer runner has the counters of the checkpoint that it was given, which may be another run's.
        trained = [runner.name for runner in self.config.runners if runner.kind == "train"]
        furthest = furthest_runner(self.directory, trained or list(self.trainers))
        left = [name for name in self.trainers if not is_done(self.directory, name)]
        last = list(contexts.values())[-1] if contexts else Context()
        if dict.get(last, "is_exit") and left:
            self._stop(last, left, furthest if dict.get(last, "is_infer") else dict.__getitem__(last, "train_state"))
            return
        if contexts:
            self.tell_unread(contexts)
        elif read_status(self.directory).get("state") == "done":
            # Otherwise it was interrupted after its last runner, just before this.
            return
        self.directory.write_status("done", exit_code=ExitCode.DONE, train_state=furthest)

    def _stop(self, context: Context, left: Sequence[str], counters: Mapping[str, int]) -> None:
        """Say that ``is_exit`` has ended the run, where it was written, and which runners are not through."""
        written = [each for each in context.accesses if (each.key, each.action) == ("is_exit", "write")][-1]
        where = f"{written.stage} ({written.where}) of {dict.get(context, 'runner_name')}"
        reason = f"context['is_exit'] was set in {where}"
        logger.info(f"{reason}; the run ends here, and a resumed one goes on with {', '.join(left)}")
        resumable = is_resumable(self.directory)
        code = ExitCode.DONE
        self.directory.write_status("stopped", exit_code=code, reason=reason, resumable=resumable, train_state=counters)


@contextmanager
def open_run(config: Config, trainer: Any, trainer_base: type, resume: str | Path = NEVER) -> Iterator[Run]:
    """Load every class, then make or reopen the run directory, lock it, and log into it until the block ends.

    Args:
        config: what is to be run.
        resume: ``never`` makes a new directory; ``auto`` goes on in the newest of this config, if there is one; a path
            goes on in that run directory, or from that checkpoint in one.
        trainer: runs every runner whose ``trainer_class`` it is an instance of.
        trainer_base: what each ``trainer_class`` derives from.

    Raises:
        ClassPathError, PluginError: a class cannot be loaded; no directory was made.
        ConfigError: a device is not there, or several processes were started.
        LockedError: another process uses the directory.
        NoCheckpointError: the checkpoint to go on from is damaged.
        StorageError: the directory cannot be made or written.
    """
    refuse_several_processes()
    for folder in workspaces.renew():
        logger.info(f"{folder}: has changed since it was imported, and is imported anew")
    devices = {runner.name: device(config, runner) for runner in config.runners}
    trainers = {runner.name: trainer_of(config, runner, trainer, trainer_base) for runner in config.runners}
    stage_classes = {runner.name: stage_classes_of(config, runner) for runner in config.runners}
    load_plugins(config.tree, config.workspace)
    with _output_dir(config) as output_dir:
        earlier = find_previous(output_dir, config, resume)
        config = _with_first_weights(config, earlier)
        directory = earlier.directory if earlier else RunDirectory.new(output_dir, config.name)
        with directory.locked(), log.to_file(directory.path / "log.txt", rank=0):
            record = _record(config, directory, devices)
            if earlier:
                reconcile(earlier, record, list(stage_classes))
            else:
                record.keep(directory)
            directory.add(stage_classes)
            in_run = config.in_run(directory.path)
            for runner in in_run.runners:
                if not is_done(directory, runner.name):
                    store.link_checkpoint_dir(directory.path, runner)
            yield Run(in_run, directory, trainers, stage_classes, devices, resumed=earlier is not None)


def _with_first_weights(config: Config, earlier: PreviousRun | None) -> Config:
    """The config with its links as the run began with them; the first weights of each runner that needs them are there.

    Raises:
        ConfigError: they are not; nothing was made.
    """
    config, faults = as_begun(config, earlier) if earlier else config, []
    for runner in config.runners:
        address, node = f"runner.{runner.name}.init_model_path", config.tree.find(f"runner.{runner.name}")
        begins = earlier is None or begins_anew(earlier.directory, runner.name)
        if node and begins and (message := absent(node)):
            faults.append(config.origin(address).fault(address, message))
    if faults:
        raise ConfigError(faults)
    return config


@contextmanager
def _output_dir(config: Config) -> Iterator[Path]:
    """Where the run directory goes; that of a debug run is removed at its end, unless it is to be kept."""
    if not any(runner.debug and not runner.debug_persistently for runner in config.runners):
        yield Path(config.settings.output_dir)
        return
    with TemporaryDirectory(prefix="pipeline-debug-") as folder:
        logger.info(f"debug run: nothing of it is kept; {folder} is removed at its end")
        yield Path(folder)


def _record(config: Config, directory: RunDirectory, devices: Mapping[str, torch.device]) -> Provenance:
    """What the run directory is to keep of how the run is made."""
    hardware = {**describe_hardware(), "devices": {name: str(each) for name, each in devices.items()}}
    return Provenance(
        yaml_tree.dump(_writable(config.plain(expanded=False))),
        provenance.command_text(
            config.path,
            config.workspace,
            config.overrides,
            run_dir=directory.path,
            name=config.settings.name,
            links=config.followed(),
        ),
        provenance.environment_of(directory, config.workspace, hardware),
        config.swaps or "every stage is the default\n",
        provenance.source_copies(config.sources, config.workspace),
    )


def _writable(value: Any) -> Any:
    """Classes and other objects given from Python, as text."""
    if isinstance(value, dict):
        return {str(name): _writable(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(child) for child in value]
    if isinstance(value, type | FunctionType):
        return class_path.describe(value)
    # Where an object is in memory is another thing in each process.
    plain = isinstance(value, str | int | float | bool | None)
    return value if plain else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _env_of(config: Config, settings: RunnerSchema) -> dict[str, Any]:
    """The plain dict of the config, with the phases of the runner alone."""
    env = copy.deepcopy(config.plain())
    written = {phase["name"]: phase for phase in env["phase"]}
    env["phase"] = [written[phase.name] for phase in config.phases(settings)]
    return env


def open_runner(name: str, run: Run, resources: ExitStack, begin_fit: BeginFit) -> RunnerSession:
    """Choose the plugins of a runner and fill its context with what the trainer writes.

    Args:
        name: of the runner.
        run: that it is part of.
        resources: what is closed at its end.
        begin_fit: has the Brains begin their training.
    """
    # A config of its own: what a runner does to the arguments that it is given, the next does not see.
    config = run.config.in_run(run.directory.path)
    settings = config.runner(name)
    plugins, folder = plugin_manager(), run.directory.path / name / "checkpoints"
    env = _env_of(config, settings)
    context = Context(
        status="uninit",
        is_exit=False,
        config_yaml=str(config.path) if config.path else None,
        config=config,
        env=env,
        runner_name=name,
        phases=[TrackedDict(copy.deepcopy(each), f"phase.{each['name']}", config.reads) for each in env["phase"]],
        hyper_parameters=TrackedDict(copy.deepcopy(env["hyper_parameters"]), "hyper_parameters", config.reads),
        engine=EngineMode.SINGLE,
        is_fleet=False,
        fleet_mode="",
        is_infer=settings.kind == "infer",
        device=run.devices[name],
        rank=0,
        local_rank=0,
        world_size=1,
        hooks=plugins.hook,
        run_dir=run.directory.path,
        checkpointer=Checkpointer(folder, keep_last=settings.keep_last, asynchronous=True),
        train_state=dict.fromkeys(TRAIN_STATE, 0),
        checkpoints={},
        resources=resources,
    )
    resources.callback(dict.__getitem__(context, "checkpointer").wait)
    chosen = load_plugins(config.tree, config.workspace)
    resumes = run.resumed and settings.kind == "train"
    runner = RunnerSession(
        begin_fit, settings, context, run.stage_classes[name], plugins, chosen, run.directory, resumes=resumes
    )
    if settings.threads:
        resources.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(settings.threads)
    if settings.deterministic:
        resources.enter_context(deterministic())
    return runner
