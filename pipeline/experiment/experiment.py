"""ExperimentBase: a training with a custom loop, as in Parakeet."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, cast
from warnings import catch_warnings

import torch
from loguru import logger
from torch import nn

from pipeline.checkpoint import load_errors, parts, reader
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.gradients import TrainingGradients
from pipeline.checkpoint.restore import restore_models
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import CursorState
from pipeline.checkpoint.storage import storing
from pipeline.compute.weak_methods import own_method
from pipeline.config import yaml_tree
from pipeline.config.schema import has_effect, ignored_by_experiment
from pipeline.context import TRAIN_STATE, Context
from pipeline.data.cursor import DataCursor
from pipeline.data.loader import end_workers
from pipeline.data.workers import supervise_workers
from pipeline.distributed.device import resolve_device
from pipeline.distributed.world import SINGLE, World, current_world, joined, launched_size
from pipeline.engine.client import IterationClient
from pipeline.engine.iteration_engine import IterationEngine
from pipeline.engine.phase import limited
from pipeline.errors import CheckpointError, ConfigError, StageError
from pipeline.experiment import experiment_config, trained_parts
from pipeline.experiment.client import ExperimentClient
from pipeline.experiment.experiment_config import PHASE
from pipeline.experiment.visualizers import JsonLines, Visualizer
from pipeline.run.exclusive import exclusive
from pipeline.run.log import StandardLogger
from pipeline.signals import ExitError
from pipeline.stages.base import RunnerBase
from pipeline.user_code import plugins


class ExperimentBase(RunnerBase):
    """A training whose steps a subclass defines, with the names of Parakeet.

    A subclass defines ``setup_dataloader``, ``setup_model``, ``train_batch`` and ``valid``. It may
    override the other methods too.

    In a script, call ``setup()`` and then ``run()``. As the runner stage of a config, the trainer
    creates the experiment and sets it up, and the experiment uses the device, run directory, log
    and checkpointer of the run. There ``limit_batches`` and a debug run limit ``train_loader``, but
    not the data that ``valid`` reads.

    An iteration is one call of ``train_batch``. It may read any number of batches, also beyond the
    end of an epoch, and train anything, without a Brain. So an experiment makes no passes. The
    engine counts the iterations. It validates, saves and stops after them as in any other training.

    Where Parakeet has a fault, this differs: Ctrl-C raises KeyboardInterrupt instead of a silent
    exit, the last weights are validated and saved too, and a resumed training continues with
    everything.

    Example::

        class Line(ExperimentBase):
            def setup_dataloader(self):
                self.train_loader = torch.linspace(-1, 1, 8).reshape(4, 2, 1)  # 4 batches of 2 samples
                self.valid_loader = self.train_loader

            def setup_model(self):
                self.model = nn.Linear(1, 1).to(self.device)
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

            def train_batch(self):
                x = self.read_batch()
                loss = nn.functional.mse_loss(self.model(x), 3 * x)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.visualizer.add_scalar("loss", loss, self.iteration)

            def valid(self):
                losses = [nn.functional.mse_loss(self.model(x), 3 * x) for x in self.valid_loader]
                self.visualizer.add_scalar("valid_loss", torch.stack(losses).mean(), self.iteration)


        config = {"training": {"max_iteration": 20, "valid_interval": "1 epoch", "save_interval": 10}}
        args = {"device": "cpu", "nprocs": 1, "output": "line", "checkpoint_path": None}
        experiment = Line(config, args)
        experiment.setup()
        experiment.run()

    Args:
        config: an object with attributes, or a mapping, which is read as
            ``config.training.max_iteration``. ``training`` has ``max_iteration``,
            ``valid_interval`` and ``save_interval``. An interval is a number of iterations, a text
            such as ``"2 epoch"``, a list of these, or None for never. Once ``config.yaml`` is
            written, a mapping cannot be changed. Any other object is used as it is, and changes of
            its ``training`` take effect while it trains. For a stage it is the
            ``hyper_parameters``, with the runner's keys in ``training``.
        args: also an object or a mapping. It has ``device``, ``nprocs``, ``output`` (a folder), and
            ``checkpoint_path`` (a path or None).

    Attributes: what ``setup`` sets is None before.
        model: the module to train. ``setup_model`` sets it.
        optimizer: an optimizer of torch, or None. ``setup_model`` sets it.
        train_loader: the batches of one epoch. ``setup_dataloader`` sets it.
        valid_loader: the batches for ``valid``. ``setup_dataloader`` sets it.
        iterator: the batches that are left of this epoch, on the device. To start an epoch with
            other batches, ``new_epoch`` of a subclass assigns an iterator of batches.
        iteration: how many iterations were made, including the current one.
        epoch: the number of the current batch's epoch, from 1. It is 0 before the first batch.
        device: where the batches go.
        output_dir: the folder for everything that is written.
        checkpoint_dir: the folder of the checkpoints.
        checkpointer: saves and loads the checkpoints.
        visualizer: where numbers, figures and sounds are reported.
        logger: loguru's logger.
        context: the context of the run. In a script, a separate one with counters and without
            plugins.
        alone: whether the experiment is used in a script, without a run of a config.
    """

    model: nn.Module
    optimizer: Any
    train_loader: Any
    valid_loader: Any
    device: torch.device
    output_dir: Path
    checkpoint_dir: Path
    checkpointer: RunCheckpointer
    visualizer: Visualizer
    logger: StandardLogger
    _engine: IterationEngine | None

    def __init__(self, config: Any, args: Any) -> None:
        self.config = experiment_config.attribute_view(config, "config")
        self.args = experiment_config.attribute_view(args, "args")
        self.alone = True
        self.iteration = 0
        self.epoch = 0
        # Attributes that `setup` sets are None until then, unless the subclass has a value.
        names = [name for name in ExperimentBase.__annotations__ if not hasattr(type(self), name)]
        vars(self).update(dict.fromkeys(names))
        self.train_state: dict[str, int] = dict.fromkeys(TRAIN_STATE, 0)
        values = {"hooks": plugins.plugin_manager().hook, "train_state": self.train_state}
        self.context = Context.for_training(values, TrainingGradients)
        # ``config.training`` of a stage.
        self._training: dict[str, Any] = {}
        self._resources = ExitStack()
        self._world = SINGLE
        # Whether a checkpoint or weights were loaded, so that ``run`` does not load them again.
        self._loaded = False
        # Whether ``run`` was called before, without a run of a config.
        self._has_run = False
        self._engine_client = ExperimentClient(self)
        # The client also has to act if user code calls these methods.
        vars(self)["new_epoch"] = partial(self._engine_client.call_new_epoch, own_method(self, "new_epoch"))
        vars(self)["valid"] = partial(self._engine_client.call_valid, own_method(self, "valid"))

    @classmethod
    def from_context(cls, context: Context, **args: Any) -> Self:
        """Return the experiment as a stage.

        Args:
            context: the context of the run.
            args: further arguments of the constructor.

        Raises:
            ConfigError: the runner is an infer runner, or has a key that an experiment ignores.
        """
        if context["is_infer"]:
            kind = f"runner.{context['runner_name']}.class: is infer, and {cls.__name__} is an experiment, which trains"
            raise ConfigError(f"{kind}; write train, or take runner_class_path out")
        runner = context["runner"]
        for key, why in ignored_by_experiment(has_phases=bool(context["phases"])).items():
            if has_effect(key, getattr(runner, key)):
                ignored = f"runner.{context['runner_name']}.{key}"
                raise ConfigError(f"{ignored}: {cls.__name__} is an experiment, which {why}")
        training = experiment_config.training_of(context)
        experiment = cls(experiment_config.config_of(context, training), experiment_config.args_of(context), **args)
        experiment.alone = False
        experiment._training = training
        experiment.context = context
        experiment.train_state = context["train_state"]
        experiment._engine_client.join_run(context, experiment.train_state)
        return experiment

    # What a subclass defines.

    @abstractmethod
    def setup_dataloader(self) -> None:
        """Set ``self.train_loader`` and ``self.valid_loader``."""

    @abstractmethod
    def setup_model(self) -> None:
        """Set ``self.model``, on ``self.device``, and ``self.optimizer``."""

    @abstractmethod
    def train_batch(self) -> None:
        """Read a batch with ``self.read_batch()``, and train on it."""

    @abstractmethod
    def valid(self) -> None:
        """Evaluate on ``self.valid_loader``.

        This is called on rank 0 only, without gradients, and with the model in evaluation mode.
        A validation does not change the training: after it, the random generators are as they were
        before.
        """

    # What a user calls, and may override.

    def setup(self) -> None:
        """Prepare everything for the training.

        This calls ``setup_device``, ``init_parallel`` if multiple processes train,
        ``setup_output_dir``, ``dump_config``, ``setup_visualizer``, ``setup_logger``,
        ``setup_checkpointer``, ``setup_dataloader`` and ``setup_model``, in this order.

        Raises:
            ConcurrentRunError: another thread of this process is training.
            ConfigError: ``config`` or ``args`` has no such setting, or its value cannot be used.
            StageError: ``setup_dataloader`` has set no ``train_loader``, or ``setup_model`` no
                ``model``.
        """
        with exclusive(f"{type(self).__name__}.setup", may_nest=True):
            self._set_up()

    def run(self, context: Context | None = None) -> None:
        """Train, after ``setup()``.

        Args:
            context: the context of the run if this is a stage. Then the experiment is set up first.

        Raises:
            ConcurrentRunError: another thread of this process is training.
            StageError: nothing is set up.
        """
        with exclusive(f"{type(self).__name__}.run", may_nest=True):
            self._run_to_end(context)

    def train(self) -> None:
        """Train on batch after batch, up to ``max_iteration``."""
        engine = self._engine_client.engine
        for self.iteration in engine.iterations():
            self.train_batch()

    def read_batch(self) -> Any:
        """Return the next batch of ``train_loader``, on the device.

        After the last batch of an epoch, this is the first batch of the next epoch.

        Raises:
            DataError: there is no batch.
        """
        return self._engine_client.read_batch()

    def new_epoch(self) -> None:
        """Start the next epoch: count it, and read ``train_loader`` again.

        The samplers have the number of the epoch already. An override has to count
        ``self.epoch`` and to assign ``self.iterator``.
        """
        self.epoch += 1
        self.iterator = self.train_loader

    @property
    def iterator(self) -> Any:
        """The batches that are left of this epoch; None before the first epoch."""
        cursor = self._engine_client.cursor
        return self._remaining_batches(cursor) if cursor.epoch >= 0 else None

    @iterator.setter
    def iterator(self, batches: Iterable[Any]) -> None:
        self._engine_client.assign(batches)

    def _remaining_batches(self, cursor: DataCursor) -> Iterator[Any]:
        while not cursor.over():
            # An override of `read_batch` may read from this iterator, so it is not called here.
            yield ExperimentBase.read_batch(self) if cursor is self._engine_client.cursor else cursor.take()

    def save(self, epoch: int | None = None, context: Context | None = None, is_fleet: bool = False) -> None:
        """Save a checkpoint: the model with its gradients, the counters, and ``training_state()``.

        A checkpoint also has the state of every object that is an attribute, or in a list or dict
        that is an attribute: other optimizers and modules, schedules, a GradScaler, and objects
        with ``state_dict`` and ``load_state_dict``.

        Args:
            epoch: not used, as the experiment knows its epoch. All runner stages have these
                arguments.
            context: not used.
            is_fleet: not used.

        Raises:
            ConfigError: in a script, the output folder has checkpoints of another run, which would
                be overwritten.
        """
        self._engine_client.save_checkpoint()

    def resume_or_load(self) -> None:
        """Continue from a checkpoint.

        It is ``args.checkpoint_path``, or without one the newest checkpoint in the output folder.
        ``run`` calls this too. If ``args.checkpoint_path`` is a file of weights, or if this is a
        stage, only the first weights are loaded from it.

        Raises:
            NoCheckpointError: the output folder has checkpoints, and none is valid.
            CheckpointError: the checkpoint does not fit, or is not of an experiment.
        """
        self._loaded = True
        path = experiment_config.setting(self.args, "args.checkpoint_path")
        if path and not (self.alone and Path(path).is_dir()):
            self.checkpointer.load_weights(path, self.context["model"])
        elif self.alone:
            checkpoint = reader.read_checkpoint(Path(path)) if path else self._store.newest_valid()
            if checkpoint:
                self._restore_checkpoint(checkpoint)
                # A new engine restores the numbers and the random generators, also for code that
                # does not call `run`.
                self._engine = self._new_engine()
                self._engine.begin()
                logger.info(f"going on after iteration {self.iteration}, from {checkpoint.path}")
            elif isinstance(self.visualizer, JsonLines):
                # Without a checkpoint the training starts again, and so do its numbers.
                self.visualizer.cut(0)

    def training_state(self) -> dict[str, Any]:
        """Return what checkpoints keep besides weights, counters and random generators.

        A subclass may add what it needs.
        """
        return {"optimizer": parts.part_states(self._optimizer(), self._engine_client.options).get("self.optimizer")}

    def load_training_state(self, training_state: Mapping[str, Any]) -> None:
        """Restore a ``training_state``.

        Options of the optimizer that the config has changed keep their new values.

        Raises:
            CheckpointError: the state has no ``optimizer``, or it does not fit.
        """
        if "optimizer" not in training_state:
            raise CheckpointError("load_training_state: there is no 'optimizer'; give it what training_state() returns")
        state = {"self.optimizer": training_state["optimizer"]} if training_state["optimizer"] else {}
        parts.restore_parts(self._optimizer(), state, self._engine_client.options, "load_training_state")

    def _optimizer(self) -> dict[str, Any]:
        return trained_parts.optimizer_of(self)

    def state_dict(self) -> dict[str, int]:
        """Return where the training is.

        Returns:
            ``iteration``; ``epoch``, the number of epochs that are over; and ``batches``, the
            number of batches that were read of the next epoch.
        """
        return {"iteration": self.iteration, **self._engine_client.place()}

    def set_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from these counters: ``read_batch`` returns the batch that comes next.

        Args:
            state_dict: what ``state_dict`` returned. It may also have the counters of a run.
        """
        self.train_state.update({name: state_dict[name] for name in TRAIN_STATE if name in state_dict})
        batches = state_dict.get("batches", 0)
        self.train_state.pop("batches", None)
        self.iteration = state_dict["iteration"]
        self.epoch = state_dict["epoch"] + bool(batches)
        self._engine_client.continue_at(self.epoch, batches)

    def close(self) -> None:
        """Close the files that ``setup`` has opened.

        This also ends the workers of the loaders, and leaves the other processes.
        """
        for loader in vars(self).values():
            end_workers(loader)
        if isinstance(self.visualizer, JsonLines):
            # A second `run` opens the file again after `_resources` has closed it.
            self.visualizer.close()
        # `run` calls this in a `finally`, so there may be an error that is being raised.
        self._resources.__exit__(*sys.exc_info())

    # The steps of ``setup``.

    def _set_up(self) -> None:
        client = self._engine_client
        client.find_hooks()
        self.setup_device()
        if self.parallel:
            self.init_parallel()
        self._world = current_world()
        self.setup_output_dir()
        self.dump_config()
        experiment_config.freeze(self.config)
        client.open_numbers(self.output_dir)
        self.setup_visualizer()
        self.setup_logger()
        self.setup_checkpointer()
        if self.alone:
            self.context["checkpointer"] = RunCheckpointer(CheckpointStore(self.checkpoint_dir))
        self.checkpointer = cast("RunCheckpointer", self.context["checkpointer"])
        self._store = self.checkpointer.store
        self._engine = self._new_engine()
        self.setup_dataloader()
        self._count_iterations()
        self.setup_model()
        self._limit_debug_run()
        client.offer_model()
        self._resources.enter_context(self.context.training_also(own_method(client, "trained")))
        if self._world.size > 1:
            client.share_work()
        client.reset()
        self.iteration = 0
        self.epoch = 0

    @property
    def parallel(self) -> bool:
        """Whether multiple processes train, or should train."""
        return max(int(experiment_config.setting(self.args, "args.nprocs")), launched_size()) > 1

    def setup_device(self) -> None:
        """Set ``self.device``: the device of the run, or the one that ``args.device`` names.

        Raises:
            ConfigError: there is no such device.
        """
        if not self.alone:
            self.device = self.context["device"]
            return
        world = World(local_rank=int(os.environ.get("LOCAL_RANK", "0")), size=launched_size())
        try:
            self.device = resolve_device(experiment_config.setting(self.args, "args.device"), world)
        except ConfigError as error:
            raise ConfigError(f"args.device: {error}") from error

    def init_parallel(self) -> None:
        """Join the other processes, which a launcher has started. ``close`` leaves them.

        Raises:
            ConfigError: ``args.nprocs`` is not the number of processes.
        """
        size = launched_size()
        nprocs = self.args.nprocs
        if size != int(nprocs):
            what = f"a launcher has started {size} of them" if size > 1 else "there is one"
            remedy = f"start the script with torchrun --nproc-per-node {nprocs}"
            raise ConfigError(f"args.nprocs: is {nprocs}, and {what}; {remedy}")
        self._resources.enter_context(joined())

    def setup_output_dir(self) -> None:
        """Set ``self.output_dir`` to ``args.output``, and create the folder if it does not exist.

        In a run, it is the folder of the runner in the run directory.
        """
        self.output_dir = Path(experiment_config.setting(self.args, "args.output")).expanduser()
        with storing(self.output_dir, "set args.output"):
            self.output_dir.mkdir(parents=True, exist_ok=True)

    def dump_config(self) -> None:
        """Write ``config.yaml`` to the output folder, on rank 0.

        In a run this does nothing, as the run directory has this file already.
        """
        if self.alone and self._world.is_main:
            text = yaml_tree.dump(experiment_config.plain(self.config))
            (self.output_dir / "config.yaml").write_text(text, encoding="utf-8")

    def setup_visualizer(self) -> None:
        """Set ``self.visualizer``.

        On rank 0 it writes what this rank reports to ``metrics.jsonl``. In a run it calls the
        plugins.
        """
        self.visualizer = self._engine_client.numbers
        if self.alone and self._world.is_main:
            lines = JsonLines(self.output_dir / "metrics.jsonl")
            self.visualizer = lines
            self._resources.callback(lines.close)

    def setup_logger(self) -> None:
        """Set ``self.logger`` to loguru's logger, which accepts ``%d`` as well as ``{}``.

        In a script it writes to ``worker_<rank>.log`` too.
        """
        self.logger = StandardLogger()
        if self.alone:
            file = self.output_dir / f"worker_{self._world.rank}.log"
            sink = logger.add(file, level="DEBUG", diagnose=False, encoding="utf-8")
            self._resources.callback(logger.remove, sink)

    def setup_checkpointer(self) -> None:
        """Set ``self.checkpoint_dir``: the folder ``checkpoints`` in the output folder.

        The folder is created if it does not exist.
        """
        self.checkpoint_dir = self.output_dir / "checkpoints"
        with storing(self.checkpoint_dir, "set args.output"):
            self.checkpoint_dir.mkdir(exist_ok=True)

    def _count_iterations(self) -> None:
        """In a run, limit the loader as the runner's keys say, and set ``max_iteration``.

        ``config.training.max_iteration`` may depend on the length of the loader.
        """
        if self.train_loader is None:
            raise StageError(f"{type(self).__name__}.setup_dataloader: has to set self.train_loader; give it batches")
        if not self.alone:
            runner = self.context["runner"]
            # `setup_model` may make a schedule. It is planned for the whole training, also in a
            # debug run.
            whole = limited(self.train_loader, runner, ignore_debug=True)
            self._training["max_iteration"] = experiment_config.iterations_of(self.context, whole)
            self.train_loader = limited(self.train_loader, runner)
            self._engine_client.note_length(runner.epochs)

    def _limit_debug_run(self) -> None:
        """In a debug run, lower ``config.training.max_iteration``.

        A custom ``train`` may read it.
        """
        if not self.alone:
            most = experiment_config.debug_iterations(self.context["runner"], self.train_loader)
            self._training["max_iteration"] = min(self._training["max_iteration"], most)

    # The run, and the engine that trains in it.

    def _run_to_end(self, context: Context | None) -> None:
        try:
            if context is not None:
                self.setup()
                self.set_state_dict(self.train_state)
            elif "model" not in self.context:
                raise StageError(f"{type(self).__name__}.run: nothing is set up; call setup() first")
            if self._store.resumed is not None and not self.alone:
                self._restore_checkpoint(self._store.resumed)
            elif not self._loaded:
                self.resume_or_load()
            with self._blocks(), suppress(ExitError):
                self._engine_client.engine.begin()
                self._has_run = True
                self.train()
                # `train` may have called `resume_or_load`, which creates another engine.
                self._engine_client.engine.finish()
                self._warn_without_validation()
        finally:
            if self.alone and self._engine:
                # Another run continues from here, and not from the checkpoint.
                self._store.end_resume()
            self.close()

    @contextmanager
    def _blocks(self) -> Iterator[None]:
        """Enter the blocks around a training. For a stage the trainer has entered most of them."""
        with ExitStack() as stack:
            if self.alone:
                before = self._engine_client.engine
                engine = self._new_engine() if self._has_run else before
                self._engine = engine
                stack.enter_context(self.context.running_loop(engine))
                stack.enter_context(engine.running())
                if self._has_run:
                    engine.adopt(before)
            stack.enter_context(supervise_workers())
            yield

    def _warn_without_validation(self) -> None:
        """Warn if ``keep_best`` had nothing to compare."""
        best = self._engine_client.engine.validation.best
        if best and not best.has_numbers:
            what = f"keep_best watches '{best.metric}', and the run made no validation"
            remedy = "a train() of your own has to validate by super().train()"
            logger.warning(f"{what}, so no checkpoint is the best; {remedy}, or remove keep_best")

    def engine_client(self) -> IterationClient:
        """Return what an engine calls to train this experiment."""
        return self._engine_client

    def active_batch(self) -> tuple[Any, int] | None:
        """Return the batch that was read last, and its number in the epoch.

        Before the first batch, return None.
        """
        return self._engine_client.active_batch()

    def _new_engine(self) -> IterationEngine:
        """Return the engine of the run, or a new one without a run."""
        running = None if self.alone else self.context.loop
        engine = (
            running if isinstance(running, IterationEngine) else IterationEngine(self.context, self.engine_client())
        )
        self._engine_client.attach(engine, self._store)
        return engine

    # Resuming from a checkpoint.

    def _restore_checkpoint(self, checkpoint: reader.LoadedCheckpoint) -> None:
        """Restore everything from a checkpoint."""
        state = checkpoint.state
        if state is None or state.experiment is None:
            what = f"{checkpoint.path}: is not of an experiment, which could go on from it"
            raise CheckpointError(f"{what}; name a .safetensors file in it, for the weights alone")
        own = state.experiment
        self.set_state_dict(checkpoint.train_state)
        is_in_epoch = bool(self._engine_client.cursor.taken)
        if is_in_epoch and own.data.is_own:
            self._repeat_epoch(own.data)

        def restore_training_state() -> None:
            with load_errors.loading(f"{checkpoint.path}: experiment.state"):
                self.load_training_state(own.state)

        # The trainer has restored other phases of a run.
        initial = self._store.initial
        assert initial
        restore_models(checkpoint, self.context["model"], initial, restore_training_state, only=[PHASE])
        self._engine_client.restore(checkpoint, is_in_epoch=is_in_epoch)

    def _repeat_epoch(self, place: CursorState) -> None:
        """Have the user's ``new_epoch`` start the interrupted epoch again.

        This comes before anything that it changes is restored.
        """
        with self._engine_client.epoch_repeated(place):
            self.epoch -= 1
            # Its warnings were shown when it was called first. A schedule that it steps may warn
            # that no optimizer has stepped, since this process has not trained yet.
            with catch_warnings(action="ignore"):
                self.new_epoch()
