"""ExperimentBase: an experiment written by hand, with setup, loop, saving and resume. Names are Parakeet's."""

from __future__ import annotations

import copy
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, cast
from warnings import catch_warnings
from weakref import proxy

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipeline.checkpoint import layout, load_errors, optimizer_state, parts, reader
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.gradients import TrainingGradients
from pipeline.checkpoint.random_state import (
    random_state,
    restore_random_state,
)
from pipeline.checkpoint.restore import restore_models
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.checkpoint.state import CursorState
from pipeline.checkpoint.storage import storing
from pipeline.config import yaml_tree
from pipeline.config.schema import PhaseSchema, RunnerSchema, has_effect, ignored_by_experiment, parse_intervals
from pipeline.context import TRAIN_STATE, Context, Phase
from pipeline.data.batch import EmptySlice, count_samples
from pipeline.data.cursor import DataCursor
from pipeline.data.generators import own_generators
from pipeline.data.loader import SeededLoader, end_workers, length, set_epoch
from pipeline.data.workers import supervise_workers
from pipeline.distributed.device import resolve_device
from pipeline.distributed.strategy import GradientAverage, require_equal_weights
from pipeline.distributed.world import SINGLE, World, current_world, joined, launched_size
from pipeline.engine.client import IterationClient
from pipeline.engine.evaluation import in_evaluation_mode
from pipeline.engine.iteration_engine import IterationEngine
from pipeline.engine.phase import begin_on_ranks, limited
from pipeline.engine.trainable import StepRecord
from pipeline.engine.triggers import Schedule
from pipeline.engine.unregistered import require_registered
from pipeline.engine.validation import Verb
from pipeline.engine.weak_methods import own_method
from pipeline.errors import CheckpointError, ConfigError, DataError, StageError
from pipeline.experiment import experiment_config
from pipeline.experiment.experiment_config import PHASE
from pipeline.experiment.visualizers import JsonLines, PluginNumbers, Visualizer
from pipeline.metrics.meters import MOST
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.stepping import attach_optimizer_hooks, clear_leftovers, log_discarded_windows
from pipeline.run.exclusive import exclusive
from pipeline.run.log import StandardLogger
from pipeline.signals import ExitError
from pipeline.stages.base import RunnerBase
from pipeline.user_code import plugins
from pipeline.user_code.plugin_calls import hook_or_none

# Key of ``config.training`` -> what it says how often.
INTERVALS = {"valid_interval": "validating", "save_interval": "saving"}


class ExperimentBase(RunnerBase):
    """A training whose steps are the user's own: ``train_batch``, ``valid``, ``setup_model``, ``setup_dataloader``.

    By hand: ``experiment = Mine(config, args); experiment.setup(); experiment.run()``. As the runner stage of a config
    it is built and set up by the trainer, and adopts what that has made: device, run directory, log, checkpointer.
    There ``limit_batches`` and a debug run limit ``train_loader``; how long ``valid`` takes is its own affair.

    Its iteration is a call of ``train_batch``, which reads as many batches as it likes, also beyond the end of an epoch,
    and trains whatever it likes, without a Brain. So it makes no passes. The engine counts its iterations, and validates, saves
    and stops after them as in any other training.

    Where the ancestor's behaviour was a fault, this differs: Ctrl-C ends in a KeyboardInterrupt and not in an exit
    without a word, the last weights are validated and saved too, and everything is resumed.

    Args:
        config: an object with attributes or a mapping, read as ``config.training.max_iteration``. ``training`` has
            ``max_iteration``, and ``valid_interval`` and ``save_interval``: iterations, ``"2 epoch"``, a list of
            these, or None for never. Once ``config.yaml`` is written, nothing can be set in a mapping; an object of
            one's own is used as it is, and what is set in its ``training`` while it trains counts. As a stage it is
            the ``hyper_parameters`` with the runner's keys.
        args: likewise; ``device``, ``nprocs``, ``output`` (a folder), ``checkpoint_path`` (or None).

    Attributes: what setup sets is None before.
        model: a module; ``setup_model`` sets it, and ``optimizer``.
        train_loader: batches; ``setup_dataloader`` sets it, and ``valid_loader``.
        iterator: the batches that are left of this epoch, on the device. What ``new_epoch`` of a subclass assigns is an
            iterator of batches too, which then begins an epoch.
        iteration: how many batches were trained on, the present one included.
        epoch: the epoch of the present batch, from 1.
        context: the run's as a stage; by hand one of its own, with counters and without plugins.
        alone: whether it is used by hand.
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
    _average: GradientAverage | None
    _engine: IterationEngine | None

    def __init__(self, config: Any, args: Any) -> None:
        self.config = experiment_config.attribute_view(config, "config")
        self.args = experiment_config.attribute_view(args, "args")
        self.alone = True
        self.iteration = self.epoch = 0
        # What setup() sets; None until then, but for what a subclass gives.
        vars(self).update(
            dict.fromkeys(name for name in ExperimentBase.__annotations__ if not hasattr(type(self), name))
        )
        self.train_state: dict[str, int] = dict.fromkeys(TRAIN_STATE, 0)
        values = {"hooks": plugins.plugin_manager().hook, "train_state": self.train_state}
        self.context = Context.for_training(values, TrainingGradients)
        self._training: dict[str, Any] = {}
        self._resources = ExitStack()
        self._cursor = self._no_data()
        # An iterator that is assigned while it is set up begins no epoch.
        self._in_epoch, self._interrupted, self._loaded = True, False, False
        # How many epochs are over, if this iteration has ended one.
        self._ended: int | None = None
        self._planned: tuple[Any, ...] = ()
        # Whether ``run`` was called before, without a run of a config.
        self._has_run = False
        self._newest: Path | None = None
        self._begun: Mapping[str, Any] = {}
        # Also where the user's code calls it.
        for name in ("new_epoch", "valid"):
            call = own_method(self, f"_call_{name}")
            vars(self)[name] = partial(call, own_method(self, name))
        self._world = SINGLE
        self._record = StepRecord(own_method(self, "_weight"), under_autocast=True)
        # How many batches the loader announced, if the length of the training depends on that.
        self._announced: int | None = None

    @classmethod
    def from_context(cls, context: Context, **args: Any) -> Self:
        """The experiment as a stage; ``args`` are what its constructor takes beside ``config`` and ``args``."""
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
        experiment.alone, experiment._training = False, training
        experiment.context, experiment.train_state = context, context["train_state"]
        return experiment

    @abstractmethod
    def setup_dataloader(self) -> None:
        """Set ``self.train_loader`` and ``self.valid_loader``."""

    @abstractmethod
    def setup_model(self) -> None:
        """Set ``self.model``, on ``self.device``, and ``self.optimizer``."""

    def setup(self) -> None:
        """Everything before the training, in this order.

        Raises:
            ConcurrentRunError: another thread of this process is training.
        """
        with exclusive(f"{type(self).__name__}.setup", may_nest=True):
            self._set_up()

    def _set_up(self) -> None:
        self._batch: Any = None
        hooks = self.context["hooks"]
        self._before_batch, self._on_batch_end = hook_or_none(hooks, "before_batch"), hook_or_none(hooks, "after_batch")
        self.setup_device()
        if self.parallel:
            self.init_parallel()
        self._world = current_world()
        self.setup_output_dir()
        self.dump_config()
        experiment_config.freeze(self.config)
        self._numbers = PluginNumbers(self.context, self.output_dir)
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
        self._offer_model()
        if self._world.size > 1:
            self._share_work()
        self._cursor = self._no_data()
        self._in_epoch = False
        self.iteration = self.epoch = 0

    def engine_client(self) -> IterationClient:
        """Return what an engine calls to train this experiment."""
        return ExperimentClient(self)

    def _new_engine(self) -> IterationEngine:
        """Return the engine of the run, or a new one without a run."""
        running = None if self.alone else self.context.loop
        return running if isinstance(running, IterationEngine) else IterationEngine(self.context, self.engine_client())

    @property
    def parallel(self) -> bool:
        """Whether several processes train, or are to."""
        return max(int(experiment_config.setting(self.args, "args.nprocs")), launched_size()) > 1

    def setup_device(self) -> None:
        """``self.device``: the run's, or the one that ``args.device`` means."""
        if not self.alone:
            self.device = self.context["device"]
            return
        own = World(local_rank=int(os.environ.get("LOCAL_RANK", "0")), size=launched_size())
        try:
            self.device = resolve_device(experiment_config.setting(self.args, "args.device"), own)
        except ConfigError as error:
            raise ConfigError(f"args.device: {error}") from error

    def init_parallel(self) -> None:
        """Join the other processes, which a launcher has started; ``close`` leaves them."""
        size, nprocs = launched_size(), self.args.nprocs
        if size != int(nprocs):
            what = f"a launcher has started {size} of them" if size > 1 else "there is one"
            remedy = f"start the script with torchrun --nproc-per-node {nprocs}"
            raise ConfigError(f"args.nprocs: is {nprocs}, and {what}; {remedy}")
        self._resources.enter_context(joined())

    def setup_output_dir(self) -> None:
        """``self.output_dir``: ``args.output``, made where it is not there; the runner's folder in a run directory."""
        self.output_dir = Path(experiment_config.setting(self.args, "args.output")).expanduser()
        with storing(self.output_dir, "set args.output"):
            self.output_dir.mkdir(parents=True, exist_ok=True)

    def dump_config(self) -> None:
        """``config.yaml`` in the output folder, by rank 0; a run directory has it already."""
        if self.alone and self._world.is_main:
            text = yaml_tree.dump(experiment_config.plain(self.config))
            (self.output_dir / "config.yaml").write_text(text, encoding="utf-8")

    def setup_visualizer(self) -> None:
        """``self.visualizer``: writes ``metrics.jsonl``, on rank 0 what that rank reports; as a stage, calls the plugins."""
        self.visualizer = self._numbers
        if self.alone and self._world.is_main:
            self.visualizer = lines = JsonLines(self.output_dir / "metrics.jsonl")
            self._resources.callback(lines.close)

    def setup_logger(self) -> None:
        """``self.logger``: loguru's, to which ``%d`` is as good as ``{}``; by hand it writes ``worker_<rank>.log`` too."""
        self.logger = StandardLogger()
        if self.alone:
            file = self.output_dir / f"worker_{self._world.rank}.log"
            sink = logger.add(file, level="DEBUG", diagnose=False, encoding="utf-8")
            self._resources.callback(logger.remove, sink)

    def setup_checkpointer(self) -> None:
        """``self.checkpoint_dir``: the folder ``checkpoints`` in the output folder, made where it is not there."""
        self.checkpoint_dir = self.output_dir / "checkpoints"
        with storing(self.checkpoint_dir, "set args.output"):
            self.checkpoint_dir.mkdir(exist_ok=True)

    def close(self) -> None:
        """Close the files that setup() has opened, end the workers of its loaders, and leave the other processes."""
        for loader in vars(self).values():
            end_workers(loader)
        if isinstance(self.visualizer, JsonLines):
            # A second run has opened it again.
            self.visualizer.close()
        # In a `finally`, with the error that is on its way.
        self._resources.__exit__(*sys.exc_info())

    def _count_iterations(self) -> None:
        """As a stage, limit the loader as the runner says; ``config.training.max_iteration`` may depend on it."""
        if self.train_loader is None:
            raise StageError(f"{type(self).__name__}.setup_dataloader: has to set self.train_loader; give it batches")
        if not self.alone:
            runner = self.context["runner"]
            # A schedule that `setup_model` makes is that of the whole training, also in a debug run.
            whole = limited(self.train_loader, runner, ignore_debug=True)
            self._training["max_iteration"] = experiment_config.iterations_of(self.context, whole)
            self.train_loader = limited(self.train_loader, runner)
            self._announced = length(self.train_loader) if runner.epochs else None

    def _limit_debug_run(self) -> None:
        """In a debug run, lower ``config.training.max_iteration``, since a custom `train` reads it."""
        if not self.alone:
            most = experiment_config.debug_iterations(self.context["runner"], self.train_loader)
            self._training["max_iteration"] = min(self._training["max_iteration"], most)

    def _offer_model(self) -> None:
        """Put the model where checkpoints and later stages find it."""
        model = getattr(self, "model", None)
        if not isinstance(model, nn.Module):
            kind = f"{type(self).__name__}.setup_model: self.model is a {type(model).__name__}, not an nn.Module"
            raise StageError(f"{kind}; set it to one, to an nn.ModuleDict where there are several")
        require_registered([model], f"{type(self).__name__}.setup_model: ")
        self.context["model"] = {**(self.context.peek("model") or {}), PHASE: Phase(PHASE, {"model": model})}
        trained = self._trained()
        self._resources.enter_context(self.context.training_also(own_method(self, "_trained")))
        own = {name.removeprefix("self."): part for name, part in trained.items() if isinstance(part, OptimScheduler)}
        self._schedulers = list(own.values())
        for scheduler in self._schedulers:
            scheduler.bind(self._record)
        self._schedulers_by_name = own
        attach_optimizer_hooks(own, self.context, PHASE)
        self._options = parts.options_of_parts(self._optimizer())
        # ``training_state`` has the optimizer.
        self._store.begin(self.context["model"], {"self": proxy(self)}, apart=["self.optimizer"])

    def _trained(self) -> dict[str, Any]:
        """Return everything with a state except the model, such as optimizers and schedules, by name."""
        return {**self._optimizer(), **parts.parts_of({PHASE: {"model": self.model}}, {"self": self})}

    def _weight(self, batch: Any) -> int:
        """How much a batch counts in an accumulation window: on one rank all count alike."""
        if not self._average:
            return 1
        return 0 if self._record.stand_in else count_samples(batch)

    def _share_work(self) -> None:
        """Have all ranks train one model: from the same weights, with gradients that are means over all of them.

        Not by DDP, which averages only where the model itself is called: here any of its methods may be.
        """
        if isinstance(valid := self.valid_loader, SeededLoader):
            # All of it is rank 0's.
            valid.stop_sharing()
        schedulers = [part for part in self._trained().values() if isinstance(part, OptimScheduler)]
        modules = self._modules().values()
        begin_on_ranks(modules, None if self.alone else self.context["runner"].seed)
        self._average = GradientAverage(modules, schedulers, self._record.count_samples)
        what = "one sum after each backward, since an experiment steps its optimizer itself"
        logger.info(f"the gradients of {self._world.size} ranks are averaged by {what}")

    def _optimizer(self) -> dict[str, Any]:
        """``self.optimizer``, if it has a state."""
        return {"self.optimizer": self.optimizer} if hasattr(self.optimizer, "state_dict") else {}

    def _generators(self) -> dict[str, Any]:
        """The random generators of its own: those in its attributes, and those of its data."""
        return own_generators({"": self}, {name: getattr(self, name) for name in ("train_loader", "valid_loader")})

    def _modules(self) -> dict[str, nn.Module]:
        """The model, and those of the parts that are modules."""
        return parts.trained_modules({PHASE: {"model": self.model}}, self._trained())

    @abstractmethod
    def train_batch(self) -> None:
        """Read a batch (``self.read_batch()``) and train on it."""

    @abstractmethod
    def valid(self) -> None:
        """Evaluate on ``self.valid_loader``; called without gradients and with the model in evaluation mode; on rank 0.

        After it the random generators are as they were before: a validation does not change the training.
        """

    def run(self, context: Context | None = None) -> None:
        """Train, after ``setup()``; as a stage, with the context of the run.

        Raises:
            ConcurrentRunError: another thread of this process is training.
        """
        with exclusive(f"{type(self).__name__}.run", may_nest=True):
            self._run_to_end(context)

    def _run_to_end(self, context: Context | None) -> None:
        try:
            if context is not None:
                self.setup()
                self.set_state_dict(self.train_state)
            elif "model" not in self.context:
                raise StageError(f"{type(self).__name__}.run: nothing is set up; call setup() first")
            if self._store.resumed is not None and not self.alone:
                self._go_on(self._store.resumed)
            elif not self._loaded:
                self.resume_or_load()
            with self._blocks(), suppress(ExitError):
                self._running.begin()
                self._has_run = True
                self.train()
                self._running.finish()
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
                before = self._running
                engine = self._engine = self._new_engine() if self._has_run else before
                stack.enter_context(self.context.running_loop(engine))
                stack.enter_context(engine.running())
                if self._has_run:
                    engine.adopt(before)
            stack.enter_context(supervise_workers())
            yield

    @property
    def _running(self) -> IterationEngine:
        """The engine that trains, after ``setup``."""
        if self._engine is None:
            raise StageError(f"{type(self).__name__}: nothing is set up; call setup() first")
        return self._engine

    def _warn_without_validation(self) -> None:
        """Warn if ``keep_best`` had nothing to compare."""
        best = self._running.validation.best
        if best and not best.has_numbers:
            what = f"keep_best watches '{best.metric}', and the run made no validation"
            remedy = "a train() of your own has to validate by super().train()"
            logger.warning(f"{what}, so no checkpoint is the best; {remedy}, or remove keep_best")

    def train(self) -> None:
        """Train on batch after batch, up to ``max_iteration``."""
        engine = self._running
        for self.iteration in engine.iterations():
            self.train_batch()

    def read_batch(self) -> Any:
        """The next batch of ``train_loader``, on the device; after the last one of an epoch, the next epoch's first.

        Raises:
            DataError: there is none.
        """
        if self._cursor.over():
            if self._cursor.taken or not self._in_epoch:
                self.new_epoch()
            if self._cursor.over():
                nothing = f"train_loader: gave no batch in epoch {self.epoch}"
                raise DataError(f"{nothing}; check the dataset, or drop_last with few samples")
        batch = self._cursor.take()
        stands_in = type(batch) is EmptySlice
        batch = batch.batch if stands_in else batch
        number = self._record.number
        self._record.begin(batch, stand_in=stands_in)
        samples = 0 if stands_in else count_samples(batch)
        self.train_state["samples"] += samples
        if self._average:
            self._numbers.weigh(samples)
        self._batch = batch
        if self._before_batch:
            self._before_batch(context=self.context, phase=PHASE, batch=self._batch)
        for scheduler in self._schedulers:
            if scheduler.last_gradients >= number and not scheduler.window.batches:
                clear_leftovers(scheduler, self._schedulers, number)
        return self._batch

    def new_epoch(self) -> None:
        """Begin the next epoch: count it, and read ``train_loader`` again; samplers were told the number of the epoch."""
        self.epoch += 1
        self.iterator = self.train_loader

    def _call_new_epoch(self, new_epoch: Callable[[], None]) -> None:
        if not self._in_epoch and self._cursor.taken and not self._cursor.over():
            # As a ``train`` of one's own begins: of a resumed run, the epoch that goes on had begun.
            self._begin_epoch(again=self._interrupted)
            return
        # From which a resumed run can begin the epoch again.
        self._begun = random_state(self._generators())
        set_epoch(self.train_loader, self.epoch)
        before = self._cursor
        new_epoch()
        if self._cursor is before:
            what = f"{type(self).__name__}.new_epoch: did not assign self.iterator, so that there is no batch to read"
            raise StageError(f"{what}; write self.iterator = iter(self.train_loader)")

    @property
    def iterator(self) -> Any:
        """The batches that are left of this epoch; None before the first."""
        return self._left(self._cursor) if self._cursor.epoch >= 0 else None

    @iterator.setter
    def iterator(self, batches: Iterable[Any]) -> None:
        # Another iterator around the one of an epoch that has just begun is of the same epoch.
        begins = not self._in_epoch or bool(self._cursor.taken)
        if self._in_epoch and begins:
            self._ended = self._cursor.epoch + 1
            self._end_epoch()
        if begins and not self._interrupted:
            self._numbers.begin_epoch()
            self._running.forget_numbers()
        begun = None if batches is self.train_loader else self._begun
        self._cursor = self._new_cursor(batches, self._cursor.epoch + begins, begun=begun)
        if begins:
            self._begin_epoch(again=self._interrupted)

    def _left(self, cursor: DataCursor) -> Iterator[Any]:
        while not cursor.over():
            yield ExperimentBase.read_batch(self) if cursor is self._cursor else cursor.take()

    def _new_cursor(self, batches: Iterable[Any], epoch: int, **more: Any) -> DataCursor:
        """Return a cursor for an epoch.

        Args:
            batches: the loader, or an iterator that the user's ``new_epoch`` has made.
            epoch: its number, from 0.
            more: ``taken`` or ``begun`` of the cursor.
        """
        generators = own_method(self, "_generators")
        return DataCursor(
            batches, epoch, generators, device=self.device, world=self._world, name="train_loader", **more
        )

    def _no_data(self) -> DataCursor:
        """Return a cursor before the first epoch."""
        return DataCursor((), -1, own_method(self, "_generators"))

    def save(self, epoch: int | None = None, context: Context | None = None, is_fleet: bool = False) -> None:
        """Save a checkpoint: the model with its gradients, the counters, and ``training_state()``.

        The arguments are those of any runner stage; an experiment knows them by itself.

        And whatever has a state and stands in an attribute, or in a list or dict that is one: other optimizers and
        modules, schedules, a GradScaler, and objects with ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigError: by hand, the output folder has checkpoints of another run, which would be overwritten.
        """
        self._refuse_overwriting(self.iteration)
        if self._average:
            self._numbers.gather()
            require_equal_weights(self._modules(), self._world)
        self._running.save_checkpoint()
        self._newest = self._store.path_of(self.iteration)

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it besides the models, its parts and the state of the engine."""
        experiment = {
            "data": self._cursor.state_dict(),
            "in_epoch": self._in_epoch,
            "numbers": self._numbers.state_dict(),
            "lines": self.visualizer.size if isinstance(self.visualizer, JsonLines) else None,
            "state": self.training_state(),
        }
        return {"experiment": experiment}

    def resume_or_load(self) -> None:
        """Continue from the checkpoint ``args.checkpoint_path``, or from the newest in the output folder; ``run`` does it too.

        From a file of weights, and as a stage, it gives the first weights alone.

        Raises:
            NoCheckpointError: there are some in the output folder, and none is valid.
            CheckpointError: it does not fit, or is not of an experiment.
        """
        self._loaded = True
        path = experiment_config.setting(self.args, "args.checkpoint_path")
        if path and not (self.alone and Path(path).is_dir()):
            self.checkpointer.load_weights(path, self.context["model"])
        elif self.alone:
            checkpoint = reader.read_checkpoint(Path(path)) if path else self._store.newest_valid()
            if checkpoint:
                self._go_on(checkpoint)
                # Which restores the numbers and the random generators, also for code that does not call ``run``.
                self._engine = self._new_engine()
                self._engine.begin()
                logger.info(f"going on after iteration {self.iteration}, from {checkpoint.path}")
            elif isinstance(self.visualizer, JsonLines):
                # Without a checkpoint it begins again, and so do its numbers.
                self.visualizer.cut(0)

    def training_state(self) -> dict[str, Any]:
        """What checkpoints keep beside weights, counters and random generators; a subclass adds what it needs."""
        return {"optimizer": parts.part_states(self._optimizer(), self._options).get("self.optimizer")}

    def load_training_state(self, training_state: Mapping[str, Any]) -> None:
        """Restore a ``training_state``; optimizer options that the config has changed keep their new value."""
        if "optimizer" not in training_state:
            raise CheckpointError("load_training_state: there is no 'optimizer'; give it what training_state() returns")
        state = {"self.optimizer": training_state["optimizer"]} if training_state["optimizer"] else {}
        parts.restore_parts(self._optimizer(), state, self._options, "load_training_state")

    def _go_on(self, checkpoint: reader.LoadedCheckpoint) -> None:
        """Restore everything from a checkpoint."""
        state = checkpoint.state
        if state is None or state.experiment is None:
            what = f"{checkpoint.path}: is not of an experiment, which could go on from it"
            raise CheckpointError(f"{what}; name a .safetensors file in it, for the weights alone")
        own = state.experiment
        self.set_state_dict(checkpoint.train_state)
        is_in_epoch = bool(self._cursor.taken)
        if is_in_epoch and own.data.is_own:
            self._begin_again(own.data)

        def restore_training_state() -> None:
            with load_errors.loading(f"{checkpoint.path}: experiment.state"):
                self.load_training_state(own.state)

        # The trainer has restored other phases of a run.
        models, initial = self.context["model"], self._store.initial
        assert initial
        restore_models(checkpoint, models, initial, restore_training_state, only=[PHASE])
        self._numbers.load_state_dict({name: meter.to_tree() for name, meter in own.numbers.items()})
        # An epoch had begun, and was not over.
        self._interrupted = own.in_epoch
        if self.alone:
            self.context.restore_requests(state.stopped, state.requested)
            self._store.restore_recoverables(checkpoint)
            in_folder = checkpoint.path.resolve().parent == self._store.folder.resolve()
            self._newest = self._store.path_of(self.iteration) if in_folder else None
            if in_folder and isinstance(self.visualizer, JsonLines):
                self.visualizer.cut(own.lines)
        # The engine restores the generators afterwards: creating the iterator of a loader samples a number, as it did before.
        if is_in_epoch:
            self._cursor.load_state_dict(own.data.to_tree())
            self._cursor.reopen()

    def _begin_again(self, place: CursorState) -> None:
        """Have the user's ``new_epoch`` start the interrupted epoch again, before anything that it changes is restored."""
        self._in_epoch = True
        self._cursor = self._new_cursor((), self._cursor.epoch)
        if place.begun is not None:
            restore_random_state(place.begun.to_tree(), self._generators())
        self.epoch -= 1
        # It has warned when it was called first, and a schedule that it steps may warn that no optimizer has.
        with catch_warnings(action="ignore"):
            self.new_epoch()
        self._in_epoch = False

    def state_dict(self) -> dict[str, int]:
        """Where the training is: ``iteration``, ``epoch`` (how many are over), ``batches`` (read of the one after)."""
        batches = self._cursor.taken
        over = batches and self._cursor.over()
        unfinished = not over and (batches or self._in_epoch)
        return {
            "iteration": self.iteration,
            "epoch": self._cursor.epoch + 1 - bool(unfinished),
            "batches": 0 if over else batches,
        }

    def set_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from these counters: ``read_batch`` returns the batch that comes next."""
        self.train_state.update({name: state_dict[name] for name in TRAIN_STATE if name in state_dict})
        batches = state_dict.get("batches", 0)
        self.train_state.pop("batches", None)
        self.iteration, self.epoch = state_dict["iteration"], state_dict["epoch"] + bool(batches)
        loader = self.train_loader if batches else ()
        self._cursor = self._new_cursor(loader, self.epoch - 1, taken=batches)
        self._in_epoch = False

    def _begin(self) -> None:
        """Be ready for the first batch."""
        engine = self._running
        self._refuse_overwriting(self.iteration + 1)
        self._plan()
        self._ended = None
        if self.alone and self.iteration >= engine.schedule.max_steps:
            logger.info(f"nothing is left to train: config.training.max_iteration is {engine.schedule.max_steps}")
        if self._in_epoch or (engine.is_over() and not self._interrupted):
            return
        if self._cursor.over():
            self.new_epoch()
        else:
            self._begin_epoch(again=self._interrupted)

    def _plan(self) -> None:
        """Take from ``config.training`` what is due when, and where training ends."""
        engine = self._running
        every = None if self.alone else self.context["runner"].print_interval
        schedule = Schedule(
            {**self.train_state, "iteration": self.iteration},
            max_steps=experiment_config.max_iteration(self.config),
            time_limit=engine.schedule.time_limit,
            printing=parse_intervals(every),
            validating=experiment_config.intervals(self.config, "valid_interval"),
            saving=experiment_config.intervals(self.config, "save_interval"),
        )
        self._planned = self._in_config()
        engine.set_schedule(schedule)

    def _in_config(self) -> tuple[Any, ...]:
        training = self.config.training
        return training.max_iteration, training.valid_interval, training.save_interval

    def _after_iteration(self) -> int | None:
        """Count what an iteration has done, and return how many epochs are over, if it has ended one."""
        if self._on_batch_end:
            for scheduler in self._schedulers:
                scheduler.note_cleared()
            self._on_batch_end(context=self.context, phase=PHASE, batch=self._batch, predictions=None, losses={})
        if not self._cursor.taken and self._cursor.epoch <= 0:
            self._refuse_epochs_without_end()
        if self._has_read_epoch():
            self._ended = self._cursor.epoch + 1
            self._report_length()
        if self.alone and self._in_config() != self._planned:
            self._plan()
        if self._average and self.iteration % MOST == 0:
            self._numbers.gather()
        ended, self._ended = self._ended, None
        return ended

    def _report_length(self) -> None:
        """Warn once if an epoch has other batches than ``epochs`` was planned with."""
        announced = self._announced
        count = self._cursor.taken
        if announced is None or count == announced:
            return
        self._announced = None
        what = f"train_loader: announced {announced:,} batches, got {count:,}"
        runner, iterations = self.context["runner"], self._running.schedule.max_steps
        planned = f"epochs: {runner.epochs} was planned as {iterations:,} iterations"
        logger.warning(f"{what}; {planned}")

    def _evaluate(self) -> dict[str, float]:
        """Validate, and return the numbers."""
        schedules = self._schedules_restored() if self.context.is_last_validation else nullcontext()

        def valid() -> None:
            with self._world.alone(), schedules:
                if self._world.is_main:
                    self.valid()

        return self._numbers.of_validation(valid)

    @contextmanager
    def _schedules_restored(self) -> Iterator[None]:
        """Restore schedules and the options of optimizers after the block.

        A validation that no interval asks for may step a schedule. A run with a higher limit makes
        no such validation, so a resumed run must not depend on it.
        """
        trained = self._trained().values()
        schedules = [part for part in trained if isinstance(part, LRScheduler)]
        optimizers = [part for part in trained if isinstance(part, Optimizer)]
        states = [copy.deepcopy(schedule.state_dict()) for schedule in schedules]
        options = [optimizer_state.options_of(optimizer) for optimizer in optimizers]
        try:
            yield
        finally:
            for schedule, state in zip(schedules, states, strict=True):
                schedule.load_state_dict(state)
            for optimizer, groups in zip(optimizers, options, strict=True):
                for group, own in zip(optimizer.param_groups, groups, strict=True):
                    group.update(own)

    def _call_valid(self, valid: Callable[[], None]) -> None:
        """Validate in evaluation mode and without gradients, and leave the modes and the random generators as they were."""
        random = random_state(self._generators())
        try:
            with in_evaluation_mode(self.model):
                valid()
        finally:
            restore_random_state(random, self._generators())

    def active_batch(self) -> tuple[Any, int] | None:
        """Return the batch that was read last, and its number in the epoch; None before the first."""
        return None if self._batch is None else (self._batch, self._cursor.taken)

    def _has_read_epoch(self) -> bool:
        """Return whether all batches of the running epoch were read."""
        return bool(self._cursor.taken) and self._cursor.over()

    def _place_in_epoch(self) -> str | None:
        """Return where in an epoch the training is; None if no epoch is running."""
        cursor = self._cursor
        if not self._in_epoch or not cursor.taken or cursor.over():
            return None
        of = "" if cursor.length is None else f" of {cursor.length}"
        return f"{cursor.taken}{of} batches"

    def _refuse_epochs_without_end(self) -> None:
        """Raise if intervals count epochs but ``read_batch`` is never called: then no epoch would end."""
        schedule = self._running.schedule
        in_epochs = [name for name, done in INTERVALS.items() if getattr(schedule, done).epochs]
        if in_epochs and not self._cursor.taken:
            unread = f"{type(self).__name__}.train_batch: did not call self.read_batch(), so no epoch ends"
            raise StageError(f"{unread}; call it, or give {' and '.join(in_epochs)} in iterations")

    def _refuse_overwriting(self, iteration: int) -> None:
        """By hand, raise if the output folder has checkpoints of another run that would be overwritten."""
        newest = self.checkpointer.newest() if self.alone else None
        if newest and newest != self._newest and (layout.step_of(newest) or 0) >= iteration:
            what = f"{newest}: is of another run, and this one is at iteration {self.iteration}, and would overwrite it"
            raise ConfigError(f"{what}; choose another args.output, or go on from it, without an args.checkpoint_path")

    def _begin_epoch(self, *, again: bool) -> None:
        """Begin an epoch; ``again``: a run that was resumed goes on with it."""
        self._in_epoch, self._interrupted = True, False
        self.context["current_epoch"] = self._cursor.epoch
        if not again:
            hooks = self.context["hooks"]
            hooks.before_epoch(context=self.context)
            hooks.before_phase(context=self.context, phase=PHASE)
            hooks.before_pass(context=self.context, phase=PHASE)

    def _current_epoch(self) -> int:
        """Return the number of the epoch that is running or continues, or of the last one."""
        unread = self._interrupted and not self._cursor.taken
        return max(0, self.epoch - (not unread))

    def _log_discarded_windows(self) -> None:
        """Log how many windows of the OptimSchedulers were discarded in this epoch."""
        log_discarded_windows(PHASE, self._cursor.epoch, self._schedulers_by_name)

    def _end_epoch(self) -> None:
        """Call the plugins at the end of an epoch."""
        if self._in_epoch:
            self._in_epoch = False
            self.train_state["epoch"] = self._cursor.epoch + 1
            self._log_discarded_windows()
            hooks, numbers = self.context["hooks"], self._numbers.of_training()
            hooks.after_pass(context=self.context, phase=PHASE, metrics=numbers)
            self._running.numbers.take(PHASE, numbers, trained=True)
            hooks.after_phase(context=self.context, phase=PHASE)
            hooks.after_epoch(context=self.context)

    def _cut_epoch_short(self) -> None:
        """Note the numbers of an epoch that has not ended."""
        self._log_discarded_windows()
        self._running.numbers.take(PHASE, self._numbers.of_training(), trained=True)


class ExperimentPhase(PhaseSchema):
    """The settings of what an experiment trains, where others have phases."""

    def valid_name(self, number: str) -> str:
        """Return how a number of the validation is reported: as it is."""
        return number


class ExperimentClient(IterationClient):
    """What an engine calls to train an experiment.

    Args:
        experiment: the experiment. The client keeps only a weak reference to it.
    """

    # ``valid`` restores them itself, also if user code calls it.
    restores_generators = False

    def __init__(self, experiment: ExperimentBase) -> None:
        super().__init__(experiment.context)
        self._experiment: ExperimentBase = proxy(experiment)

    @property
    def runner(self) -> RunnerSchema:
        """The settings of the runner; without a run, the defaults."""
        if self._experiment.alone:
            return RunnerSchema.model_validate({"name": PHASE, "class": "train"})
        return super().runner

    def phases(self) -> list[PhaseSchema]:
        """Return one, which is validated."""
        return [ExperimentPhase.model_validate({"name": PHASE, "valid_dataset_name": "valid_loader"})]

    def schedule(self, counters: Mapping[str, int]) -> Schedule:
        """Return an empty schedule, until ``train`` sets one."""
        return Schedule(counters)

    def generators(self) -> dict[str, Any]:
        """Return the random generators in its attributes and in its data, by name."""
        return self._experiment._generators()

    def validator(self, evaluate: Verb) -> Verb:
        """Return what validates it."""
        return self._evaluate

    def _evaluate(self, _context: Context, _phase: Phase) -> dict[str, float]:
        return self._experiment._evaluate()

    def address(self, phase: str) -> str:
        """Return what messages call it."""
        return PHASE

    def errors(self, phase: str) -> AbstractContextManager[None]:
        """Return a block whose errors stay as they are."""
        return nullcontext()

    def save(self, save_checkpoint: Callable[[], None]) -> None:
        """Save a checkpoint by its own ``save``, which a subclass may have overridden."""
        self._experiment.save()

    def saved_counters(self) -> dict[str, int]:
        """Return the counters that a checkpoint has."""
        return {**self._experiment.train_state, **self._experiment.state_dict()}

    def state(self) -> dict[str, Any]:
        """Return what else a checkpoint keeps."""
        return self._experiment._state()

    def no_numbers(self) -> dict[str, dict[str, Any]]:
        """Return the numbers of an epoch that starts."""
        return {PHASE: {}}

    def has_read_epoch(self) -> bool:
        """Return whether all batches of the running epoch were read."""
        return self._experiment._has_read_epoch()

    def current_epoch(self) -> int:
        """Return the number of the epoch that continues."""
        return self._experiment._current_epoch()

    def start_iterations(self) -> None:
        """Set the schedule of the engine, and start an epoch or continue one."""
        self._experiment._begin()

    def after_iteration(self) -> int | None:
        """Count what an iteration has done."""
        return self._experiment._after_iteration()

    def print_numbers(self) -> None:
        """Give the plugins the numbers since the last time."""
        self._experiment._numbers.print()

    def place_in_epoch(self) -> str | None:
        """Return where in an epoch the training is."""
        return self._experiment._place_in_epoch()

    def end_epoch(self, *, cut_short: bool) -> None:
        """End the epoch that is running, if one is."""
        if cut_short:
            self._experiment._cut_epoch_short()
        else:
            self._experiment._end_epoch()
