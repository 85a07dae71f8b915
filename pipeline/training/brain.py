"""Brain: what is computed for a batch, and how that trains a model; ModuleBrain around a plain module. Names are SpeechBrain's."""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum, auto
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

from pipeline.checkpoint.checkpointer import Checkpoint, Checkpointer
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.checkpoint.weights import abbreviate
from pipeline.config.schema import TARGETS
from pipeline.context import Context
from pipeline.data.batch import (
    SlotBatch,
    count_samples,
    count_targets,
    differing_lengths,
    is_countable,
    is_unlabelled,
    listed,
    raise_no_samples,
    shape_of,
    split,
    target_in,
)
from pipeline.data.generators import own_generators
from pipeline.data.loader import LimitedLoader, end_workers, make_loader, refuse_unshared
from pipeline.distributed.strategy import Strategy
from pipeline.distributed.world import current_world, joined
from pipeline.errors import ConfigError, DataError, DivergedError, StageError
from pipeline.run.exclusive import exclusive
from pipeline.training.broadcasts import LossWatch, call_watched, has_several
from pipeline.training.meters import MOST, Meter, Meters, count_together
from pipeline.training.nonfinite import ADVICE, check_divergence
from pipeline.training.optim_scheduler import (
    Losses,
    OptimScheduler,
    autocast,
    autocast_enabled,
    backward_and_step,
    close_windows,
    losses_by_name,
    make_scaler,
    trainable_parameters,
    without_autocast,
    without_decay,
)
from pipeline.training.run_options import NOT_TAKEN, RunOptions, compile_modules
from pipeline.training.schedules import Constant
from pipeline.training.step_record import StepRecord
from pipeline.training.unregistered import require_registered
from pipeline.user_code import class_path
from pipeline.user_code.plugin_calls import hook_or_none
from pipeline.user_code.uncalled import BRAIN_REMEDIES, uncalled_faults_of_class


class Stage(Enum):
    """The pass in which a batch is computed."""

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


# Kept, since each look-up of an enum's member is a call.
TRAIN = Stage.TRAIN

# The phase under which a Brain that runs by itself saves and reports.
NAME = "brain"

# A dataset of SpeechBrain's, and what makes its batches.
DYNAMIC, PADDED = "speechbrain.dataio.dataset:DynamicItemDataset", "speechbrain.dataio.batch:PaddedBatch"

# What trains and tests a Brain by itself; that imports this file.
FIT, TEST = "pipeline.training.fit:Fit", "pipeline.training.fit:test"


# Attribute of SpeechBrain's Brain that is neither a method nor an option -> what to do instead.
ABSENT_ATTRIBUTES = {
    "profiler": "fit runs torch's profiler itself, for the first batches: set profile_training, and not start or step",
}

# Methods that ``fit_batch`` and a window's end call only where a subclass defines them.
STEPPING = ("optimizers_step", "freeze_optimizers", "check_loss_isfinite", "check_gradients")


def overridden(instance: object, base: type, *methods: str) -> list[str]:
    """Those of a base's methods that the class of an instance has overridden."""
    return [name for name in methods if getattr(type(instance), name) is not getattr(base, name)]


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
        _pass_loss: the training loss of the pass.
        _pass_numbers: what ``log`` was called with in this pass.
        _train_state: the counters; in a run, ``context["train_state"]``.
        _batches_taken: how many batches of the pass were taken, whatever a subclass does to ``step``.
        _fits: how often ``fit_batch`` was called.
        _record: what happens to the active batch.
        _strategy: how the ranks share the work on a batch; None: there is one process.

    Names that are not SpeechBrain's begin with an underscore, so that a subclass is free in its own; except ``bind``,
    ``log``, ``count_samples``, ``target`` and ``readable``, which may be overridden.
    """

    optimizer: Optimizer
    # None until there are some; a type that says so would have each subclass ask.
    optimizers_dict: dict[str, Optimizer] = cast("Any", None)
    train_sampler: Any = None
    # Set by a subclass; or what its update_average has returned.
    _average: float | None = None
    _own_nonfinite = 0
    # The windows that ``optimizers_step`` closes; None: a fit_batch of its own calls it, which goes backward by itself.
    _due: list[OptimScheduler] | None = None
    # Whether a subclass steps by itself in the ``optimizers_step`` that is running.
    _own_step = False
    # Ours, as long as no other is set.
    _scaler: GradScaler | None = None
    # Has the checkpoints of the debug fit that was the last; None where the last was none.
    _debug_folder: TemporaryDirectory[str] | None = None
    # Whether one of its methods computes, in which its modules are called compiled.
    _computes = False
    _strategy: Strategy | None = None
    # How many samples a batch has if neither a subclass nor the config says it.
    _count: Callable[[Any], int] = staticmethod(count_samples)
    # The function of the config, or the subclass's method, with its name for messages.
    _user_counter: tuple[Callable[[Any], Any], str] | None = None
    # The layers whose statistics ``freeze`` keeps, by name.
    _frozen_statistics: Sequence[str] = ()
    # Whether a training batch is computed by `_predict_and_judge`. That needs fewer calls, but does not call
    # compute_forward and compute_objectives, which an instance may have replaced.
    _splits_once = False
    # What is logged once.
    _left_in_evaluation = _modes_logged = False

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
        self.step = self._batches_taken = self._fits = 0
        self._pass_loss = Meter()
        self._record = StepRecord(self._samples_of_batch)
        self._pass_numbers = Meters(self._record)
        self._train_state: dict[str, int] = {"iteration": 0, "update": 0, "epoch": 0, "samples": 0}
        self._phase_name = ""
        self._pass_began = self._pass_batches = 0
        self._in_run = self._keeps_outputs = False
        self._optim_schedulers: list[OptimScheduler] = []
        self._sample_counter: Callable[[Any], int] = self._count_first_batch
        if overridden(self, Brain, "count_samples"):
            # Looked up on the class, so that an attribute of this name may be a subclass's own.
            method = type(self).count_samples.__get__(self)
            self._user_counter = method, f"{type(self).__name__}.count_samples"
            self._sample_counter = self._checked_samples
        self._overrides_batch_hooks = bool(overridden(self, Brain, "on_fit_batch_start", "on_fit_batch_end"))
        self._overrides_step = bool(overridden(self, Brain, *STEPPING))
        self._averages = bool(overridden(self, Brain, "update_average"))
        # Whether gradients may be left at the end of a pass that no window has.
        self._forgets = bool(overridden(self, Brain, "fit_batch", "zero_grad"))
        # Whether an evaluated batch has predictions.
        self._gives_predictions = not overridden(self, Brain, "evaluate_batch")
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
            self._strategy = None
            self.on_fit_start()
            class_path.load(class_path.parse(FIT))(self, train, valid, progressbar).run(epoch_counter)

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
            own = own_generators({"": self}, {"test": loader}) if self._in_run else {}
            random = random_state(own) if self._in_run else None
            with self._checkpoints_in(self._debug_folder):
                self.on_evaluate_start(max_key, min_key)
            loss: float = class_path.load(class_path.parse(TEST))(self, loader, progressbar)
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
        if self._in_run:
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
            schedulers[name].check_gradients = options.skip_nonfinite_grads
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
        if not self._optim_schedulers:
            remedy = "give it opt_class and call fit, or call bind(phase, optim_schedulers, context) first"
            raise StageError(f"{type(self).__name__}.fit_batch: no OptimScheduler trains it; {remedy}")
        if self._train_autocast and autocast_enabled(self.device):
            with without_autocast(self.device):
                return Brain.fit_batch(self, batch)
        strategy = self._strategy
        stand_in = strategy is not None and strategy.stand_in
        hooked = self._overrides_batch_hooks
        samples = 0 if stand_in else self._sample_counter(batch) or self._no_samples(batch)
        record = self._record
        record.samples = samples
        last = 0 < self._pass_batches == self._batches_taken
        if not samples:
            return self._fit_without_samples(last=last)
        if hooked:
            filled = [scheduler.batches + 1 >= scheduler.accum_grad for scheduler in self._optim_schedulers]
            should_step = last or any(filled)
            self.on_fit_batch_start(batch, should_step)
        if strategy is not None:
            predictions, returned = strategy.outputs(batch, self._optim_schedulers[0], samples, last=last)
        elif self._train_autocast is not None:
            with self._train_autocast:
                predictions = self.compute_forward(batch, TRAIN)
                returned = self.compute_objectives(predictions, batch, TRAIN)
        elif self._splits_once and "compute_objectives" not in self.__dict__ and "compute_forward" not in self.__dict__:
            predictions, returned = self._predict_and_judge(batch)
        else:
            predictions = self.compute_forward(batch, TRAIN)
            returned = self.compute_objectives(predictions, batch, TRAIN)
        # A scalar tensor is the usual case, checked without a call.
        plain = returned if type(returned) is Tensor and not returned.ndim else None
        losses = losses_by_name(returned, self._loss_source) if plain is None else {"loss": plain}
        step = self._step_as_overridden if self._overrides_step else backward_and_step
        finite, updated = step(losses, self._optim_schedulers, self._train_state["epoch"], samples, last=last)
        self._train_state["samples"] += samples
        self._train_state["update"] += updated
        loss = self._reported_loss(losses) if plain is None else losses["loss"].detach()
        waiting = self._pass_loss.waiting
        # Without `append`, which would be one more call in each step.
        waiting += [(loss, samples)]
        record.trained = True
        self._fits += 1
        if not finite or self._fits % MOST == 0:
            self._check_divergence()
        if hooked:
            self.on_fit_batch_end(batch, predictions, loss, should_step)
        record.predictions = None
        if self._keeps_outputs:
            record.predictions, record.losses = predictions, losses
        return loss

    def _fit_without_samples(self, *, last: bool) -> Tensor:
        """Take a batch that has no samples into the open windows. Nothing is computed for it.

        Other ranks may have samples of the same batch, so this makes the same collective calls as
        ``fit_batch``.
        """
        losses: Losses = {}
        if self._strategy is not None:
            _, losses = self._strategy.outputs(None, self._optim_schedulers[0], 0, last=last)
        step = self._step_as_overridden if self._overrides_step else backward_and_step
        epoch = self._train_state["epoch"]
        finite, updated = step(losses, self._optim_schedulers, epoch, 0, last=last)
        self._train_state["update"] += updated
        loss = torch.zeros((), device=self.device)
        self._pass_loss.waiting.append((loss, 0))
        self._record.predictions, self._record.losses, self._record.trained = None, {}, True
        self._fits += 1
        if not finite or self._fits % MOST == 0:
            self._check_divergence()
        return loss

    def _predict_and_judge(self, batch: Any) -> tuple[Any, Any]:
        """Return the predictions for a training batch and their loss. Only called if ``_splits_once`` is set."""
        raise NotImplementedError

    def _compute(self, batch: Any) -> tuple[Any, Any]:
        """What a rank of several computes of a batch: predictions, and what ``compute_objectives`` returns."""
        if self._train_autocast and not autocast_enabled(self.device):
            with self._train_autocast:
                return self._compute(batch)
        predictions = self.compute_forward(batch, TRAIN)
        return predictions, self.compute_objectives(predictions, batch, TRAIN)

    # What SpeechBrain's fit_batch calls, for one of the user's own; of the default, where they are overridden.

    def optimizers_step(self) -> None:
        """End a window: the optimizers that ``freeze_optimizers`` returns step, and their gradients are cleared.

        Call it in a ``fit_batch`` of one's own, after the backward of the mean loss, scaled by ``scaler``; over several
        batches, after that of the last. Rate, clipping, checks and hooks are as in the default ``fit_batch``. Processes have
        averaged their gradients after each backward. It counts as one update.
        """
        if not self.optimizers_dict:
            return
        self._own_step, due = False, self._due
        valid = {id(own) for own in self.freeze_optimizers(self.optimizers_dict).values()}
        schedulers = self._optim_schedulers if due is None else due
        active = [own for own in schedulers if id(own.optimizer) in valid]
        skips = self._run_options.skip_nonfinite_grads and not self.scaler.is_enabled()
        if skips and overridden(self, Brain, "check_gradients"):
            self.check_gradients()
        for scheduler in active if due is None else ():
            scheduler.batches = scheduler.samples = 1
            # The loss may be counted as well, by whoever has computed it.
            scheduler.guard.sees_losses = False
            scheduler.averaged = self._strategy is not None and self._strategy.average is not None
        with without_autocast(self.device) if autocast_enabled(self.device) else nullcontext():
            self.optimizer_step += close_windows(active, self._train_state["epoch"])

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
        if self._record.samples != 0 and not torch.isfinite(loss).all():
            # Not nonfinite_count: where super().fit_batch has counted this loss, it would count twice.
            self._own_nonfinite += 1
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
    def optimizer_step(self) -> int:
        """How many updates there were, discarded windows included; what a subclass sets goes on from there."""
        return self._train_state["update"]

    @optimizer_step.setter
    def optimizer_step(self, value: int) -> None:
        self._train_state["update"] = value

    @property
    def avg_train_loss(self) -> float:
        """The mean loss of the training pass so far; on a GPU this waits."""
        mean = self._pass_loss.mean() if self._average is None else self._average
        return 0.0 if math.isnan(mean) else mean

    @avg_train_loss.setter
    def avg_train_loss(self, value: float) -> None:
        self._average = value

    @property
    def nonfinite_count(self) -> int:
        """How many losses of the training pass were not finite so far, as a subclass counts them or we; on a GPU this waits."""
        self._pass_loss.read()
        return max(self._pass_loss.nonfinite, self._own_nonfinite)

    @nonfinite_count.setter
    def nonfinite_count(self, value: int) -> None:
        self._own_nonfinite = value

    @property
    def raw_modules(self) -> nn.ModuleDict:
        """``modules``: nothing is wrapped around them."""
        return self.modules

    def print_trainable_parameters(self) -> None:
        """Log how many parameters there are, and how many are trained; one of a subclass is called by the constructor."""
        total = sum(parameter.numel() for parameter in self.modules.parameters())
        trained = sum(parameter.numel() for parameter in self.modules.parameters() if parameter.requires_grad)
        logger.info(f"{type(self).__name__} trains {trained} of {total} parameters ({trained / (total or 1):.2%})")

    def _step_as_overridden(
        self, losses: Losses, schedulers: Sequence[OptimScheduler], epoch: int, samples: int, *, last: bool = False
    ) -> tuple[bool, bool]:
        """What ``backward_and_step`` does, through the methods that a subclass has overridden."""
        for loss in losses.values() if overridden(self, Brain, "check_loss_isfinite") else ():
            self.check_loss_isfinite(loss)
        finite, _ = backward_and_step(losses, schedulers, epoch, samples, steps=False)
        return finite, self._end_windows([own for own in schedulers if last or own.batches >= own.accum_grad])

    def _end_windows(self, due: list[OptimScheduler]) -> bool:
        """Have ``optimizers_step`` close some windows; whether there was an update that it has not counted."""
        self._due, self._own_step = due, bool(due and overridden(self, Brain, "optimizers_step"))
        for scheduler in due if self._own_step else ():
            scheduler.average()
        if due:
            self.optimizers_step()
        self._due = None
        for scheduler in due:
            scheduler.leave_window(stepped=self._own_step)
        return self._own_step

    def _close_windows(self) -> bool:
        """Close the windows that are open at the end of a pass; whether there was an update that nobody has counted."""
        if self._overrides_step:
            return self._end_windows([own for own in self._optim_schedulers if own.batches])
        return close_windows(self._optim_schedulers, self._train_state["epoch"])

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """The loss of one batch, without training."""
        losses = self._losses(self._predictions(batch, stage), batch, stage)
        return self._reported_loss(losses_by_name(losses, self._loss_source))

    def count_samples(self, batch: Any) -> int:
        """Return how many samples a batch holds, by which its loss counts in each mean.

        It is what ``count_samples`` of the phase returns. Without that it is the length of the
        first tensor in the batch, or of an object with ``to``; for a plain module, that of the
        target. A subclass may return whatever its loss is a mean over, such as tokens. A batch of 0
        contributes nothing: its loss is not used.
        """
        return self._count(batch)

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
        self._pass_numbers.log(name, value, batch_size)

    def bind(
        self,
        phase: str,
        optim_schedulers: Mapping[str, OptimScheduler],
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
        self._phase_name, self._loss_patience, self._in_run = phase, patience, context is not None
        self._optim_schedulers = list(optim_schedulers.values())
        parameters = {parameter for parameter in self.modules.parameters() if parameter.requires_grad}
        # A scaler is shared by windows that close together, since its scale may change only between two windows.
        scalers: dict[tuple[str, int], GradScaler | None] = {}
        for scheduler in self._optim_schedulers:
            scheduler.record = self._record
            scheduler.guarded = patience is not None
            scheduler.under_autocast = False
            scheduler.owns_all = parameters <= set(scheduler.parameters)
            if scheduler.use_amp and not scheduler.scaler and self.scaler.is_enabled():
                window = scheduler.loss_name, scheduler.accum_grad
                made = make_scaler(self._run_options.precision, self.device) if scalers else None
                scheduler.scaler = scalers.setdefault(window, made or self.scaler)
        if current_world().size > 1:
            self._share_work()
        self._watch_first_loss()
        if context is not None:
            self._train_state = context["train_state"]
            self._hold(optim_schedulers)
            self._keeps_outputs = hook_or_none(context["hooks"], "after_batch") is not None

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
        self._loss_watch.is_done = has_several(predictions)
        returned, broadcast = call_watched(compute, predictions, target_in(batch))
        if broadcast and current_world().is_main:
            logger.warning(f"{self._where}{broadcast}")
        return returned

    def _hold(self, optim_schedulers: Mapping[str, OptimScheduler]) -> None:
        """Name the optimizers of a run as those that a Brain makes by itself."""
        optimizers = {name: own.optimizer for name, own in optim_schedulers.items()}
        # One that a subclass keeps there for itself stays.
        if len(optimizers) == 1 and vars(self).get("optimizer") in (None, *(self.optimizers_dict or {}).values()):
            [self.optimizer] = optimizers.values()
        self.optimizers_dict = optimizers or self.optimizers_dict

    def _share_work(self) -> None:
        """Have the ranks share the work on a batch."""
        strategy = self._strategy = self._strategy or Strategy(current_world(), self)
        for scheduler in self._optim_schedulers:
            scheduler.strategy = strategy
        if [own.owns_all and own.step_per_update == 1 for own in self._optim_schedulers] != [True]:
            strategy.reason = f"{type(self).__name__} has not one optimizer that trains all of it at each step"
        elif any(getattr(module, "sparse", False) for module in self.modules.modules()):
            strategy.reason = "embeddings have sparse gradients"
        elif own := overridden(self, Brain, "fit_batch", *STEPPING):
            strategy.reason = f"{type(self).__name__} has its own {own[0]}"

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
        self._train_autocast = autocast(options.precision, self.device)
        self._eval_autocast = autocast(options.eval_precision, self.device)
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

    def _begin_pass(self, batches: int = 0) -> None:
        """Reset the modes and the numbers of the last pass; ``batches``: how many come, 0 if unknown."""
        self._begin_modes()
        self.step = self._batches_taken = 0
        self._pass_batches, self._pass_began = batches, self._train_state["iteration"]
        self._pass_loss.reset()
        self._average, self._own_nonfinite, self._due = None, 0, None
        self._pass_numbers = Meters(self._record)
        if self._strategy:
            self._strategy.begin_pass()
        for scheduler in self._optim_schedulers:
            scheduler.guard.reset()

    def _begin_modes(self) -> None:
        """Keep the modes that user code has set, unless it has left everything in evaluation mode.

        Outside of a run, a Brain is put into training mode, as SpeechBrain does at the start of each epoch.
        """
        parts = [part for module in self.modules.values() for part in module.modules()]
        is_left = self._in_run and parts and not any(part.training for part in parts)
        if is_left and not self._left_in_evaluation:
            self._left_in_evaluation = True
            what = f"{self._where}every module is in evaluation mode at the start of a training pass"
            remedy = "call train() where your code has called eval(), or use `freeze` with `statistics: true`"
            logger.warning(f"{what}, so train() is called; {remedy}")
        if is_left or not self._in_run:
            self.modules.train()
        for name in self._frozen_statistics:
            layer = self.modules.get_submodule(name)
            # A plugin that has its parameters trained again may have it count again too.
            if not any(own.requires_grad for own in layer.parameters(recurse=False)):
                layer.eval()

    def _freeze_statistics(self, layers: Collection[nn.Module]) -> None:
        """Put some layers into evaluation mode at the start of each pass, while they are not trained."""
        # By name, since others may take their places.
        self._frozen_statistics = [name for name, part in self.modules.named_modules() if part in layers]

    def _log_modes(self) -> None:
        """Log which modules are in evaluation mode while this Brain trains, once."""
        parts = self._named_modules()
        evaluating = [name for name, part in parts.items() if not part.training]
        if evaluating and not self._modes_logged:
            self._modes_logged = True
            count = f"{len(evaluating)} of {len(parts)} modules"
            logger.info(f"{self._where}training with {count} in evaluation mode: {abbreviate(evaluating)}")

    def _named_modules(self) -> dict[str, nn.Module]:
        """The modules as ``freeze`` names them."""
        return {name: part for name, part in self.modules.named_modules() if name}

    def _pass_state(self) -> dict[str, Any]:
        """The batches of the pass that are done, and its numbers so far; on a GPU this waits."""
        self._count_together()
        numbers = {"train_loss": self._pass_loss.state_dict(), "logged": self._pass_numbers.state_dict()}
        discarded = [(scheduler.guard.read(), scheduler.guard.parameter) for scheduler in self._optim_schedulers]
        counters = {"step": self.step, "taken": self._batches_taken, "began": self._pass_began}
        own = {"average": self._average, "nonfinite": self._own_nonfinite}
        return {**counters, **own, **numbers, "discarded": discarded}

    def _load_pass_state(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of a pass, after ``_begin_pass``."""
        self.step, self._batches_taken, self._pass_began = state["step"], state["taken"], state["began"]
        self._average, self._own_nonfinite = state["average"], state["nonfinite"]
        self._pass_loss.load_state_dict(state["train_loss"])
        self._pass_numbers.load_state_dict(state["logged"])
        for scheduler, (discarded, parameter) in zip(self._optim_schedulers, state["discarded"], strict=True):
            scheduler.guard.discarded, scheduler.guard.parameter = discarded, parameter

    def _predictions_and_losses(self, batch: Any, stage: Stage) -> tuple[Any, Losses]:
        """Predictions and losses of one batch; of a subclass with its own ``evaluate_batch``, the loss alone."""
        if not self._gives_predictions:
            # Not self._eval_autocast: evaluate_batch may call super(), which enters that one, and it cannot be entered twice.
            with autocast(self._run_options.eval_precision, self.device) or nullcontext():
                returned = self.evaluate_batch(batch, stage)
            return None, losses_by_name(returned, f"{self._where}evaluate_batch")
        predictions = self._predictions(batch, stage)
        return predictions, self._losses(predictions, batch, stage)

    def _losses(self, predictions: Any, batch: Any, stage: Stage) -> Losses:
        """The losses of predictions, in the precision of an evaluation."""
        with self._eval_autocast or nullcontext():
            returned = self.compute_objectives(predictions, batch, stage)
        if returned is None or (isinstance(returned, Mapping) and not returned):
            return {}
        return losses_by_name(returned, self._loss_source)

    def _predictions(self, batch: Any, stage: Stage) -> Any:
        """The predictions for a batch, in the precision of an evaluation."""
        with self._eval_autocast or nullcontext():
            return self.compute_forward(batch, stage)

    def _samples_of_batch(self, batch: Any) -> int:
        """Return how many samples a batch holds; 0 for one that stands in for an empty slice.

        Raises:
            DataError: nothing in it can be counted, or the user's function returned no count.
        """
        stands_in = self._strategy is not None and self._strategy.stand_in
        return 0 if stands_in else self._sample_counter(batch) or self._no_samples(batch)

    def _samples_if_countable(self, batch: Any) -> int | None:
        """Return what ``_samples_of_batch`` does; None for a batch in which nothing can be counted.

        An update of the user's own may make countable batches of it.
        """
        if self._strategy is not None and self._strategy.stand_in:
            return 0
        samples = self._sample_counter(batch)
        return samples if samples or self._user_counter or is_countable(batch) else None

    def _no_samples(self, batch: Any) -> int:
        """Return 0 for a batch that was counted as such.

        Raises:
            DataError: nothing in the batch can be counted.
        """
        if self._user_counter is None and not is_countable(batch):
            raise_no_samples(batch)
        return 0

    def _count_with(self, function: Callable[[Any], Any]) -> None:
        """Count the samples of each batch by the function that the config names."""
        self._user_counter = function, "count_samples"
        self._sample_counter = self._checked_samples
        self._count = self._checked_samples

    def _checked_samples(self, batch: Any) -> int:
        """Return what the user's function returns for a batch, as an int.

        Raises:
            DataError: it is no whole number of 0 or more.
        """
        function, name = cast("tuple[Callable[[Any], Any], str]", self._user_counter)
        returned = function(batch)
        # any() in place of sum() would count each batch as 1.
        is_bool = type(returned) is bool or getattr(returned, "dtype", None) is torch.bool
        try:
            # Takes numpy's numbers and tensors with one, too. A tensor on a GPU makes this wait.
            samples = operator.index(returned)
        except TypeError:
            samples = -1
        if is_bool or samples < 0:
            what = f"{self._where}{name} returned {returned!r}"
            raise DataError(f"{what}; return how many samples the batch has, an int of 0 or more")
        return samples

    def _count_first_batch(self, batch: Any) -> int:
        """Count a batch, and warn if its input and its target differ in their first dimension.

        It replaces itself by the function that only counts.
        """
        # The function itself costs one call less than a method.
        self._sample_counter = self._count
        samples = self._count(batch)
        differ = differing_lengths(batch) if current_world().is_main else ""
        if differ:
            by = "target" if self._count is count_targets else "first tensor"
            remedy = "define count_samples(batch) in the Brain"
            if self._phase_name:
                key = f"phase.{self._phase_name}.count_samples"
                remedy = f"name a function of the batch that counts them: {key}"
            counted = f"it counts as {samples} samples, by its {by}"
            logger.warning(f"{self._where}{differ}; {counted}; if that is wrong, {remedy}")
        return samples

    def _with_logged(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The numbers of a pass together with those that ``log`` has reported.

        Raises:
            ConfigError: one that was logged has the name of another.
        """
        logged = self._pass_numbers.means()
        # Of an updater that returns nothing there is no other loss than the one that it logs.
        for name in (name for name in logged if not math.isnan(numbers.get(name, math.nan))):
            replaced = f"{self._where}log('{name}', …) would replace the {'loss' if name == 'loss' else 'metric'}"
            raise ConfigError(f"{replaced} of the pass, which is reported by that name; give it another")
        return {**numbers, **logged}

    def _check_divergence(self) -> None:
        """Read the losses so far, and stop the training if too many were not finite.

        Raises:
            DivergedError: more than ``nonfinite_patience`` of this pass.
        """
        self._count_together()
        if self._loss_patience is not None:
            guards = [scheduler.guard for scheduler in self._optim_schedulers]
            check_divergence(self._pass_loss, guards, self._loss_patience, self._where, self._pass_began)

    def _count_together(self) -> None:
        """Make the numbers of the pass, as far as there are some, those of all ranks; all of them call it."""
        if self._strategy is not None:
            own, self._strategy.samples = self._strategy.samples, 0
            samples = count_together(self._pass_loss, self._pass_numbers, own, self._strategy.world)
            self._train_state["samples"] += samples - own

    @property
    def _where(self) -> str:
        return f"phase.{self._phase_name}: " if self._phase_name else ""

    @property
    def _loss_source(self) -> str:
        """What has returned a loss, for messages."""
        return f"{self._where}compute_objectives"

    def _reported_loss(self, losses: Losses) -> Tensor:
        """The loss that is reported: the one named ``loss``, else the sum; the others are logged by their names."""
        for name in losses:
            if name != "loss":
                self._pass_numbers.log(name, losses[name])
        if "loss" in losses:
            return losses["loss"].detach()
        return torch.stack([loss.detach() for loss in losses.values()]).sum()

    def _refuse_faults(self) -> None:
        """Raise for layers that nobody trains, and for methods that nobody calls; with a config, ``check`` reports them."""
        require_registered(self.modules.values(), owner=self)
        faults = [] if self._in_run else uncalled_faults_of_class(type(self), Brain, BRAIN_REMEDIES)
        if faults:
            raise ConfigError("\n".join(faults))

    def _ignored_arguments(self) -> list[str]:
        """Arguments of the constructor that a config would ignore: optimizer, checkpointer, options of the run."""
        # An init_optimizers of its own may use it.
        opt_class = () if overridden(self, Brain, "init_optimizers") else ("opt_class",)
        names = [name for name in (*opt_class, "checkpointer") if getattr(self, name) is not None]
        return names + sorted(self._run_options.model_fields_set - {"device"})

    def _unregistered_modules(self) -> list[str]:
        """Attributes with trainable parameters outside of ``modules``, which nothing trains or saves."""
        registered = set(self.modules.parameters())
        modules = {name: value for name, value in vars(self).items() if isinstance(value, nn.Module)}
        trained = {name: {own for own in module.parameters() if own.requires_grad} for name, module in modules.items()}
        return [name for name, parameters in trained.items() if parameters - registered]

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
        super().__init__({"model": module})
        self.module, self.loss = module, loss
        self._splits_once = type(self) is ModuleBrain and loss is not None
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
        # If the loss raises an error, the report about the batch shows the predictions.
        self._record.predictions = predictions
        return predictions, self.loss(predictions, target)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The module's output for the batch's inputs."""
        inputs, target = (batch, None) if stage is not TRAIN and is_unlabelled(batch) else split(batch)
        labels = {self._target_name: target} if self.loss is None and target is not None else {}
        try:
            if type(inputs) is not Tensor and isinstance(inputs, list | tuple):
                return self.module(*inputs, **labels)
            # The names of slots are most often numbers.
            if type(inputs) is not Tensor and isinstance(inputs, Mapping) and type(inputs) is not SlotBatch:
                return self.module(**{**self._by_name(inputs, batch), **labels})
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

    @property
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

    def _by_name(self, inputs: Mapping[str, Any], batch: Any) -> Mapping[str, Any]:
        """The items of a mapping that ``forward`` takes; the inputs of a pair are passed as they are."""
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


def _part(output: Any, name: str) -> Any:
    """What a module has returned under a name, as a key or an attribute; None: nothing."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
