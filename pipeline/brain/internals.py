"""What the framework needs of a Brain in addition to SpeechBrain's names."""

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

from pipeline.brain.broadcasts import LossWatch
from pipeline.brain.checkpointer import Checkpointer
from pipeline.brain.compilation import compile_modules
from pipeline.brain.fit import NAME
from pipeline.brain.option_values import NOT_TAKEN
from pipeline.brain.run_options import RunOptions
from pipeline.data.batch import count_samples, target_in
from pipeline.distributed.world import current_world
from pipeline.engine.trainable import Stage, Trainable
from pipeline.errors import ConfigError
from pipeline.optim.losses import Losses
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.precision import autocast, make_scaler
from pipeline.optim.schedules import Constant
from pipeline.user_code.uncalled import BRAIN_REMEDIES

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
    """Move the modules of a Brain to their device, and compile or script them if the options say so; only once."""
    brain._place_modules()


def make_optimizers(brain: BrainInternals, **arguments: Any) -> dict[str, OptimScheduler]:
    """Call ``init_optimizers`` of a Brain, and give each optimizer a constant rate.

    Args:
        brain: the Brain.
        arguments: further arguments of the OptimSchedulers.
    """
    return brain._make_optimizers(**arguments)


def wrappable(brain: BrainInternals) -> nn.Module:
    """Return what plugins may wrap: the module of a ModuleBrain, and all modules of another Brain."""
    return brain._wrappable_model()


def wrap(brain: BrainInternals, wrapped: Any) -> None:
    """Replace what is ``wrappable`` by what a plugin has wrapped around it."""
    brain._wrap_model(wrapped)


def overridden(instance: object, base: type, *methods: str) -> list[str]:
    """Those of a base's methods that the class of an instance has overridden."""
    return [name for name in methods if getattr(type(instance), name) is not getattr(base, name)]


class ConstructorError(ConfigError, AttributeError):
    """A Brain lacks an attribute, since its constructor was not called; ``hasattr`` still says no."""


class BrainInternals:
    """The framework's side of a Brain: its run options, the place of its modules, its optimizers and its checkpoints.

    The names are private, so that a subclass is free in its names.
    """

    modules: nn.ModuleDict
    hparams: SimpleNamespace
    checkpointer: Checkpointer | None
    scaler: GradScaler
    optimizer: Optimizer
    # None until there are some; a type that says so would have each subclass ask.
    optimizers_dict: dict[str, Optimizer] = cast("Any", None)
    train_sampler: Any = None
    _trainable: Trainable
    _run_options: RunOptions
    _loss_watch: LossWatch
    # Ours, as long as no other is set.
    _scaler: GradScaler | None = None
    # Has the checkpoints of the debug fit that was the last; None where the last was none.
    _debug_folder: TemporaryDirectory[str] | None = None
    # Whether one of its methods computes, in which its modules are called compiled.
    _computes = False
    # Counts the samples of a batch if neither a subclass nor the config does.
    _count: Callable[[Any], int] = staticmethod(count_samples)

    # The methods of ``Brain`` that are called here.

    def init_optimizers(self) -> None:
        """Make the optimizers."""
        raise NotImplementedError

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses | None:
        """Return the loss."""
        raise NotImplementedError

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

    def _fast_computation(self) -> Callable[[Any], tuple[Any, Any]] | None:
        """Return what computes predictions and losses with fewer calls than the two methods, if there is such a way."""
        return None

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

    def _hold(self, optim_schedulers: Mapping[str, OptimScheduler]) -> None:
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
        names = ["compute_forward", "compute_objectives"]
        if self._trainable.overrides("fit_batch"):
            names.append("fit_batch")
        if not self._trainable.gives_predictions:
            names.append("evaluate_batch")
        for name in names if self._run_options.compile else ():
            vars(self)[name] = self._compiled(getattr(type(self), name).__get__(self))

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function in which calls of the modules are compiled, if the options say so; elsewhere they are not."""
        return partial(_compute, self, function) if self._run_options.compile else function

    def _wrappable_model(self) -> nn.Module:
        """Return what plugins may wrap."""
        return self.modules

    def _wrap_model(self, wrapped: Any) -> None:
        """Take what a plugin has wrapped around ``_wrappable_model``."""
        if wrapped is not self.modules:
            self.modules = wrapped

    def _named_modules(self) -> dict[str, nn.Module]:
        """The modules as ``freeze`` names them."""
        return {name: part for name, part in self.modules.named_modules() if name}

    @property
    def _where(self) -> str:
        return self._trainable.where

    def _loss_source(self) -> str:
        """What has returned a loss, for messages."""
        return f"{self._where}compute_objectives"

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


def _compute(brain: BrainInternals, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before, brain._computes = brain._computes, True
    try:
        return function(*args, **kwargs)
    finally:
        brain._computes = before
