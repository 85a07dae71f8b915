"""Opening a run, then each of its runners: all that happens before the first stage."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from loguru import logger
from torch.nn.parameter import is_lazy

from pipeline import workspaces
from pipeline.check.runner import missing_checkpoint
from pipeline.checkpoint import store, weights
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import MID_EPOCH
from pipeline.checkpoint.storage import short, storing
from pipeline.config.load import Config
from pipeline.config.schema import ABOUT, PhaseSchema, RunnerSchema
from pipeline.context import STAGES, Context, PipelineStage, TrainingLoop, base_of
from pipeline.data.loader import dataset_digest, end_workers
from pipeline.distributed.agreement import share_wishes
from pipeline.distributed.device import deterministic
from pipeline.distributed.launch import attempt_store, find_devices
from pipeline.distributed.world import SINGLE, Failure, World, joined
from pipeline.errors import ClassPathError, ConfigError, ContextError, ExitCode
from pipeline.run import log
from pipeline.run.directory import RunDirectory
from pipeline.run.hook_gradients import set_aside_in_hooks
from pipeline.run.mid_epoch import MidEpoch
from pipeline.run.plugin_report import PluginReport
from pipeline.run.provenance import Provenance, digests, imported_packages
from pipeline.run.resume import (
    NEVER,
    RUN_DIR,
    PreviousRun,
    find_previous,
    reconcile,
    resume_command,
    train_on,
    with_original_links,
)
from pipeline.run.run_context import listen, new_context
from pipeline.run.run_summary import log_summary
from pipeline.signals import SHUTDOWN
from pipeline.user_code import class_path, context_flow
from pipeline.user_code.plugin_calls import failing_plugin, register_plugins
from pipeline.user_code.plugins import load_plugins, plugin_manager
from pipeline.user_code.tracebacks import user_traceback, with_traceback


@contextmanager
def open_run(config: Config, trainer: Any, trainer_base: type, resume: str | Path = NEVER) -> Iterator[Run]:
    """Load every class, make or reopen the run directory, lock it, and log into it until the block ends.

    Args:
        config: what is to be run; it was checked.
        trainer: runs every runner whose ``trainer_class`` it is an instance of.
        trainer_base: what each ``trainer_class`` derives from.
        resume: ``never`` makes a new directory; ``auto`` resumes the newest run of this config, if there is one; a path
            resumes the run in that directory, or from that checkpoint in one; in an empty folder a new one begins.

    Raises:
        ClassPathError, PluginError: a class cannot be loaded; no directory was made.
        ConfigError: a device or the initial weights are missing, or the environment of a launcher is incomplete.
        LockedError: another process uses the directory.
        NoCheckpointError: the checkpoint to resume from is damaged.
        StorageError: the directory cannot be made or written.
    """
    for folder in workspaces.renew():
        logger.info(f"{folder}: has changed since it was imported, and is imported anew")
    timeout = max(runner.collective_timeout for runner in config.runners)
    with joined(timeout) as world, ExitStack() as stack:
        # What one process cannot do ends all of them.
        classes = world.attempt(lambda: _load_classes(config, trainer, trainer_base, world))
        leader = _lead(config, classes, resume, world, _compare_processes(config, classes, world))
        run = world.attempt(lambda: stack.enter_context(leader) if world.is_main else None)
        place: Any = world.broadcast(run and (run.directory.path, run.directory.holder(), run.resumed))
        yield world.attempt(lambda: run or stack.enter_context(_follow(config, classes, world, *place)))


# The trainers, the classes of the stages, and the devices; each by runner.
_Classes = tuple[dict[str, Any], dict[str, dict[str, type[PipelineStage]]], dict[str, torch.device]]


def _load_classes(config: Config, trainer: Any, trainer_base: type, world: World) -> _Classes:
    devices = find_devices(config, world)
    trainers = {runner.name: load_trainer(config, runner, trainer, trainer_base) for runner in config.runners}
    stage_classes = {runner.name: load_stages(config, runner) for runner in config.runners}
    load_plugins(config.tree, config.workspace, several=world.size > 1)
    return trainers, stage_classes, devices


def _compare_processes(config: Config, classes: _Classes, world: World) -> list[dict[str, Any]]:
    """Raise unless several processes run the same; which they are, by rank.

    Raises:
        ConfigError: this one has another config, other code or other versions than rank 0.
    """
    if world.size == 1:
        return []
    world.require_equal(digests(config), "give all processes the same config, code and packages")
    devices = {name: str(device) for name, device in classes[-1].items()}
    return world.all_gather({"host": socket.gethostname(), "pid": os.getpid(), "devices": devices})


@contextmanager
def _lead(
    config: Config, classes: _Classes, resume: str | Path, world: World, processes: list[dict[str, Any]]
) -> Iterator[Run]:
    """The run of rank 0, which makes or reopens its directory."""
    trainers, _, devices = classes
    with _output_dir(config) as output_dir:
        attempts = attempt_store()
        previous = find_previous(output_dir, config, resume, attempts)
        place = previous and previous.directory
        if place and place.is_empty():
            previous = None
        if previous:
            config = with_original_links(config, previous)
            previous = train_on(previous, config)
        _check_initial_weights(config, previous)
        directory = place or RunDirectory.new(output_dir, config.name)
        directory.describe(config.settings.model_dump(include={*ABOUT}), **({"ranks": world.size} if processes else {}))
        with directory.locked(), log.to_file(directory.path / "log.txt", rank=0):
            provenance = Provenance.capture(config, directory, devices, processes)
            if previous:
                reconcile(previous, provenance, list(trainers))
            else:
                logger.info(f"run directory {short(directory.path)}")
                provenance.write(directory)
            if attempts:
                attempts.set(RUN_DIR, str(directory.path))
            directory.add(trainers)
            command = resume_command(config, directory.path, world, resume) if _is_kept(config) else ""
            config = config.in_run(directory.path)
            for runner in config.runners:
                if not directory.is_done(runner.name):
                    store.link_checkpoint_dir(directory.path, runner)
            run = Run(config, directory, *classes, previous is not None, world=world, resume_command=command)
            SHUTDOWN.say_at_once(
                f"to go on from its newest checkpoint:\n  {command}" if command else "", log.on_terminal()
            )
            for note in config.notes_about("plugins"):
                run.warn(note)
            yield run
            if run.sessions:
                # Those that it has imported on its way, too.
                provenance.environment["packages"] = imported_packages()
                provenance.write(directory, only={Path("environment.json")})


@contextmanager
def _follow(config: Config, classes: _Classes, world: World, path: Path, holder: str, resumed: bool) -> Iterator[Run]:
    """The run of another process than rank 0; in its directory this one writes its log alone."""
    directory = RunDirectory(path, follows=True)
    directory.wait_for(holder, world.rank)
    if resumed:
        config = with_original_links(config, PreviousRun(directory))
    folder = path / "ranks" / f"{world.rank:05d}"
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with log.to_file(folder / "log.txt", rank=world.rank):
        yield Run(config.in_run(path), directory, *classes, resumed, world=world)


def load_trainer(config: Config, runner: RunnerSchema, trainer: Any, base: type) -> Any:
    """The trainer of a runner: ``trainer`` where it is of the class that the runner names, else a new one of that class.

    Raises:
        ClassPathError: the class cannot be loaded, or built.
    """
    cls = load_class(config, runner, "trainer_class", "Trainer", base)
    if isinstance(trainer, cls):
        return trainer
    try:
        return cls(config)
    except Exception as error:
        address = f"runner.{runner.name}.trainer_class"
        message = f"{config.origin(address)}: {address}: {cls.__name__}(config) raised {type(error).__name__}: {error}"
        user_error = error.with_traceback(user_traceback(error.__traceback__))
        raise ClassPathError(f"{message}; mend it", user_error) from error


def load_stages(config: Config, runner: RunnerSchema) -> dict[str, type[PipelineStage]]:
    """Stage -> class.

    Raises:
        ClassPathError: one cannot be loaded.
    """
    bases: dict[str, type] = {stage: class_path.load(class_path.parse(base_of(stage))) for stage in STAGES}
    return {
        stage: load_class(config, runner, f"{stage}_class_path", stage.capitalize(), base)
        for stage, base in bases.items()
    }


def load_class(config: Config, runner: RunnerSchema, key: str, name: str, base: type) -> Any:
    """The class that a key of a runner names, imported and checked.

    Raises:
        ClassPathError: it cannot be loaded; the message begins with where the config says so.
    """
    return class_path.load_named(getattr(runner, key), f"runner.{runner.name}.{key}", name, config, base=base)


@contextmanager
def _output_dir(config: Config) -> Iterator[Path]:
    """The output directory; that of a debug run is temporary, unless ``debug_persistently`` is set."""
    if _is_kept(config):
        yield Path(config.settings.output_dir)
        return
    with TemporaryDirectory(prefix="pipeline-debug-") as folder:
        logger.info(f"debug run: nothing of it is kept; {folder} is removed at its end")
        yield Path(folder)


def _is_kept(config: Config) -> bool:
    return not any(runner.debug and not runner.debug_persistently for runner in config.runners)


def _check_initial_weights(config: Config, previous: PreviousRun | None) -> None:
    """Raise if a file of ``init_model_path`` is missing, for each runner without a checkpoint of its own.

    Raises:
        ConfigError: they do not; no directory was made.
    """
    faults = []
    for runner in config.runners:
        address, node = f"runner.{runner.name}.init_model_path", config.tree.find(f"runner.{runner.name}")
        needed = previous is None or previous.directory.begins_anew(runner.name)
        if node and needed and (message := missing_checkpoint(node)):
            faults.append(config.origin(address).fault(address, message))
    if faults:
        raise ConfigError(faults)


@dataclass
class Run:
    """A run whose directory is made and locked, and whose classes are loaded.

    Attributes:
        config: the config, ``{run_dir}`` replaced.
        directory: the run directory.
        trainers: runner name -> the trainer that runs it, in the order of ``mode``.
        stage_classes: runner name -> stage -> class.
        devices: runner name -> device.
        resumed: whether the run continues an earlier one.
        sessions: runner name -> its session, of those that have begun.
        failure: the first failure of a runner, be it on another process; None: there was none.
        world: the processes that it is shared out to.
        resume_command: goes on with it, in a shell; ``""``: nothing of it is kept.
    """

    config: Config
    directory: RunDirectory
    trainers: dict[str, Any]
    stage_classes: dict[str, dict[str, type[PipelineStage]]]
    devices: dict[str, torch.device]
    resumed: bool
    sessions: dict[str, RunnerSession] = field(default_factory=dict)
    failure: Failure | None = None
    world: World = SINGLE
    resume_command: str = ""

    def warn(self, message: str) -> None:
        """Warn of what all processes find alike: rank 0 does, and the others have it in their logs."""
        logger.log("WARNING" if self.world.is_main else "INFO", message)

    def is_done(self, name: str) -> bool:
        """Whether a runner is skipped: it was finished before the run was interrupted."""
        done = self.resumed and self.world.broadcast(self.directory.is_done(name))
        if done:
            logger.info(f"{name} is finished already")
        return done

    def report_failure(self, error: BaseException, code: ExitCode, headline: str) -> Failure:
        """Tell the other processes of a failure, as ``World.report_failure``; return the first failure of all."""
        self.failure = self.world.report_failure(error, code, headline)
        return self.failure

    def finish_runner(self, runner: RunnerSession) -> None:
        """Write ``context.json``, and mark the runner as done on all processes, unless ``is_exit`` has ended it."""
        self.world.all_gather(None)
        self.write_accesses()
        name, why = runner.settings.name, runner.context.stop_reason
        if runner.settings.kind == "infer":
            calls = [f"request({what!r})" for what in sorted(runner.context.requests)]
            for call in [f"stop({why!r})", *calls] if why is not None else calls:
                self.warn(f"{name}: context.{call} has done nothing, for an infer runner trains nothing")
            why = None
        if not runner.exited:
            self.directory.mark_done(name, runner.counters, why)

    def write_accesses(self) -> None:
        """Write ``context.json``: runner name -> who read and wrote which key."""
        accesses = {name: runner.context.record() for name, runner in self.sessions.items()}
        self.directory.write_json("context.json", accesses)

    def unfinished(self) -> list[str]:
        """The runners that are not done."""
        return [name for name in self.trainers if not self.directory.is_done(name)]

    def finish(self) -> bool:
        """Write the last ``status.json``: that all is done, or that ``is_exit`` has ended the run before its last runner.

        Returns:
            Whether it was written. A run that was interrupted after its last runner may have been done before.
        """
        # An infer runner has the counters of the checkpoint that it evaluates, which may be another run's.
        trained = [runner.name for runner in self.config.runners if runner.kind == "train"]
        furthest = self.directory.furthest_counters(trained or list(self.trainers))
        unfinished = self.unfinished()
        last = next(reversed(self.sessions.values()), None)
        if last and last.context.peek("is_exit") and unfinished:
            [(_, written)] = last.context.exit_wish()
            reason = f"context['is_exit'] was set in {written.stage} ({written.where}) of {last.settings.name}"
            logger.info(f"{reason}; the run ends here, before the end of {', '.join(unfinished)}")
            counters = furthest if last.settings.kind == "infer" else last.counters
            self.directory.write_status("stopped", exit_code=ExitCode.DONE, reason=reason, train_state=counters)
            return True
        if last:
            reads = self.config.reads
            if any(env_was_read(runner.context) for runner in self.sessions.values()):
                reads.mark_everything_read()
            # Settings without effect, or misspelt names.
            for line in reads.unread(self.config.tree, list(self.sessions)):
                self.warn(line)
        elif self.directory.read_status().get("state") == "done":
            # Otherwise it was interrupted after its last runner, just before this.
            return False
        why, code = self.directory.stop_reasons(self.trainers), ExitCode.DONE
        self.directory.write_status("done", exit_code=code, reason=why, resumable=False, train_state=furthest)
        return True

    def call_after_run(self) -> None:
        """Call the last hook, of the plugins of the runner that ran last; an error in it is logged, for the run is over."""
        for last in list(self.sessions.values())[-1:]:
            try:
                last.hooks.after_run(context=last.context)
            except Exception as error:  # whatever a plugin raises
                what = failing_plugin(last.manager, error) or "after_run"
                logger.error(with_traceback(f"{what} failed: {type(error).__name__}: {error}", error))


def env_was_read(context: Context) -> bool:
    """Whether a stage has read ``env``: which of its values were used is unknown."""
    return any(access.key == "env" and access.stage != "trainer" for access in context.accesses)


class StageLoop(TrainingLoop, Protocol):
    """What a session needs of the engine of a runner stage: a ``PassEngine`` or an ``IterationEngine``."""

    in_use: bool

    def running(self) -> AbstractContextManager[None]:
        """The block around the stage."""


class Training(NamedTuple):
    """What a session calls to train; it lies in a layer above.

    Attributes:
        begin: prepares the Brains of the phases, before a restore.
        make_loop: makes the loop of a runner stage.
    """

    begin: Callable[[Context, Sequence[PhaseSchema], RunnerSchema], None]
    make_loop: Callable[[Context, Any], StageLoop]


# Context keys whose objects the trainer itself uses; a stage may change what is in them, but not replace them.
PROTECTED = ("config", "runner_name", "hooks", "run_dir", "checkpointer", "train_state", "resources")


class RunnerSession:
    """A runner that is ready for its first stage.

    Args:
        name: of the runner.
        run: that it is part of; its ``sessions`` get this one.
        training: what is called to train; None: the session does not come to the runner stage of a train runner.

    Attributes:
        config: a copy of its own.
        settings: its part of the config.
        context: the context.
        store: saves and restores its checkpoints.
        resources: closed at its end, whatever happens.
        plugins: its plugins, not yet built.
        manager: the plugins, once they are built.
        counters: of the training, those of the context.
        mid_epoch: what may not change in the middle of an epoch.
        entered_runner: whether the runner stage was entered.
        exited: whether ``is_exit`` has ended it before its terminal stage: it is not done.
        completed: whether every stage has run.
    """

    def __init__(self, name: str, run: Run, training: Training | None = None) -> None:
        self.run, run_dir = run, run.directory.path
        self.training = training
        # What a runner does to the arguments that it is given, the next does not see.
        self.config = run.config.in_run(run_dir)
        self.settings, self.classes = self.config.runner(name), run.stage_classes[name]
        plugins, self.manager = load_plugins(self.config.tree, self.config.workspace), plugin_manager()
        everywhere = [plugin for plugin in plugins if getattr(plugin.target, "every_rank", False) is True]
        self.plugins = plugins if run.world.is_main else everywhere
        self.hooks, self.resources = self.manager.hook, ExitStack()
        keep_last = self.settings.keep_last
        self.store = CheckpointStore(run_dir / name / "checkpoints", keep_last=keep_last, asynchronous=True)
        self.context = new_context(self.config, self.settings, run.world)
        self.context.update(device=run.devices[name], hooks=self.hooks, run_dir=run_dir)
        self.context.update(checkpointer=RunCheckpointer(self.store), resources=self.resources)
        self.mid_epoch = MidEpoch(self.context, self.settings)
        self.entered_runner = self.exited = self.completed = False
        self.remember_protected()
        run.sessions[name] = self
        self.resources.callback(self.store.wait)
        self.resources.callback(self._end_workers)
        if self.settings.threads:
            self.resources.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self.settings.threads)
        if self.settings.deterministic:
            self.resources.enter_context(deterministic())

    def _end_workers(self) -> None:
        """End the worker processes of the loaders in ``context["dataset"]``. They are not needed after the runner."""
        loaders = self.context.peek("dataset")
        for loader in loaders.values() if isinstance(loaders, Mapping) else ():
            end_workers(loader)

    def build_plugins(self) -> None:
        """Build the plugins; from here on hooks call them, and checkpoints keep their state."""
        register_plugins(self.plugins, self.manager)
        self.resources.callback(set_aside_in_hooks(self.manager, self.context))
        if self.plugins and self.run.world.is_main:
            self.manager.register(PluginReport(self.manager), "plugin_report")
        listen(self.context, self.resources)
        self.store.add_recoverable(MID_EPOCH, self.mid_epoch)
        for name, plugin in self.manager.list_name_plugin():
            if hasattr(plugin, "state_dict") and hasattr(plugin, "load_state_dict"):
                self.store.add_recoverable(f"plugin:{name}", plugin)

    def build(self, stage: str) -> Any:
        """The stage, built with its ``<stage>_args``."""
        return self.classes[stage].from_context(self.context, **getattr(self.settings, f"{stage}_args"))

    def run_stage(self, stage: str) -> None:
        """Build the stage and call its method, and check the keys that it declares.

        Raises:
            ContextError: a key that it reads is missing before, or one that it writes is missing after.
        """
        if stage == "runner" and self.entered_runner:
            # A stage that is entered again goes on from where the first time has ended.
            self.store.end_resume()
        elif stage == "runner":
            self.entered_runner = True
            if self.settings.kind == "train":
                self.begin_training()
            if self.run.world.is_main:
                log_summary(self.context, self.settings, self.classes)
        # Plugins may have put theirs there.
        self.remember_protected()
        description, built, method = self.describe(stage), self.build(stage), STAGES[stage]
        context_flow.check_reads(built, method, description, self.context)
        if stage == "runner" and not env_was_read(self.context):
            for line in self.config.reads.unread_so_far(self.config.tree):
                self.run.warn(line)
        for note in self.config.notes_about(f"runner.{self.settings.name}.{stage}_class_path"):
            self.run.warn(note)
        with self.loop(built) if stage == "runner" and self.settings.kind == "train" else nullcontext():
            getattr(built, method)(self.context)
        self.check_protected(description)
        # What the stage has saved is on disk before the next begins, or it is this stage that has failed.
        self.store.wait()
        context_flow.check_writes(built, method, description, self.context)
        if stage == "network" and self.run.world.size > 1:
            self.compare_built()

    def compare_built(self) -> None:
        """Raise where the datasets of this process, or the parameters of its models, are not as those of rank 0.

        Raises:
            ConfigError: they are not.
        """
        built = [self.context.peek(key) for key in ("model", "dataset")]
        models, loaders = [value if isinstance(value, Mapping) else {} for value in built]
        modules = {name: weights.module_of(entry) for name, entry in models.items() if weights.is_entry(entry)}
        values = {
            f"parameter {name} of {phase}": "lazy" if is_lazy(parameter) else f"{[*parameter.shape]} {parameter.dtype}"
            for phase, module in modules.items()
            for name, parameter in module.named_parameters()
        }
        digests = self.run.world.attempt(lambda: {name: dataset_digest(loader) for name, loader in loaders.items()})
        values |= {f"the digest of dataset {name}": digest for name, digest in digests.items()}
        self.run.world.require_equal(values, "give all processes the same data and code")

    def agree_on_next(self, stage: str, *, wrote_status: bool) -> bool:
        """Whether rank 0 has written the status after a stage, which is that of all; what was asked for on one counts on all.

        Raises:
            ConfigError: this process has written another status.
        """
        context, world = self.context, self.run.world
        if world.size == 1:
            return wrote_status
        own = context.peek("status") if wrote_status else None
        status = world.broadcast(own)
        written = {f"context['status'] of {self.describe(stage)}": own or status}
        world.require_equal(written, "write the same on all ranks, or on rank 0 alone")
        share_wishes(world, context)
        if status is not None:
            context["status"] = status
        return status is not None

    @contextmanager
    def loop(self, runner: PipelineStage) -> Iterator[None]:
        """In the block, the context has the loop of a runner stage that trains."""
        iteration = self.counters["iteration"]
        assert self.training, "whoever runs a train runner gives what trains"
        loop = self.training.make_loop(self.context, runner)
        with self.context.running_loop(loop), loop.running():
            yield
        is_known = bool(self.config.notes_about(f"runner.{self.settings.name}.runner_class_path"))
        if not (loop.in_use or is_known) and self.counters["iteration"] == iteration:
            what = f"{self.describe('runner')} has called neither epochs() nor batches() of the context"
            self.run.warn(f"{what}: nothing was saved, no plugin was called, and it cannot be resumed")

    def begin_training(self) -> None:
        """Have the Brains begin; a resumed run is restored from its newest valid checkpoint, whatever startup did.

        Raises:
            NoCheckpointError: some were committed, and none is valid.
            CheckpointError: the run is not the one that saved it.
        """
        assert self.training, "whoever runs a train runner gives what trains"
        self.training.begin(self.context, self.config.phases(self.settings), self.settings)
        self.store.begin(self.context.peek("model"))
        if not self.run.resumed:
            return
        self.store.restore(self.context)
        if self.store.resumed:
            self.mid_epoch.check(self.store.resumed)
            self.hooks.after_checkpoint_loaded(context=self.context, path=self.store.resumed.path)
        else:
            self.run.warn(f"{self.store.folder}: no checkpoint was ever saved; beginning again")

    def is_exiting(self) -> bool:
        """Return whether ``is_exit`` ends the runner before its terminal stage; then it is not done."""
        self.exited = bool(self.context["is_exit"])
        return self.exited

    def complete(self) -> None:
        """Every stage has run: call the plugins, and close the resources."""
        self.completed = True
        self.hooks.after_pipeline(context=self.context)
        self.resources.close()

    def remember_protected(self) -> None:
        """Note the objects that no stage may replace."""
        self._protected = {key: self.context.peek(key) for key in PROTECTED}
        self.counters: dict[str, int] = self._protected["train_state"]

    def check_protected(self, description: str) -> None:
        """After a stage: it has replaced none of them, and the device is one.

        Raises:
            ContextError: it has.
        """
        if replaced := self.restore_protected():
            what = f"replaced context['{replaced[0]}'], with which the trainer goes on"
            raise ContextError(f"{description} {what}; change what is in it, or use a key of your own")
        device = self.context.peek("device")
        if not isinstance(device, torch.device):
            raise ContextError(f"{description} wrote context['device'] = {device!r}; write a torch.device")

    def restore_protected(self) -> list[str]:
        """Put back the objects that a stage has replaced; their keys."""
        replaced = [key for key, value in self._protected.items() if self.context.peek(key) is not value]
        for key in replaced:
            self.context.put_back(key, self._protected[key])
        return replaced

    def describe(self, stage: str) -> str:
        """``startup (tdm_startup.Startup, config.yaml:12)``, for messages; a default stage is ``stages.Startup``."""
        origin = self.config.origin(f"runner.{self.settings.name}.{stage}_class_path")
        if stage not in self.classes:
            return f"{stage} ({origin})"
        cls = self.classes[stage]
        package, _, module = cls.__module__.rpartition(".")
        return f"{stage} ({'stages' if package == 'pipeline.stages' else module}.{cls.__name__}, {origin})"
