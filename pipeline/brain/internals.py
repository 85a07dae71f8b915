"""The base class of Brain that has what the framework calls, and functions that call it.

They are functions so that a subclass of Brain is free in the names of its methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
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

from pipeline.brain.brain_trainable import BrainTrainable, make_trainable
from pipeline.brain.broadcasts import LossWatch
from pipeline.brain.checkpointer import Checkpointer
from pipeline.brain.compilation import compile_modules
from pipeline.brain.fit import NAME
from pipeline.brain.option_values import NOT_TAKEN
from pipeline.brain.run_options import RunOptions
from pipeline.compute.stage import Stage
from pipeline.context import Context
from pipeline.data.batch import count_samples, target_in
from pipeline.distributed.world import current_world
from pipeline.errors import ConfigError
from pipeline.optim.losses import Losses
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.precision import autocast, make_scaler
from pipeline.optim.schedules import Constant
from pipeline.optim.windowed_optimizer import WindowedOptimizer
from pipeline.user_code.plugin_calls import hook_or_none
from pipeline.user_code.uncalled import BRAIN_REMEDIES

if TYPE_CHECKING:
    from pipeline.brain.brain import Brain

# Attribute of SpeechBrain's Brain that is neither a method nor an option -> what to do instead.
ABSENT_ATTRIBUTES = {
    "profiler": "fit runs torch's profiler itself, for the first batches: set profile_training, and not start or step",
}


def apply_options(brain: BrainInternals, options: RunOptions) -> None:
    """Set the run options of a Brain.

    Raises:
        ConfigError: the device cannot compute in a precision.
    """
    brain._apply_run_options(options)


def place_modules(brain: BrainInternals) -> None:
    """Move the modules of a Brain to their device. Compile or script them, once, if its options say so.

    Raises:
        ConfigError: a key of the options names no module.
    """
    brain._place_modules()


def make_optimizers(brain: BrainInternals, **arguments: Any) -> dict[str, OptimScheduler]:
    """Call ``init_optimizers`` of a Brain, and return a scheduler with a constant rate for each optimizer.

    Args:
        brain: the Brain.
        arguments: further arguments of the OptimSchedulers.
    """
    return brain._make_optimizers(**arguments)


def wrappable(brain: BrainInternals) -> nn.Module:
    """Return what plugins may wrap: the module of a ModuleBrain, or all modules of another Brain."""
    return brain._wrappable_model()


def wrap(brain: BrainInternals, wrapped: Any) -> None:
    """Replace what ``wrappable`` returned by what a plugin has wrapped around it."""
    brain._wrap_model(wrapped)


def overridden(instance: object, base: type, *methods: str) -> list[str]:
    """Return the methods of a base class that the class of an instance overrides.

    Args:
        instance: the object.
        base: a base class of its class.
        methods: names of methods of ``base``.
    """
    return [name for name in methods if getattr(type(instance), name) is not getattr(base, name)]


class ConstructorError(ConfigError, AttributeError):
    """A Brain lacks an attribute, because its constructor was not called. ``hasattr`` returns False."""


class BrainInternals:
    """The part of a Brain that the framework calls.

    It sets the run options, places and compiles the modules, makes the optimizers, and chooses the
    folder of checkpoints. Except ``bind``, its names are private.

    Attributes:
        modules: name -> module.
        hparams: the hyperparameters.
        checkpointer: where ``fit`` saves; None if there is none.
        device, device_type: where it computes.
        scaler: scales the loss in fp16; a disabled one in other precisions.
        training_ctx, evaluation_ctx: autocast in ``precision`` and ``eval_precision``.
        optimizer: the only optimizer, or the one that ``opt_class`` has made.
        optimizers_dict: the optimizers by name; None before there are any.
        train_sampler: its ``set_epoch`` is called when a training pass starts, unless it is None.
    """

    modules: nn.ModuleDict
    hparams: SimpleNamespace
    checkpointer: Checkpointer | None
    scaler: GradScaler
    optimizer: Optimizer
    # None at first. With a type that says so, each subclass would have to check it.
    optimizers_dict: dict[str, Optimizer] = cast("Any", None)
    train_sampler: Any = None
    _trainable: BrainTrainable
    _run_options: RunOptions
    _loss_watch: LossWatch
    # The scaler that the run options have made. `scaler` is another one if a subclass has set it.
    _scaler: GradScaler | None = None
    # Contains the checkpoints of the last fit, if that was a debug run.
    _debug_folder: TemporaryDirectory[str] | None = None
    # Whether a method of the Brain is computing. Its modules are called compiled only then.
    _computes = False
    # Counts the samples of a batch if neither a subclass nor the config does.
    _count: Callable[[Any], int] = staticmethod(count_samples)

    if not TYPE_CHECKING:  # it would accept any misspelt attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise for an attribute that does not exist. Most are missing if the constructor was not called."""
            kind = type(self).__name__
            if "_run_options" not in vars(self):
                remedy = "call it first, with the modules: super().__init__({'net': net})"
                raise ConstructorError(f"{kind}.__init__ has not called super().__init__(); {remedy}")
            remedies = {**NOT_TAKEN, **BRAIN_REMEDIES, **ABSENT_ATTRIBUTES}
            remedy = f"; {remedies[name]}" if name in remedies else ""
            raise AttributeError(f"'{kind}' object has no attribute '{name}'{remedy}", name=name, obj=self)

    # Defined in Brain, and called here.

    def init_optimizers(self) -> None:
        """Make the optimizers."""
        raise NotImplementedError

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses | None:
        """Return the loss of the predictions."""
        raise NotImplementedError

    def count_samples(self, batch: Any) -> int:
        """Return how many samples a batch holds."""
        raise NotImplementedError

    # Before the training.

    def _make_trainable(self, base: type[BrainInternals]) -> BrainTrainable:
        """Return what the engine trains.

        Args:
            base: the class ``Brain``. What a class below it defines is called where ``base`` would be.
        """
        counts_itself = None
        if overridden(self, base, "count_samples"):
            # Looked up on the class, so that a subclass may have an attribute of this name.
            method = type(self).count_samples.__get__(self)
            counts_itself = method, f"{type(self).__name__}.count_samples"
        names = [name for cls in base.__mro__ for name in vars(cls) if not name.startswith("_")]
        return make_trainable(
            cast("Brain", self),
            overridden(self, base, *names),
            count=self._count,
            counts_itself=counts_itself,
            compute_at_once=self._fast_computation(),
            loss_source=self._loss_source,
            compiled=self._compiled,
            named_modules=self._named_modules,
        )

    def _apply_run_options(self, options: RunOptions) -> None:
        """Set the options of a run. Each of them is also an attribute with its name.

        Raises:
            ConfigError: the device cannot compute in a precision.
        """
        self._run_options = options
        vars(self).update(options)
        self.device = torch.device(options.device or "cpu")
        self.device_type = self.device.type
        self.distributed_launch = {"RANK", "LOCAL_RANK"} <= os.environ.keys()
        self._trainable.take_options(options)
        # Not the autocasts of the Trainable: user code may enter these within those, and an autocast
        # cannot be entered twice.
        self.training_ctx = autocast(options.precision, self.device, steps=True) or nullcontext()
        self.evaluation_ctx = autocast(options.eval_precision, self.device) or nullcontext()
        scaler = make_scaler(options.precision, self.device) or GradScaler(self.device_type, enabled=False)
        # A scaler that a subclass has set is kept. So is an earlier one that does the same.
        is_replaceable = vars(self).get("scaler") is self._scaler
        if is_replaceable and (self._scaler is None or scaler.is_enabled() != self._scaler.is_enabled()):
            self._scaler = scaler
            self.scaler = scaler

    def _place_modules(self) -> None:
        """Move the modules to their device. Compile or script them, once, if the options say so."""
        self.modules.to(self.device)
        compile_modules(self.modules, self._run_options, lambda: self._computes)
        if not self._run_options.compile:
            return
        names = ["compute_forward", "compute_objectives"]
        if self._trainable.custom.trains:
            names.append("fit_batch")
        if self._trainable.custom.evaluates:
            names.append("evaluate_batch")
        for name in names:
            vars(self)[name] = self._compiled(getattr(type(self), name).__get__(self))

    def _make_optimizers(self, **arguments: Any) -> dict[str, OptimScheduler]:
        """Call ``init_optimizers``, and return a scheduler with a constant rate for each optimizer."""
        self.optimizers_dict = {}
        self.init_optimizers()
        only = vars(self).get("optimizer")
        if not self.optimizers_dict and isinstance(only, Optimizer):
            self.optimizers_dict = {"optimizer": only}
        arguments |= {
            "optim_conf": {},
            "model": self.modules,
            "accum_grad": self._run_options.grad_accumulation_factor,
            "grad_clip": self._run_options.max_grad_norm,
        }
        schedulers: dict[str, OptimScheduler] = {}
        for name, optimizer in self.optimizers_dict.items():
            schedulers[name] = Constant(lambda _, made=optimizer: made, **arguments)
        return schedulers

    def bind(
        self,
        phase: str,
        optim_schedulers: Mapping[str, WindowedOptimizer],
        context: Context | None = None,
        patience: int | None = 3,
    ) -> None:
        """Prepare this Brain for a phase and its optimizers.

        The default network and runner stages and ``fit`` call it. A subclass may override it.

        Args:
            phase: its name, for messages.
            optim_schedulers: name -> scheduler that one of its losses drives.
            context: the context of the run, for its hooks. None if there are no hooks.
            patience: how many non-finite batches a pass may have before training ends. None does not
                check.
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
            self._take_optimizers(optim_schedulers)

    def _take_optimizers(self, optim_schedulers: Mapping[str, WindowedOptimizer]) -> None:
        """Put the optimizers of a run into the attributes that ``init_optimizers`` sets in a script."""
        optimizers = {name: scheduler.optimizer for name, scheduler in optim_schedulers.items()}
        if len(optimizers) == 1:
            # An optimizer that a subclass keeps in this attribute for itself stays.
            replaceable = [None, *(self.optimizers_dict or {}).values()]
            if vars(self).get("optimizer") in replaceable:
                [self.optimizer] = optimizers.values()
        self.optimizers_dict = optimizers or self.optimizers_dict

    def _wrappable_model(self) -> nn.Module:
        """Return what plugins may wrap."""
        return self.modules

    def _wrap_model(self, wrapped: Any) -> None:
        """Replace what ``_wrappable_model`` returns."""
        if wrapped is not self.modules:
            self.modules = wrapped

    # During the training.

    def _fast_computation(self) -> Callable[[Any], tuple[Any, Any]] | None:
        """Return a function that computes predictions and losses of a training batch.

        It needs fewer calls than ``compute_forward`` and ``compute_objectives``. None if there is no such
        function.
        """
        return None

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in which calls of the modules are compiled, if the options say so.

        Outside of such functions, they are not.
        """
        return partial(_compute, self, function) if self._run_options.compile else function

    def _named_modules(self) -> dict[str, nn.Module]:
        """Return the modules by the names that ``freeze`` has for them."""
        return {name: part for name, part in self.modules.named_modules() if name}

    @property
    def _where(self) -> str:
        """What messages begin with."""
        return self._trainable.where

    def _loss_source(self) -> str:
        """Return the name of what has returned a loss, for messages."""
        return f"{self._where}compute_objectives"

    def _watch_first_loss(self) -> None:
        """Let the next call of ``compute_objectives`` warn if it broadcasts, once for this Brain.

        The wrapper removes itself, so later calls cost nothing.
        """
        is_replaced = "compute_objectives" in vars(self)
        if not (self._loss_watch.is_done or is_replaced or self._run_options.compile):
            vars(self)["compute_objectives"] = self._watched_objectives

    def _watched_objectives(self, *arguments: Any, **keywords: Any) -> Any:
        """Call ``compute_objectives``. A ``fit_batch`` of a subclass may pass further arguments."""
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

    # Checkpoints of ``fit`` and ``evaluate``.

    def _new_debug_folder(self) -> TemporaryDirectory[str] | None:
        """Return a temporary folder for the checkpoints of a debug run; None for any other run.

        It exists until the next ``fit``.
        """
        if self._debug_folder:
            self._debug_folder.cleanup()
        if not self.checkpointer or not self._run_options.debug or self._run_options.debug_persistently:
            return None
        folder = TemporaryDirectory(prefix="debug-")
        finalize(self, folder.cleanup)
        return folder

    @contextmanager
    def _checkpoints_in(self, folder: TemporaryDirectory[str] | None) -> Iterator[None]:
        """Use a folder for checkpoints until the block ends. None uses the folder of the checkpointer."""
        checkpointer = self.checkpointer
        if checkpointer is None:
            yield
            return
        with checkpointer.session.in_use(self._entry()):
            if folder:
                # All ranks use the folder of rank 0. Those of the other ranks stay empty.
                path = Path(current_world().broadcast(folder.name))
                self.checkpointer = checkpointer.session.in_folder(path)
            try:
                yield
            finally:
                self.checkpointer = checkpointer

    def _entry(self) -> dict[str, Any]:
        """Return this Brain in the form in which a run passes its models to a checkpointer."""
        return {NAME: {"model": self, "brain": self}}


def _compute(brain: BrainInternals, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in which the modules of a Brain are called compiled."""
    before = brain._computes
    brain._computes = True
    try:
        return function(*args, **kwargs)
    finally:
        brain._computes = before
