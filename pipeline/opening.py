"""What stands before the first stage: the run directory and the log of a run; classes, plugins and context of a runner."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pluggy
import torch
from loguru import logger

from pipeline import class_path, contracts, discovery, log
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config import yaml_text
from pipeline.config.load import Config
from pipeline.config.reads import ReadDict
from pipeline.config.schema import RunnerSchema
from pipeline.context import TRAIN_STATE, Context, EngineMode
from pipeline.discovery import Plugin
from pipeline.distributed import launch
from pipeline.distributed.determinism import deterministic
from pipeline.errors import ClassPathError, ConfigError, ExitCode
from pipeline.reopening import NEVER, reopened, tell_changes
from pipeline.run_directory import RunDirectory
from pipeline.stages.base import METHODS, StageBase
from pipeline.user_code import user_frames


@dataclass
class OpenRun:
    """A run with its directory made and its classes loaded.

    Attributes:
        config: the config, ``{run_dir}`` replaced.
        directory: the run directory.
        trainers: runner name -> the trainer that runs it, in the order of ``mode``.
        stage_classes: runner name -> stage -> class.
        devices: runner name -> device.
        record: runner name -> the accesses of its context.
        resumed: whether the run goes on in the directory of an earlier one.
    """

    config: Config
    directory: RunDirectory
    trainers: dict[str, Any]
    stage_classes: dict[str, dict[str, type[StageBase]]]
    devices: dict[str, torch.device]
    record: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    resumed: bool = False

    def is_done(self, name: str) -> bool:
        """Whether a runner need not run: it was finished before the run was interrupted."""
        done = self.resumed and self.directory.is_done(name)
        if done:
            logger.info(f"{name} is finished already")
        return done

    def close_runner(self, context: Context) -> None:
        """Keep the record of a runner that is over, and that it is."""
        self.keep_record(context)
        self.directory.mark_done(str(dict.get(context, "runner_name")), dict.__getitem__(context, "train_state"))

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
        """Say in ``status.json`` that all is done, with the counters of the runner that trained furthest."""
        if not contexts:
            return
        self.tell_unread(contexts)
        furthest = max((context["train_state"] for context in contexts.values()), key=lambda state: state["iteration"])
        self.directory.write_status("done", exit_code=ExitCode.DONE, train_state=furthest)


@dataclass
class OpenRunner:
    """A runner that is ready for its first stage.

    Attributes:
        settings: its part of the config.
        context: the context.
        classes: stage -> class.
        plugins: the plugins of this runner, once they are built.
        chosen: what they are built from.
        directory: the run directory.
        over: whether every stage has run.
        resumes: whether it goes on from a checkpoint, once it comes to the runner stage.
    """

    settings: RunnerSchema
    context: Context
    classes: dict[str, type[StageBase]]
    plugins: pluggy.PluginManager
    chosen: list[Plugin]
    directory: RunDirectory
    over: bool = False
    resumes: bool = False

    @property
    def hooks(self) -> pluggy.HookRelay:
        """What calls the plugins."""
        return self.plugins.hook

    def build_plugins(self) -> None:
        """Build the plugins: from here on, the hooks call them, and checkpoints keep the state of those that have one."""
        discovery.register(self.chosen, self.plugins)
        checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
        for name, plugin in self.plugins.list_name_plugin():
            if hasattr(plugin, "state_dict") and hasattr(plugin, "load_state_dict"):
                checkpointer.add_recoverable(f"plugin:{name}", plugin)

    def build(self, stage: str) -> StageBase:
        """The stage, built with its ``<stage>_args``."""
        arguments: dict[str, Any] = getattr(self.settings, f"{stage}_args")
        return self.classes[stage].from_context(self.context, **arguments)

    def run_stage(self, stage: str) -> None:
        """Build the stage and call its method; it is held to the keys that it declares.

        Raises:
            ContextError: a key that it reads is not there before, or one that it writes is not there after.
        """
        if stage == "runner" and self.resumes:
            self.resumes = False
            self.restore()
        place, built = self.place(stage), self.build(stage)
        contracts.check_reads(built, place, self.context)
        getattr(built, METHODS[stage][1])(self.context)
        # What the stage has saved is on disk before the next begins, or it is this stage that has failed.
        dict.__getitem__(self.context, "checkpointer").wait()
        contracts.check_writes(built, place, self.context)

    def restore(self) -> None:
        """Go on from the newest valid checkpoint, whichever startup stage has run."""
        checkpointer: Checkpointer = dict.__getitem__(self.context, "checkpointer")
        if not checkpointer.restore(self.context):
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
        self.directory.write_status("running", train_state=dict.__getitem__(self.context, "train_state"))


@contextmanager
def open_run(config: Config, trainer: Any, trainer_base: type, resume: str | Path = NEVER) -> Iterator[OpenRun]:
    """Load every class, then make or reopen the run directory, lock it, and log into it until the block ends.

    Args:
        config: what is to be run.
        resume: ``never`` makes a new directory; ``auto`` goes on in the newest of this config, if there is one; a path
            goes on in that.
        trainer: runs every runner whose ``trainer_class`` it is an instance of.
        trainer_base: what each ``trainer_class`` derives from.

    Raises:
        ClassPathError, PluginError: a class cannot be loaded; no directory was made.
        ConfigError: a device is not there, or several processes were started.
        StorageError: the directory cannot be made.
    """
    launch.refuse_several_processes()
    devices = {runner.name: _device(config, runner) for runner in config.runners}
    trainers = {runner.name: _trainer(config, runner, trainer, trainer_base) for runner in config.runners}
    stage_classes = {runner.name: _stage_classes(config, runner) for runner in config.runners}
    discovery.load(config.tree, config.workspace)
    with _output_dir(config) as output_dir:
        directory = reopened(output_dir, config.name, resume)
        resumed = directory is not None
        directory = directory or RunDirectory.new(output_dir, config.name)
        directory.add(stage_classes)
        with directory.locked(), log.to_file(directory.path / "log.txt", rank=0):
            if resumed:
                tell_changes(directory, _text(config))
            directory.write("config.yaml", _text(config))
            directory.keep_command(config.path, config.workspace, config.overrides)
            directory.keep_environment(config.workspace, launch.hardware())
            directory.keep_sources(config.sources, config.workspace)
            directory.write("swaps.txt", config.swaps or "every stage is the default\n")
            in_run = config.in_run(directory.path)
            yield OpenRun(in_run, directory, trainers, stage_classes, devices, resumed=resumed)


@contextmanager
def _output_dir(config: Config) -> Iterator[Path]:
    """Where the run directory goes; that of a debug run is removed at its end, unless it is to be kept."""
    if not any(runner.debug and not runner.debug_persistently for runner in config.runners):
        yield Path(config.settings.output_dir)
        return
    with TemporaryDirectory(prefix="pipeline-debug-") as folder:
        logger.info(f"debug run: nothing of it is kept; {folder} is removed at its end")
        yield Path(folder)


def _device(config: Config, runner: RunnerSchema) -> torch.device:
    try:
        return launch.device(runner.device)
    except ConfigError as error:
        address = f"runner.{runner.name}.device"
        raise ConfigError([config.origin(address).fault(address, str(error))]) from error


def _trainer(config: Config, runner: RunnerSchema, present: Any, base: type) -> Any:
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


def _stage_classes(config: Config, runner: RunnerSchema) -> dict[str, type[StageBase]]:
    return {
        stage: load_class(config, runner, f"{stage}_class_path", stage.capitalize(), base)
        for stage, (base, _) in METHODS.items()
    }


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


def _text(config: Config) -> str:
    return yaml_text.dump(_writable(config.plain(expanded=False)))


def _writable(value: Any) -> Any:
    """Classes and other objects given from Python, as text."""
    if isinstance(value, dict):
        return {str(name): _writable(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(child) for child in value]
    if isinstance(value, type):
        return class_path.describe(value)
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def open_runner(name: str, run: OpenRun, resources: ExitStack) -> OpenRunner:
    """Choose the plugins of a runner and fill its context with what the trainer writes."""
    # A config of its own: what a runner does to the arguments that it is given, the next does not see.
    config = run.config.in_run(run.directory.path)
    settings = next(runner for runner in config.runners if runner.name == name)
    plugins = discovery.manager()
    folder = run.directory.path / name
    env = copy.deepcopy(config.plain())
    written = {phase["name"]: phase for phase in env["phase"]}
    env["phase"] = [written[phase.name] for phase in config.phases(settings)]
    context = Context(
        status="uninit",
        is_exit=False,
        config_yaml=str(config.path) if config.path else None,
        config=config,
        env=env,
        runner_name=name,
        phases=[ReadDict(copy.deepcopy(each), f"phase.{each['name']}", config.reads) for each in env["phase"]],
        hyper_parameters=ReadDict(copy.deepcopy(env["hyper_parameters"]), "hyper_parameters", config.reads),
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
        checkpointer=Checkpointer(folder / "checkpoints", keep_last=settings.keep_last, asynchronous=True),
        train_state=dict.fromkeys(TRAIN_STATE, 0),
        resources=resources,
    )
    resources.callback(dict.__getitem__(context, "checkpointer").wait)
    chosen = discovery.load(config.tree, config.workspace)
    resumes = run.resumed and settings.kind == "train"
    runner = OpenRunner(settings, context, run.stage_classes[name], plugins, chosen, run.directory, resumes=resumes)
    if settings.deterministic:
        resources.enter_context(deterministic())
    return runner
