"""Brain: what is computed for a batch, and how that trains a model; ModuleBrain around a plain module. Names are SpeechBrain's."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import Parameter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import finalize

import torch
from loguru import logger
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pipeline.brain.broadcasts import LossWatch
from pipeline.brain.checkpointer import Checkpoint, Checkpointer
from pipeline.brain.compilation import compile_modules
from pipeline.brain.fit import NAME, fit, test
from pipeline.brain.option_values import NOT_TAKEN
from pipeline.brain.run_options import RunOptions
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.config.schema import TARGETS
from pipeline.context import Context
from pipeline.data.batch import (
    SlotBatch,
    count_samples,
    count_targets,
    is_unlabelled,
    listed,
    shape_of,
    split,
    target_in,
)
from pipeline.data.generators import own_generators
from pipeline.data.loader import LimitedLoader, end_workers, make_loader, refuse_unshared
from pipeline.distributed.world import current_world, joined
from pipeline.engine.trainable import TRAIN, Stage, Trainable
from pipeline.engine.unregistered import require_registered
from pipeline.errors import ConfigError, DataError, DivergedError
from pipeline.optim.losses import Losses
from pipeline.optim.nonfinite import ADVICE
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.parameter_groups import trainable_parameters, without_decay
from pipeline.optim.precision import autocast, make_scaler
from pipeline.optim.schedules import Constant
from pipeline.optim.windowed_optimizer import WindowedOptimizer
from pipeline.run.exclusive import exclusive
from pipeline.updater.updater import own_losses
from pipeline.user_code import class_path
from pipeline.user_code.plugin_calls import hook_or_none
from pipeline.user_code.uncalled import BRAIN_REMEDIES, uncalled_faults_of_class

__all__ = ["Brain", "ModuleBrain", "OwnLossBrain", "Stage"]

# A dataset of SpeechBrain's, and what makes its batches.
DYNAMIC, PADDED = "speechbrain.dataio.dataset:DynamicItemDataset", "speechbrain.dataio.batch:PaddedBatch"

# Attribute of SpeechBrain's Brain that is neither a method nor an option -> what to do instead.
ABSENT_ATTRIBUTES = {
    "profiler": "fit runs torch's profiler itself, for the first batches: set profile_training, and not start or step",
}


def overridden(instance: object, base: type, *methods: str) -> list[str]:
    """Those of a base's methods that the class of an instance has overridden."""
    return [name for name in methods if getattr(type(instance), name) is not getattr(base, name)]


# What the framework needs of a Brain beside SpeechBrain's names. These are functions, so that a subclass is free in its names.


def apply_options(brain: Brain, options: RunOptions) -> None:
    """Set the run options of a Brain.

    Raises:
        ConfigError: the device cannot compute in a precision.
    """
    brain._apply_run_options(options)


def prepare_for_evaluation(brain: Brain, phase: str, context: Context, options: RunOptions) -> None:
    """Make a Brain ready to be evaluated in a run.

    Args:
        brain: the Brain.
        phase: the name of its phase.
        context: of the run.
        options: its run options.

    Raises:
        ConfigError: the device cannot compute in a precision.
    """
    brain._apply_run_options(options)
    type(brain).bind(brain, phase, {}, context)
    brain._place_modules()


def make_optimizers(brain: Brain, **arguments: Any) -> dict[str, OptimScheduler]:
    """Call ``init_optimizers`` of a Brain, and give each optimizer a constant rate.

    Args:
        brain: the Brain.
        arguments: further arguments of the OptimSchedulers.
    """
    return brain._make_optimizers(**arguments)


def wrappable(brain: Brain) -> nn.Module:
    """What plugins may wrap: the module of a ModuleBrain, and all modules of another."""
    return brain.module if isinstance(brain, ModuleBrain) else brain.modules


def wrap(brain: Brain, wrapped: Any) -> None:
    """Put something in the place of what is ``wrappable``."""
    if isinstance(brain, ModuleBrain):
        brain.module = brain.modules["model"] = wrapped
    else:
        brain.modules = wrapped


def ignored_arguments(brain: Brain) -> list[str]:
    """Arguments of the constructor that a config would ignore: optimizer, checkpointer, options of the run."""
    # An init_optimizers of its own may use it.
    opt_class = () if overridden(brain, Brain, "init_optimizers") else ("opt_class",)
    names = [name for name in (*opt_class, "checkpointer") if getattr(brain, name) is not None]
    return names + sorted(brain._run_options.model_fields_set - {"device"})


def unregistered_modules(brain: Brain) -> list[str]:
    """Attributes with trainable parameters outside of ``modules``, which nothing trains or saves."""
    registered = set(brain.modules.parameters())
    modules = {name: value for name, value in vars(brain).items() if isinstance(value, nn.Module)}
    trained = {name: {own for own in module.parameters() if own.requires_grad} for name, module in modules.items()}
    return [name for name, parameters in trained.items() if parameters - registered]


class ConstructorError(ConfigError, AttributeError):
    """A Brain lacks an attribute, since its constructor was not called; ``hasattr`` still says no."""


class Brain:
    """Computes predictions and losses; a subclass defines ``compute_forward`` and ``compute_objectives``.

    By itself it trains with ``fit``, and ``evaluate`` tests it; in a config it is the ``model`` of a phase.

    Args:
        modules: name -> module: all that is trained and saved; ``self.modules.<name>``.
        opt_class: makes an optimizer of the parameters, for ``fit``; in a config, the phase has ``optim_schedulers``.
        hparams: hyperparameters; ``self.hparams.<name>``. One with the name of a run option sets it.
        run_opts: run options (see RunOptions), over those in ``hparams``; in a config, the runner has such keys.
        checkpointer: where ``fit`` saves, and ``evaluate`` finds the best checkpoint.

    Attributes:
        step: the number of the batch in its pass, from 1; a validation within a pass counts separately.
        optimizers_dict: the optimizers that the losses drive, by name; None before there are any.
        optimizer: the one that ``opt_class`` has made, or the only one of a phase in a config.
        scaler: scales the loss in fp16; elsewhere a disabled one. One of the user's own stays.
        training_ctx, evaluation_ctx: autocast as ``precision`` and ``eval_precision`` say, for a ``fit_batch`` or
            ``evaluate_batch`` of its own.
        device, device_type: where it computes.
        train_sampler: whose ``set_epoch`` is called when a training pass begins; None: nobody's.

    Names that are not SpeechBrain's begin with an underscore, so that a subclass is free in its own; except ``bind``,
    ``log``, ``count_samples``, ``target`` and ``readable``, which may be overridden.
    """

    optimizer: Optimizer
    # None until there are some; a type that says so would have each subclass ask.
    optimizers_dict: dict[str, Optimizer] = cast("Any", None)
    train_sampler: Any = None
    # Ours, as long as no other is set.
    _scaler: GradScaler | None = None
    # Has the checkpoints of the debug fit that was the last; None where the last was none.
    _debug_folder: TemporaryDirectory[str] | None = None
    # Whether one of its methods computes, in which its modules are called compiled.
    _computes = False
    # Counts the samples of a batch if neither a subclass nor the config does.
    _count: Callable[[Any], int] = staticmethod(count_samples)

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        opt_class: Callable[..., Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_opts: Mapping[str, Any] | RunOptions | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        if not isinstance(checkpointer, Checkpointer | None):
            what = f"checkpointer is a {type(checkpointer).__module__}.{type(checkpointer).__qualname__}"
            raise ConfigError(f"{what}; write pipeline.Checkpointer, in YAML !new:pipeline.Checkpointer")
        self.modules = nn.ModuleDict(dict(modules or {}))
        self.opt_class = opt_class
        self.hparams = SimpleNamespace(**(hparams or {}))
        self.checkpointer = checkpointer
        if checkpointer:
            checkpointer.session.begin(self._entry())
        counts_itself = None
        if overridden(self, Brain, "count_samples"):
            # Looked up on the class, so that an attribute of this name may be a subclass's own.
            method = type(self).count_samples.__get__(self)
            counts_itself = method, f"{type(self).__name__}.count_samples"
        names = [name for name in vars(Brain) if not name.startswith("_")]
        self._trainable = Trainable(
            self,
            overridden(self, Brain, *names),
            self._count,
            counts_itself,
            self._fast_computation(),
            self._loss_source,
            self._compiled,
            self._named_modules,
        )
        self._loss_watch = LossWatch()
        self._apply_run_options(RunOptions.resolve(hparams, run_opts))
        if overridden(self, Brain, "print_trainable_parameters"):
            self.print_trainable_parameters()

    if not TYPE_CHECKING:  # it would accept any misspelt attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise for an attribute that does not exist; without the call of this constructor nearly none does."""
            kind = type(self).__name__
            if "_run_options" not in vars(self):
                remedy = "call it first, with the modules: super().__init__({'net': net})"
                raise ConstructorError(f"{kind}.__init__ has not called super().__init__(); {remedy}")
            remedies = {**NOT_TAKEN, **BRAIN_REMEDIES, **ABSENT_ATTRIBUTES}
            remedy = f"; {remedies[name]}" if name in remedies else ""
            raise AttributeError(f"'{kind}' object has no attribute '{name}'{remedy}", name=name, obj=self)

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: Mapping[str, Any] | None = None,
        valid_loader_kwargs: Mapping[str, Any] | None = None,
        plugins: Iterable[Any] = (),
    ) -> None:
        """Train, without a config. Under torchrun the processes share the work, see ``pipeline/distributed/README.md``.

        With a checkpointer it goes on from the newest checkpoint that a fit has saved there, also in the middle of an
        epoch: weights, optimizers, counters, random generators, and what ``add_recoverable`` has named. After it
        everything is as if that fit and this one had been one. It ends with a log line where nothing is left to train.

        As in SpeechBrain, a validation uses random numbers of the training: with dropout, a fit with ``valid_set`` ends
        with other weights than one without it. In a run of a config validations leave the generators as they were.

        Args:
            epoch_counter: gives the number of each epoch: a range, a list, or an object that counts by itself. Those
                that are done are skipped: of each number as many epochs as have been trained to their end.
            train_set: a dataset, of which ``make_dataloader`` makes batches, or a loader that gives batches.
            valid_set: likewise; evaluated after each epoch. None: nothing is.
            progressbar: whether to show one; None: where stderr is a terminal, unless ``noprogressbar``.
            train_loader_kwargs: keyword arguments of the DataLoader.
            valid_loader_kwargs: likewise.
            plugins: objects with hooks, or what the ``plugins`` of a config may have: ``"early_stopping"``,
                ``{"ema": {"decay": 0.99}}``, a class. They get the hooks of a training, with ``"brain"`` as the phase and
                ``"runner"`` as the only stage; a plugin with ``wrap_model`` is refused. Checkpoints keep the states of
                plugins. Plugins write into the hyperparameter ``output_folder``.

        Raises:
            ConfigError: there is nothing to train, a module keeps layers in a plain list, keywords are given for a loader
                that is made already, or the class defines a method of SpeechBrain's that nobody calls.
            StageError: nothing says how to optimize.
            DataError: there is no data, or it does not fit.
            DivergedError: too many losses were not finite.
            CheckpointError: the checkpoints are of something else, or none of them is valid.
            StorageError: the storage refuses.
            ConcurrentRunError: another thread of this process is training.
        """
        self._refuse_faults()
        if self._run_options.test_only:
            return
        self._debug_folder = self._new_debug_folder()
        name = f"{type(self).__name__}.fit"
        with (
            exclusive(name, may_nest=True),
            joined(),
            self._checkpoints_in(self._debug_folder),
            ExitStack() as workers,
        ):
            train = self._loader_of(train_set, Stage.TRAIN, train_loader_kwargs, workers)
            valid = None if valid_set is None else self._loader_of(valid_set, Stage.VALID, valid_loader_kwargs, workers)
            self._trainable.work_alone()
            self.on_fit_start()
            fit(self, epoch_counter, train, valid, show=progressbar, plugins=plugins)

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> float:
        """Evaluate, with the best checkpoint if there is a checkpointer; after a debug ``fit``, with a checkpoint of that fit.

        Args:
            test_set: a dataset or a loader, as in ``fit``.
            max_key: the number by which the best checkpoint is chosen, more being better; each by those of its own iteration.
            min_key: likewise, less being better. Without either it is the newest.
            progressbar: whether to show one; None: where stderr is a terminal, unless ``noprogressbar``.
            test_loader_kwargs: keyword arguments of the DataLoader.

        Returns:
            The mean loss over samples, the same on all ranks.

        Raises:
            ConcurrentRunError: another thread of this process is training.
        """
        self._refuse_faults()
        name = f"{type(self).__name__}.evaluate"
        with exclusive(name, trains=False, may_nest=True), joined(), ExitStack() as workers:
            loader = self._loader_of(test_set, Stage.TEST, test_loader_kwargs, workers)
            self._place_modules()
            in_run = self._trainable.in_run
            own = own_generators({"": self}, {"test": loader}) if in_run else {}
            random = random_state(own) if in_run else None
            with self._checkpoints_in(self._debug_folder):
                self.on_evaluate_start(max_key, min_key)
            loss = test(self, loader, progressbar)
            if random:
                # Within a run it leaves the training as it was.
                restore_random_state(random, own)
        return loss

    def make_dataloader(
        self, dataset: Any, stage: Stage, ckpt_prefix: str | None = "dataloader-", **loader_kwargs: Any
    ) -> Iterable[Any]:
        """A loader of a dataset. The order of samples depends on the hyperparameter ``seed`` and the epoch alone.

        Args:
            dataset: map-style, iterable, or a list of samples; a DynamicItemDataset of SpeechBrain gives PaddedBatches.
            stage: what for.
            ckpt_prefix: kept for SpeechBrain's callers: ``fit`` keeps the place in its data, whoever has made the loader.
            loader_kwargs: keyword arguments of torch's DataLoader.
        """
        if DYNAMIC in (f"{base.__module__}:{base.__qualname__}" for base in type(dataset).__mro__):
            loader_kwargs.setdefault("collate_fn", class_path.load(class_path.parse(PADDED)))
        seed = loader_kwargs.pop("seed", getattr(self.hparams, "seed", 0))
        return make_loader(dataset, seed=seed, where="Brain.make_dataloader", **loader_kwargs)

    def init_optimizers(self) -> None:
        """Make the optimizer with ``opt_class``; a subclass with several puts them into ``optimizers_dict``, by name.

        All of these descend the loss named ``loss``; for others, bind OptimSchedulers that say so. A subclass whose own
        ``fit_batch`` steps its optimizers may keep them where it likes. In a config, one of a subclass is called where the
        config names no optimizer.
        """
        if self.opt_class is None:
            return
        parameters = list(trainable_parameters(self.modules, None).values())
        groups = without_decay(parameters) if self._run_options.remove_vector_weight_decay else parameters
        self.optimizer = self.opt_class(groups)
        self.optimizers_dict = {"opt_class": self.optimizer}

    def on_fit_start(self) -> None:
        """Prepare the modules, and make the optimizers; then ``fit`` restores the checkpoint.

        In a config the optimizers are those of the phase, and the startup stage has loaded the weights. A run that is
        resumed takes everything back after it, whichever runner stage comes.
        """
        self._place_modules()
        if self._trainable.in_run:
            return
        type(self).bind(self, "", self._make_optimizers(), patience=self._run_options.nonfinite_patience)

    def _make_optimizers(self, **more: Any) -> dict[str, OptimScheduler]:
        """Call ``init_optimizers``, and give each optimizer a constant schedule; ``more``: other arguments of it."""
        self.optimizers_dict = {}
        self.init_optimizers()
        only = vars(self).get("optimizer")
        if not self.optimizers_dict and isinstance(only, Optimizer):
            self.optimizers_dict = {"optimizer": only}
        options, schedulers = self._run_options, dict[str, OptimScheduler]()
        accum, clip = options.grad_accumulation_factor, options.max_grad_norm
        more |= {"optim_conf": {}, "model": self.modules, "accum_grad": accum, "grad_clip": clip}
        for name, optimizer in self.optimizers_dict.items():
            schedulers[name] = Constant(lambda _, own=optimizer: own, **more)
        return schedulers

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights of the best checkpoint, or of the newest if no key is given."""
        metric = max_key or min_key
        if max_key and min_key:
            raise ConfigError(f"evaluate: max_key is '{max_key}' and min_key '{min_key}'; name one")
        if self.checkpointer is None:
            if metric:
                what = f"evaluate: '{metric}' chooses a checkpoint, and there is no checkpointer"
                raise ConfigError(f"{what}; give the Brain one")
            return
        recovered = self.checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)
        # A number that no call has told is one that fit reports.
        if metric and not recovered and (path := self.checkpointer.best(metric, "max" if max_key else "min")):
            self.checkpointer.load_checkpoint(Checkpoint.read(path))

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """A pass begins; ``epoch`` is None in a test."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """A pass is over; ``stage_loss`` is its mean loss over samples, nan where none was computed."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """A training batch is about to be used; ``should_step``: it closes an accumulation window."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        """A training batch has been used; ``loss`` is detached, and on its device."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The predictions for a batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define compute_forward(batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses | None:
        """The loss, a scalar tensor that is a mean over samples; or several losses by name.

        Outside of TRAIN it may be None: then the metrics and what is logged are reported alone.
        """
        kind = type(self).__name__
        raise NotImplementedError(f"{kind} does not define compute_objectives(predictions, batch, stage)")

    def fit_batch(self, batch: Any) -> Tensor:
        """One training step.

        Returns:
            The loss, detached, on its device; not finite where the step was discarded. For a batch
            without samples it is 0; nothing is computed then, and no hook of the Brain is called.
        """
        return self._trainable.fit_batch(batch)

    def _fast_computation(self) -> Callable[[Any], tuple[Any, Any]] | None:
        """Return what computes predictions and losses with fewer calls than the two methods, if there is such a way."""
        return None

    # What SpeechBrain's fit_batch calls, for one of the user's own; of the default, where they are overridden.

    def optimizers_step(self) -> None:
        """End a window: the optimizers that ``freeze_optimizers`` returns step, and their gradients are cleared.

        Call it in a ``fit_batch`` of one's own, after the backward of the mean loss, scaled by ``scaler``; over several
        batches, after that of the last. Rate, clipping, checks and hooks are as in the default ``fit_batch``. Processes have
        averaged their gradients after each backward. It counts as one update.
        """
        if not self.optimizers_dict:
            return
        trainable = self._trainable
        due = trainable.begin_step()
        valid = {id(own) for own in self.freeze_optimizers(self.optimizers_dict).values()}
        active = [own for own in (trainable.schedulers if due is None else due) if id(own.optimizer) in valid]
        skips = self._run_options.skip_nonfinite_grads and not self.scaler.is_enabled()
        if skips and overridden(self, Brain, "check_gradients"):
            self.check_gradients()
        self.optimizer_step += trainable.step(active, by_hand=due is None)

    def freeze_optimizers(self, optimizers: dict[str, Optimizer]) -> dict[str, Optimizer]:
        """Those that step now; the gradients of the others wait."""
        return optimizers

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients of the optimizers that step now; one of a subclass is called when a training pass begins and ends."""
        for optimizer in self.freeze_optimizers(self.optimizers_dict).values() if self.optimizers_dict else ():
            optimizer.zero_grad(set_to_none=set_to_none)

    def check_loss_isfinite(self, loss: Tensor) -> None:
        """Read a loss, and count it where it is not finite; the default ``fit_batch`` needs no such call.

        Raises:
            DivergedError: there were more in this pass than ``nonfinite_patience``.
        """
        # A mean over no samples is nan.
        if self._trainable.record.samples != 0 and not torch.isfinite(loss).all():
            # Not nonfinite_count: where super().fit_batch has counted this loss, it would count twice.
            numbers = self._trainable.numbers
            numbers.replace(nonfinite=numbers.nonfinite + 1)
            count, patience = self.nonfinite_count, self._run_options.nonfinite_patience
            if patience is not None and count > patience:
                raise DivergedError(f"{self._where}{count} losses of this epoch were not finite; {ADVICE}")
            logger.warning(f"{self._where}a loss is not finite: number {count} of this epoch")

    def check_gradients(self) -> None:
        """Forget each gradient that is not finite; the run option ``skip_nonfinite_grads`` discards the whole window."""
        for name, parameter in self.modules.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                parameter.grad = None
                logger.warning(f"{self._where}the gradient of '{name}' is not finite, and is left out")

    def update_average(self, loss: Tensor, avg_loss: float) -> float:
        """The mean of a pass, with one loss more; only one of a subclass is called, and what it returns is the loss of the pass."""
        if torch.isfinite(loss):
            avg_loss = avg_loss - avg_loss / self.step + float(loss) / self.step
        return avg_loss

    @contextmanager
    def no_sync(self, use: bool = True) -> Iterator[None]:
        """A block in which torch's DDP would not average the gradients of several processes; here it changes nothing."""
        yield

    @property
    def step(self) -> int:
        """The number of the batch in its pass, from 1; a validation within a pass counts separately."""
        return self._trainable.record.step

    @step.setter
    def step(self, value: int) -> None:
        self._trainable.record.renumber(value)

    @property
    def optimizer_step(self) -> int:
        """How many updates there were, discarded windows included; what a subclass sets goes on from there."""
        return self._trainable.counters["update"]

    @optimizer_step.setter
    def optimizer_step(self, value: int) -> None:
        self._trainable.counters["update"] = value

    @property
    def avg_train_loss(self) -> float:
        """The mean loss of the training pass so far; on a GPU this waits."""
        mean = self._trainable.numbers.mean_loss()
        return 0.0 if math.isnan(mean) else mean

    @avg_train_loss.setter
    def avg_train_loss(self, value: float) -> None:
        self._trainable.numbers.replace(average=value)

    @property
    def nonfinite_count(self) -> int:
        """How many losses of the training pass were not finite so far, as a subclass counts them or we; on a GPU this waits."""
        return self._trainable.numbers.nonfinite_losses()

    @nonfinite_count.setter
    def nonfinite_count(self, value: int) -> None:
        self._trainable.numbers.replace(nonfinite=value)

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """``modules``: nothing is wrapped around them."""
        return self.modules

    def print_trainable_parameters(self) -> None:
        """Log how many parameters there are, and how many are trained; one of a subclass is called by the constructor."""
        total = sum(parameter.numel() for parameter in self.modules.parameters())
        trained = sum(parameter.numel() for parameter in self.modules.parameters() if parameter.requires_grad)
        logger.info(f"{type(self).__name__} trains {trained} of {total} parameters ({trained / (total or 1):.2%})")

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """The loss of one batch, without training."""
        return self._trainable.evaluate_batch(batch, stage)

    def count_samples(self, batch: Any) -> int:
        """Return how many samples a batch holds, by which its loss counts in each mean.

        It is what ``count_samples`` of the phase returns. Without that it is the length of the
        first tensor in the batch, or of an object with ``to``; for a plain module, that of the
        target. A subclass may return whatever its loss is a mean over, such as tokens. A batch of 0
        contributes nothing: its loss is not used.
        """
        return self._trainable.default_count(batch)

    def target(self, batch: Any) -> Any:
        """What the metrics compare the predictions with."""
        return split(batch)[1]

    def readable(self, predictions: Any, batch: Any) -> Any:
        """What metrics get of the predictions, and what is written of them: the predictions themselves."""
        return predictions

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Report a number; it is averaged over the samples of the pass, and stays on its device until it is read.

        Args:
            name: how it is reported; in a validation pass with ``valid_`` before it. That of a metric, and ``loss``, are
                taken, but by an updater that returns no loss.
            value: a scalar that is a mean over the samples.
            batch_size: how many these are; None: those of the batch.
        """
        self._trainable.numbers.logged.log(name, value, batch_size)

    def bind(
        self,
        phase: str,
        optim_schedulers: Mapping[str, WindowedOptimizer],
        context: Context | None = None,
        patience: int | None = 3,
    ) -> None:
        """Prepare this Brain for a phase and its optimizers; the default network and runner stages and ``fit`` call it.

        Args:
            phase: its name, for messages.
            optim_schedulers: name -> scheduler that one of its losses drives.
            context: the run's, for its hooks; None: there are none.
            patience: how many non-finite batches a pass may have before training ends; None does not check.
        """
        self._trainable.bind(
            phase,
            list(optim_schedulers.values()),
            counters=None if context is None else context["train_state"],
            patience=patience,
            sync_batchnorm=context is not None and getattr(context.peek("runner"), "sync_batchnorm", False),
            keeps_outputs=context is not None and hook_or_none(context["hooks"], "after_batch") is not None,
        )
        self._watch_first_loss()
        if context is not None:
            self._hold(optim_schedulers)

    def _watch_first_loss(self) -> None:
        """Have the next call of `compute_objectives` say how it broadcasts, once for this Brain.

        The wrapper removes itself, so later calls cost nothing.
        """
        is_replaced = "compute_objectives" in vars(self)
        if not (self._loss_watch.is_done or is_replaced or self._run_options.compile):
            vars(self)["compute_objectives"] = self._watched_objectives

    def _watched_objectives(self, *arguments: Any, **keywords: Any) -> Any:
        """Call `compute_objectives`; a `fit_batch` of a subclass may pass further arguments."""
        vars(self).pop("compute_objectives", None)
        compute = partial(self.compute_objectives, *arguments, **keywords)
        inputs = [*arguments, *keywords.values()]
        if self._loss_watch.is_done or len(inputs) < 2:
            return compute()
        predictions, batch = inputs[:2]
        returned, broadcast = self._loss_watch.call(compute, predictions, target_in(batch))
        if broadcast and current_world().is_main:
            logger.warning(f"{self._where}{broadcast}")
        return returned

    def _hold(self, optim_schedulers: Mapping[str, WindowedOptimizer]) -> None:
        """Name the optimizers of a run as those that a Brain makes by itself."""
        optimizers = {name: own.optimizer for name, own in optim_schedulers.items()}
        # One that a subclass keeps there for itself stays.
        if len(optimizers) == 1 and vars(self).get("optimizer") in (None, *(self.optimizers_dict or {}).values()):
            [self.optimizer] = optimizers.values()
        self.optimizers_dict = optimizers or self.optimizers_dict

    def _apply_run_options(self, options: RunOptions) -> None:
        """Set the options of a run; each is also an attribute with its name.

        Raises:
            ConfigError: the device cannot compute in a precision.
        """
        self._run_options = options
        vars(self).update(options)
        self.device = torch.device(options.device or "cpu")
        self.device_type = self.device.type
        self.distributed_launch = {"RANK", "LOCAL_RANK"} <= os.environ.keys()
        self._trainable.take_options(options)
        # These may be entered within ours, which cannot be entered twice.
        self.training_ctx = autocast(options.precision, self.device, steps=True) or nullcontext()
        self.evaluation_ctx = autocast(options.eval_precision, self.device) or nullcontext()
        scaler = make_scaler(options.precision, self.device) or GradScaler(self.device_type, enabled=False)
        ours = vars(self).get("scaler") is self._scaler
        if ours and (self._scaler is None or scaler.is_enabled() != self._scaler.is_enabled()):
            self.scaler = self._scaler = scaler

    def _place_modules(self) -> None:
        """Move the modules to their device, and compile or script them if the options say so; only once."""
        self.modules.to(self.device)
        compile_modules(self.modules, self._run_options, lambda: self._computes)
        own = overridden(self, Brain, "fit_batch", "evaluate_batch")
        for name in ("compute_forward", "compute_objectives", *own) if self._run_options.compile else ():
            vars(self)[name] = self._compiled(getattr(type(self), name).__get__(self))

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function in which calls of the modules are compiled, if the options say so; elsewhere they are not."""
        return partial(_compute, self, function) if self._run_options.compile else function

    def _named_modules(self) -> dict[str, nn.Module]:
        """The modules as ``freeze`` names them."""
        return {name: part for name, part in self.modules.named_modules() if name}

    @property
    def _where(self) -> str:
        return self._trainable.where

    def _loss_source(self) -> str:
        """What has returned a loss, for messages."""
        return f"{self._where}compute_objectives"

    def _refuse_faults(self) -> None:
        """Raise for layers that nobody trains, and for methods that nobody calls; with a config, ``check`` reports them."""
        require_registered(self.modules.values(), owner=self)
        faults = [] if self._trainable.in_run else uncalled_faults_of_class(type(self), Brain, BRAIN_REMEDIES)
        if faults:
            raise ConfigError("\n".join(faults))

    def _new_debug_folder(self) -> TemporaryDirectory[str] | None:
        """For the checkpoints of a debug run, a temporary folder that exists until the next fit; None for another run."""
        if self._debug_folder:
            self._debug_folder.cleanup()
        if not self.checkpointer or not self._run_options.debug or self._run_options.debug_persistently:
            return None
        folder = TemporaryDirectory(prefix="debug-")
        finalize(self, folder.cleanup)
        return folder

    @contextmanager
    def _checkpoints_in(self, folder: TemporaryDirectory[str] | None) -> Iterator[None]:
        """Use another folder for checkpoints until the block ends; None: the checkpointer's own."""
        checkpointer = self.checkpointer
        if checkpointer is None:
            yield
            return
        with checkpointer.session.in_use(self._entry()):
            if folder:
                # That of rank 0; the others' stay empty.
                self.checkpointer = checkpointer.session.in_folder(Path(current_world().broadcast(folder.name)))
            try:
                yield
            finally:
                self.checkpointer = checkpointer

    def _entry(self) -> dict[str, Any]:
        """Return this Brain in the form in which a run passes its models to a checkpointer."""
        return {NAME: {"model": self, "brain": self}}

    def _loader_of(self, data: Any, stage: Stage, keywords: Mapping[str, Any] | None, workers: ExitStack) -> Any:
        """Return the loader itself, or one made of a dataset; in a debug run, a few of its batches.

        ``workers`` ends the worker processes of a loader that is made here.
        """
        loader, options = data, self._run_options
        if hasattr(data, "__getitem__") or isinstance(data, Dataset):
            loader = self.make_dataloader(data, stage, **(keywords or {}))
            workers.callback(end_workers, loader)
        elif keywords:
            what = f"{stage.name.lower()}_loader_kwargs would be ignored: {type(data).__name__} is a loader already"
            raise ConfigError(f"{what}; give fit the dataset, or leave it out")
        refuse_unshared(loader, f"{stage.name.lower()}_set")
        return LimitedLoader(loader, options.debug_batches) if options.debug else loader


def _compute(brain: Brain, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before, brain._computes = brain._computes, True
    try:
        return function(*args, **kwargs)
    finally:
        brain._computes = before


class ModuleBrain(Brain):
    """Makes a Brain of a module and a loss.

    Args:
        module: called with the batch's inputs, by position or name; with a SlotBatch as it is, without the target.
        loss: ``loss(predictions, target)`` -> scalar. None: the module gets the target too, by the name of ``TARGETS`` that
            its forward has, and returns its ``loss``, as an attribute or under that key; what metrics get are its
            ``logits``, if it returns some.

    Raises:
        ConfigError: ``loss`` is None, and forward takes no target.
    """

    _count = staticmethod(count_targets)

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor] | None) -> None:
        # Before the call, which asks for `_fast_computation`.
        self.module, self.loss = module, loss
        super().__init__({"model": module})
        self._signature = inspect.signature(module.forward)
        by_name = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
        parameters = self._signature.parameters.items()
        # Name -> whether it has a default.
        self._defaults = {name: own.default is not Parameter.empty for name, own in parameters if own.kind in by_name}
        any_name = any(own.kind is Parameter.VAR_KEYWORD for own in self._signature.parameters.values())
        self._target_name = next((name for name in TARGETS if name in self._defaults), "labels" if any_name else "")
        if loss is None and not self._target_name:
            what = f"{type(module).__name__}.forward{self._signature} takes none of {', '.join(TARGETS)}"
            raise ConfigError(f"{what}, to return a loss; add labels=None, or name a loss function")

    def _place_modules(self) -> None:
        """Place the modules, and the loss if it is a module; scripting replaces a module by another."""
        super()._place_modules()
        if isinstance(self.loss, nn.Module):
            self.loss.to(self.device)
        self.module = self.modules["model"]

    def _fast_computation(self) -> Callable[[Any], tuple[Any, Any]] | None:
        """Return the way that splits the batch only once."""
        return self._predict_and_judge if type(self) is ModuleBrain and self.loss is not None else None

    def _predict_and_judge(self, batch: Any) -> tuple[Any, Any]:
        """Do what ``compute_forward`` and ``compute_objectives`` do, with fewer calls."""
        inputs, target = split(batch)
        if type(inputs) is not Tensor or self.loss is None:
            predictions = self.compute_forward(batch, TRAIN)
            return predictions, self.compute_objectives(predictions, batch, TRAIN)
        try:
            predictions = self.module(inputs)
        except TypeError as error:
            self._explain(error, inputs)
            raise
        try:
            return predictions, self.loss(predictions, target)
        except Exception:
            # For the report about the batch.
            self._trainable.record.note_outputs(predictions)
            raise

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The module's output for the batch's inputs."""
        inputs, target = (batch, None) if stage is not TRAIN and is_unlabelled(batch) else split(batch)
        labels = {self._target_name: target} if self.loss is None and target is not None else {}
        try:
            if type(inputs) is not Tensor and isinstance(inputs, list | tuple):
                return self.module(*inputs, **labels)
            # The names of slots are most often numbers.
            if type(inputs) is not Tensor and isinstance(inputs, Mapping) and type(inputs) is not SlotBatch:
                return self.module(**{**self.arguments_by_name(inputs, batch), **labels})
            return self.module(inputs, **labels)
        except TypeError as error:
            self._explain(error, inputs)
            raise

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        """The loss of the predictions, or the one among them."""
        if self.loss is not None:
            return self.loss(predictions, split(batch)[1])
        if (loss := _part(predictions, "loss")) is None:
            what = f"{type(self.module).__name__}.forward returned {shape_of(predictions, 1)} without a loss"
            raise DataError(f"{self._where}{what}; return it as `loss`, or name a loss function")
        return cast("Tensor", loss)

    def _loss_source(self) -> str:
        """The loss of the config, or the ``forward`` of a module that returns its loss."""
        if self.loss is None:
            return f"{self._where}{type(self.module).__name__}.forward"
        return f"{self._where}{getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def _named_modules(self) -> dict[str, nn.Module]:
        """The modules as ``freeze`` names them, the whole by the name of its class."""
        return {name or type(part).__name__: part for name, part in self.module.named_modules()}

    def readable(self, predictions: Any, batch: Any) -> Any:
        """Where the module returns its loss, its logits; else, or without any, the predictions themselves."""
        logits = _part(predictions, "logits") if self.loss is None else None
        return predictions if logits is None else logits

    def arguments_by_name(self, inputs: Mapping[str, Any], batch: Any) -> Mapping[str, Any]:
        """Return the items of a mapping that ``forward`` takes; the inputs of a pair are passed as they are.

        Args:
            inputs: what ``forward`` gets.
            batch: the batch that they are from.

        Raises:
            DataError: the batch lacks an argument that has no default.
        """
        if not isinstance(batch, Mapping):
            return inputs
        if missing := [name for name, has_default in self._defaults.items() if not has_default and name not in batch]:
            what = f"a batch with the keys {', '.join(map(str, batch))} has no '{missing[0]}'"
            forward = f"{type(self.module).__name__}.forward{self._signature}"
            raise DataError(f"{self._where}{what}, which {forward} takes; name one so, or write a Brain")
        return {name: batch[name] for name in self._defaults if name in batch} or inputs

    def _explain(self, error: TypeError, inputs: Any) -> None:
        """Raise a clearer error than ``error`` if the batch does not fit the signature of ``forward``."""
        keywords = inputs if isinstance(inputs, Mapping) else {}
        positional = inputs if isinstance(inputs, list | tuple) else () if keywords else (inputs,)
        try:
            self._signature.bind(*positional, **keywords)
        except TypeError as mismatch:
            names = listed(f"{name}: {shape_of(value)}" for name, value in keywords.items())
            shapes = names or listed(map(shape_of, positional))
            what = f"the inputs of a batch are ({shapes}), and {type(self.module).__name__}.forward takes"
            remedy = "return them so from the dataset, or write a Brain"
            raise DataError(f"{self._where}{what} {self._signature}: {mismatch}; {remedy}") from error


class OwnLossBrain(ModuleBrain):
    """Makes a Brain of a module that computes its loss itself, of the whole batch, for a phase with an updater."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, cast("Any", own_losses))

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The losses."""
        return own_losses(self.module, batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any:
        """The same."""
        return predictions

    def _loss_source(self) -> str:
        return f"{self._where}{type(self.module).__name__}.forward"


def _part(output: Any, name: str) -> Any:
    """What a module has returned under a name, as a key or an attribute; None: nothing."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
