"""What stands before the first stage: the run directory and the log of a run; classes, plugins and context of a runner."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import torch
from loguru import logger

from pipeline import class_path, discovery, log, run_record, workspaces
from pipeline.checkpoint import location
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checks.init_check import absent
from pipeline.config import yaml_text
from pipeline.config.load import Config
from pipeline.config.reads import ReadDict
from pipeline.context import TRAIN_STATE, Context, EngineMode, PipelineStage
from pipeline.distributed import launch
from pipeline.distributed.determinism import deterministic
from pipeline.errors import ConfigError, ExitCode
from pipeline.loading import device, stage_classes_of, trainer_of
from pipeline.open_runner import BeginFit, OpenRunner
from pipeline.resuming import standing
from pipeline.resuming.reopening import NEVER, Earlier, as_begun, bring_up_to_date, reopened
from pipeline.run_directory import RunDirectory
from pipeline.run_record import RunRecord


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
        done = self.resumed and standing.is_done(self.directory, name)
        if done:
            logger.info(f"{name} is finished already")
        return done

    def close_runner(self, runner: OpenRunner) -> None:
        """Keep the record of a runner that is over, and that it is, unless ``is_exit`` has ended it."""
        self.keep_record(runner.context)
        if not runner.stopped:
            standing.mark_done(self.directory, runner.settings.name, dict.__getitem__(runner.context, "train_state"))

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
        furthest = standing.furthest(self.directory, trained or list(self.trainers))
        left = [name for name in self.trainers if not standing.is_done(self.directory, name)]
        last = list(contexts.values())[-1] if contexts else Context()
        if dict.get(last, "is_exit") and left:
            self._stop(last, left, furthest if dict.get(last, "is_infer") else dict.__getitem__(last, "train_state"))
            return
        if contexts:
            self.tell_unread(contexts)
        elif standing.status(self.directory).get("state") == "done":
            # Otherwise it was interrupted after its last runner, just before this.
            return
        self.directory.write_status("done", exit_code=ExitCode.DONE, train_state=furthest)

    def _stop(self, context: Context, left: Sequence[str], counters: Mapping[str, int]) -> None:
        """Say that ``is_exit`` has ended the run, where it was written, and which runners are not through."""
        written = [each for each in context.accesses if (each.key, each.action) == ("is_exit", "write")][-1]
        where = f"{written.stage} ({written.where}) of {dict.get(context, 'runner_name')}"
        reason = f"context['is_exit'] was set in {where}"
        logger.info(f"{reason}; the run ends here, and a resumed one goes on with {', '.join(left)}")
        resumable = standing.is_resumable(self.directory)
        code = ExitCode.DONE
        self.directory.write_status("stopped", exit_code=code, reason=reason, resumable=resumable, train_state=counters)


@contextmanager
def open_run(config: Config, trainer: Any, trainer_base: type, resume: str | Path = NEVER) -> Iterator[OpenRun]:
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
    launch.refuse_several_processes()
    for folder in workspaces.renew():
        logger.info(f"{folder}: has changed since it was imported, and is imported anew")
    devices = {runner.name: device(config, runner) for runner in config.runners}
    trainers = {runner.name: trainer_of(config, runner, trainer, trainer_base) for runner in config.runners}
    stage_classes = {runner.name: stage_classes_of(config, runner) for runner in config.runners}
    discovery.load(config.tree, config.workspace)
    with _output_dir(config) as output_dir:
        earlier = reopened(output_dir, config, resume)
        config = _with_first_weights(config, earlier)
        directory = earlier.directory if earlier else RunDirectory.new(output_dir, config.name)
        with directory.locked(), log.to_file(directory.path / "log.txt", rank=0):
            record = _record(config, directory, devices)
            if earlier:
                bring_up_to_date(earlier, record, list(stage_classes))
            else:
                record.keep(directory)
            directory.add(stage_classes)
            in_run = config.in_run(directory.path)
            for runner in in_run.runners:
                if not standing.is_done(directory, runner.name):
                    location.place(directory.path, runner)
            yield OpenRun(in_run, directory, trainers, stage_classes, devices, resumed=earlier is not None)


def _with_first_weights(config: Config, earlier: Earlier | None) -> Config:
    """The config with its links as the run began with them; the first weights of each runner that needs them are there.

    Raises:
        ConfigError: they are not; nothing was made.
    """
    config, faults = as_begun(config, earlier) if earlier else config, []
    for runner in config.runners:
        address, node = f"runner.{runner.name}.init_model_path", config.tree.find(f"runner.{runner.name}")
        begins = earlier is None or standing.begins(earlier.directory, runner.name)
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


def _record(config: Config, directory: RunDirectory, devices: Mapping[str, torch.device]) -> RunRecord:
    """What the run directory is to keep of how the run is made."""
    hardware = {**launch.hardware(), "devices": {name: str(each) for name, each in devices.items()}}
    return RunRecord(
        yaml_text.dump(_writable(config.plain(expanded=False))),
        run_record.command(
            config.path,
            config.workspace,
            config.overrides,
            run_dir=directory.path,
            name=config.settings.name,
            links=config.followed(),
        ),
        run_record.environment(directory, config.workspace, hardware),
        config.swaps or "every stage is the default\n",
        run_record.sources(config.sources, config.workspace),
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


def open_runner(name: str, run: OpenRun, resources: ExitStack, begin_fit: BeginFit) -> OpenRunner:
    """Choose the plugins of a runner and fill its context with what the trainer writes.

    Args:
        name: of the runner.
        run: that it is part of.
        resources: what is closed at its end.
        begin_fit: has the Brains begin their training.
    """
    # A config of its own: what a runner does to the arguments that it is given, the next does not see.
    config = run.config.in_run(run.directory.path)
    settings = next(runner for runner in config.runners if runner.name == name)
    plugins, folder = discovery.manager(), run.directory.path / name / "checkpoints"
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
        checkpointer=Checkpointer(folder, keep_last=settings.keep_last, asynchronous=True),
        train_state=dict.fromkeys(TRAIN_STATE, 0),
        checkpoints={},
        resources=resources,
    )
    resources.callback(dict.__getitem__(context, "checkpointer").wait)
    chosen = discovery.load(config.tree, config.workspace)
    resumes = run.resumed and settings.kind == "train"
    runner = OpenRunner(
        begin_fit, settings, context, run.stage_classes[name], plugins, chosen, run.directory, resumes=resumes
    )
    if settings.threads:
        resources.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(settings.threads)
    if settings.deterministic:
        resources.enter_context(deterministic())
    return runner
