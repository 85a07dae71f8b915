"""Trainable: what the loops train and evaluate. A Brain has one; what computes is the Brain, and what counts is here."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pipeline.context import TRAIN_STATE, Context
from pipeline.distributed.strategy import Strategy
from pipeline.distributed.world import current_world
from pipeline.engine.module_modes import ModuleModes
from pipeline.engine.pass_numbers import PassNumbers
from pipeline.engine.run_options import RunOptions
from pipeline.engine.sample_counter import SampleCounter
from pipeline.errors import StageError
from pipeline.metrics.meters import MOST
from pipeline.optim.optim_scheduler import (
    Losses,
    OptimScheduler,
    autocast,
    autocast_enabled,
    backward_and_step,
    close_windows,
    losses_by_name,
    make_scaler,
    without_autocast,
)


class Stage(Enum):
    """The pass in which a batch is computed."""

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


# Kept, since each look-up of an enum's member is a call.
TRAIN = Stage.TRAIN

# The methods that ``fit_batch`` and the end of a window call only if a subclass defines them.
STEPPING = ("optimizers_step", "freeze_optimizers", "check_loss_isfinite", "check_gradients")


class Computation(Protocol):
    """What computes predictions and losses: a Brain, of which loops and evaluation need no more than this."""

    modules: nn.ModuleDict
    device: torch.device
    scaler: GradScaler
    train_sampler: Any
    avg_train_loss: float
    _trainable: Trainable

    def bind(
        self,
        phase: str,
        optim_schedulers: Mapping[str, OptimScheduler],
        context: Context | None = None,
        patience: int | None = 3,
    ) -> None:
        """Prepare for a phase and its optimizers."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Return the predictions for a batch."""

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses | None:
        """Return the loss, or several by name."""

    def fit_batch(self, batch: Any) -> Tensor:
        """Train on a batch, and return the loss."""

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """Return the loss of a batch, without training."""

    def target(self, batch: Any) -> Any:
        """Return what metrics compare the predictions with."""

    def readable(self, predictions: Any, batch: Any) -> Any:
        """Return what metrics get of the predictions."""

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Do what a subclass does before a pass."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Do what a subclass does after a pass."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Do what a subclass does before a training batch."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        """Do what a subclass does after it."""

    def check_loss_isfinite(self, loss: Tensor) -> None:
        """Check a loss, in a subclass."""

    def optimizers_step(self) -> None:
        """Close the windows that ``Trainable.close_windows`` is about to close, in a subclass."""

    def update_average(self, loss: Tensor, avg_loss: float) -> float:
        """Return the mean loss with one loss more, in a subclass."""


class StepRecord:
    """What happens to the active batch. The loop begins it, and the code that trains fills it in.

    Args:
        count: returns how many samples a batch has.
        under_autocast: whether the code that trains may run under autocast.

    Attributes:
        step: the number of the batch in its pass, from 1.
        number: the number of the batch in all passes, from 1.
        is_open: whether a pass of training has started and not ended.
        batch: the batch until its samples are counted; then None, so that nothing here keeps it alive.
        samples: the number of samples in the batch; None until they are counted.
        losses: name -> loss that the batch was trained on; None if there is none yet.
        predictions: the predictions for the batch, if a plugin or a metric needs them.
        trained: whether ``Trainable.fit_batch`` has counted its loss, samples and update.
        updates_before: the number of updates before the batch.
        epoch: the current epoch, counted from 0.
        last: whether the batch is known to be the last of its pass, so that it closes every window.
        stand_in: whether the batch stands in for an empty slice of this rank.
        has_more: whether this rank has another batch after this one; None if all ranks have equally many.
        under_autocast: whether the code that trains on the batch runs under autocast.
    """

    __slots__ = (
        "_count",
        "batch",
        "epoch",
        "has_more",
        "is_open",
        "last",
        "losses",
        "number",
        "predictions",
        "samples",
        "stand_in",
        "step",
        "trained",
        "under_autocast",
        "updates_before",
    )

    def __init__(self, count: Callable[[Any], int], *, under_autocast: bool = False) -> None:
        self._count, self.under_autocast = count, under_autocast
        self.step = self.number = 0
        self.is_open = self.trained = self.last = self.stand_in = False
        self.batch: Any = None
        self.samples: int | None = 1
        self.losses: Losses | None = None
        self.predictions: Any = None
        self.updates_before = self.epoch = 0
        self.has_more: bool | None = None

    def open(self) -> None:
        """Begin a pass of training."""
        self.is_open, self.step, self.last, self.under_autocast = True, 0, False, False

    def begin(
        self,
        batch: Any,
        update: int = 0,
        epoch: int = 0,
        *,
        last: bool = False,
        stand_in: bool = False,
        has_more: bool | None = None,
    ) -> None:
        """Make a batch the active one; ``update`` counts those before it, the others are as the attributes."""
        self.batch, self.samples, self.losses, self.predictions = batch, None, None, None
        self.step += 1
        self.number += 1
        self.trained, self.last, self.stand_in, self.has_more = False, last, stand_in, has_more
        self.updates_before, self.epoch = update, epoch

    def count_samples(self) -> int:
        """Return the number of samples in the batch. They are counted once."""
        if self.samples is None:
            batch, self.batch = self.batch, None
            self.samples = self._count(batch)
        return self.samples

    def add_losses(self, losses: Losses) -> None:
        """Note losses that the batch was trained on. An earlier call for the same batch may have had others."""
        self.losses = {**(self.losses or {}), **losses}

    def renumber(self, step: int) -> None:
        """Count the batches of the pass on from another number."""
        self.step = operator.index(step)

    def note_outputs(self, predictions: Any, losses: Losses | None = None) -> None:
        """Note what was computed for the batch, as far as it was."""
        self.predictions, self.losses = predictions, losses

    def take_outputs(self) -> tuple[Any, Losses]:
        """Return the predictions and losses of the batch, and let go of them."""
        outputs = self.predictions, self.losses or {}
        self.predictions = self.losses = None
        return outputs

    def close(self) -> None:
        """End the pass. It has no active batch any more."""
        self.is_open, self.last, self.batch, self.samples = False, False, None, 1
        self.stand_in, self.has_more, self.under_autocast = False, None, False


def trainable_of(brain: Computation) -> Trainable:
    """Return what loops train and evaluate of a Brain."""
    return brain._trainable


def trainables(models: Any) -> Iterator[tuple[str, Trainable]]:
    """Phase and Trainable of each entry of ``context["model"]`` that has a Brain."""
    for phase, entry in models.items() if isinstance(models, Mapping) else ():
        brain = entry.get("brain") if isinstance(entry, Mapping) else None
        found = getattr(brain, "_trainable", None)
        if isinstance(found, Trainable):
            yield phase, found


class Trainable:
    """What trains on batches and evaluates them, with the methods of a Brain, and what is counted thereby.

    Args:
        brain: computes predictions and losses.
        overridden: the methods of Brain that its class overrides.
        count: counts the samples of a batch if neither a method nor the config does.
        counts_itself: the method ``count_samples`` of a subclass, with its name for messages; None: there is none.
        compute_at_once: returns the predictions and losses of a training batch with fewer calls than the two methods of
            the Brain need; None if there is no such way.
        loss_source: returns what gives the losses, for messages.
        compiled: makes a function in which calls of the modules are compiled, if the options say so.
        named_modules: returns the modules by the names that ``freeze`` has for them.

    Attributes:
        options: the run options.
        compiled: makes a function in which calls of the modules are compiled, if the options say so.
        counters: ``context["train_state"]`` in a run.
        schedulers: the OptimSchedulers that the losses drive.
        strategy: how the ranks share the work on a batch; None if there is one process.
        record: what happens to the active batch.
        numbers: the numbers of the pass.
        phase: the name of the phase, for messages.
        in_run: whether it is part of a run of a config.
        averages: whether the Brain averages the loss itself.
        forgets: whether gradients may be left at the end of a pass that belong to no window.
        gives_predictions: whether an evaluated batch has predictions.
        keeps_outputs: whether a plugin or a metric needs what a batch was trained with.
    """

    def __init__(
        self,
        brain: Computation,
        overridden: Collection[str],
        count: Callable[[Any], int],
        counts_itself: tuple[Callable[[Any], Any], str] | None,
        compute_at_once: Callable[[Any], tuple[Any, Any]] | None,
        loss_source: Callable[[], str],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        named_modules: Callable[[], dict[str, nn.Module]],
    ) -> None:
        self.brain = brain
        self.options: RunOptions
        self.counters: dict[str, int] = dict.fromkeys(TRAIN_STATE, 0)
        self.schedulers: list[OptimScheduler] = []
        self.strategy: Strategy | None = None
        self.phase = ""
        self._patience: int | None = None
        self.in_run = self.keeps_outputs = False
        self.averages = "update_average" in overridden
        self.forgets = not {"fit_batch", "zero_grad"}.isdisjoint(overridden)
        self.gives_predictions = "evaluate_batch" not in overridden
        self._own_methods = [name for name in ("fit_batch", *STEPPING) if name in overridden]
        self._calls_batch_hooks = not {"on_fit_batch_start", "on_fit_batch_end"}.isdisjoint(overridden)
        self._steps_as_overridden = not {*STEPPING}.isdisjoint(overridden)
        self._loss_source, self._named_modules, self.compiled = loss_source, named_modules, compiled
        self._compute_at_once = compute_at_once
        self._sample_counter = SampleCounter(count, counts_itself)
        self.record = StepRecord(self.samples_of)
        self.numbers = PassNumbers(self.record.count_samples)
        self._train_autocast: torch.autocast | None = None
        self._eval_autocast: torch.autocast | None = None
        self._fits = 0
        # The windows that ``optimizers_step`` closes; None: a fit_batch of the user's calls it, which goes backward itself.
        self._due: list[OptimScheduler] | None = None
        # Whether a subclass steps by itself in the ``optimizers_step`` that is running.
        self._own_step = False
        self._modes = ModuleModes()

    @property
    def modules(self) -> nn.ModuleDict:
        """The modules that are trained."""
        return self.brain.modules

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.brain.device

    @property
    def where(self) -> str:
        """What messages begin with: the phase, if there is one."""
        return f"phase.{self.phase}: " if self.phase else ""

    # Before the training.

    def take_options(self, options: RunOptions) -> None:
        """Compute as the options say.

        Raises:
            ConfigError: the device cannot compute in a precision.
        """
        self.options = options
        self._train_autocast = autocast(options.precision, self.device)
        self._eval_autocast = autocast(options.eval_precision, self.device)

    def count_with(self, function: Callable[[Any], Any]) -> None:
        """Count the samples of each batch by the function that the config names."""
        self._sample_counter.count_with(function)

    def bind(
        self,
        phase: str,
        optim_schedulers: Sequence[OptimScheduler],
        *,
        counters: dict[str, int] | None,
        patience: int | None,
        sync_batchnorm: bool,
        keeps_outputs: bool,
    ) -> None:
        """Prepare for a phase and its optimizers.

        Args:
            phase: its name, for messages.
            optim_schedulers: those that the losses drive.
            counters: ``context["train_state"]`` in a run; None elsewhere.
            patience: how many batches of a pass may be other than finite before the training ends; None does not check.
            sync_batchnorm: whether BatchNorm covers the slices of all ranks, on GPUs.
            keeps_outputs: whether a plugin needs what each batch was trained with.
        """
        self.phase, self._patience, self.in_run = phase, patience, counters is not None
        self.counters = self.counters if counters is None else counters
        self.keeps_outputs = keeps_outputs
        self._sample_counter.name_phase(phase)
        self.schedulers = list(optim_schedulers)
        parameters = {parameter for parameter in self.modules.parameters() if parameter.requires_grad}
        # A scaler is shared by windows that close together, since its scale may change only between two windows.
        scalers: dict[tuple[str, int], GradScaler] = {}
        for scheduler in self.schedulers:
            scaler = scheduler.scaler
            if scheduler.use_amp and not scaler and self.brain.scaler.is_enabled():
                window = scheduler.loss_name, scheduler.accum_grad
                made = make_scaler(self.options.precision, self.device) if scalers else None
                scaler = scalers.setdefault(window, made or self.brain.scaler)
            scheduler.bind(
                self.record,
                scaler=scaler,
                owns_all=parameters <= set(scheduler.parameters),
                guarded=patience is not None,
                check_gradients=self.options.skip_nonfinite_grads or None,
            )

        if current_world().size > 1:
            self.share_work(sync_batchnorm=sync_batchnorm)

    def share_work(self, *, sync_batchnorm: bool = False) -> None:
        """Have the ranks share the work on a batch.

        Args:
            sync_batchnorm: whether BatchNorm covers the slices of all ranks, on GPUs.
        """
        strategy = self.strategy = self.strategy or Strategy(current_world(), self, sync_batchnorm=sync_batchnorm)
        parameters = {parameter for parameter in self.modules.parameters() if parameter.requires_grad}
        whole = [parameters <= set(own.parameters) and own.step_per_update == 1 for own in self.schedulers]
        kind = type(self.brain).__name__
        if whole != [True]:
            strategy.forgo_ddp(f"{kind} has not one optimizer that trains all of it at each step")
        elif any(getattr(module, "sparse", False) for module in self.modules.modules()):
            strategy.forgo_ddp("embeddings have sparse gradients")
        elif self._own_methods:
            strategy.forgo_ddp(f"{kind} has its own {self._own_methods[0]}")
        for scheduler in self.schedulers:
            scheduler.bind(self.record, strategy=strategy)

    def work_alone(self) -> None:
        """Forget how the ranks shared the work of an earlier training."""
        self.strategy = None

    # A pass of training.

    def begin_pass(self, *, keeps_outputs: bool = False) -> None:
        """Reset the modes and the numbers of the last pass.

        Args:
            keeps_outputs: whether a plugin or a metric needs what each batch was trained with.
        """
        self._modes.start_pass(self.modules, in_run=self.in_run, where=self.where)
        self.keeps_outputs = self.keeps_outputs or keeps_outputs
        self.record.open()
        self.numbers = PassNumbers(self.record.count_samples, self.counters["iteration"])
        self._due = None
        if self.strategy:
            self.strategy.begin_pass()
        for scheduler in self.schedulers:
            scheduler.guard.reset()

    def weighs_batches(self) -> bool:
        """Return whether losses are weighted by the samples of their batch: in windows of several batches, or with multiple ranks."""
        is_averaged = self.strategy is not None and self.strategy.average is not None
        return is_averaged or any(own.accum_grad > 1 or own.strategy is not None for own in self.schedulers)

    def end_pass(self) -> None:
        """Close the windows that are open, and check the losses.

        Raises:
            DivergedError: too many were not finite.
        """
        # A method of a subclass may count updates, too, so the counter is read afterwards.
        updated = self._close_windows()
        self.counters["update"] += updated
        self.check_divergence()

    def gather(self) -> None:
        """Make the numbers of the pass, as far as there are some, those of all ranks; all of them call it."""
        if self.strategy is not None:
            own = self.strategy.take_samples()
            self.counters["samples"] += self.numbers.gather(own, self.strategy.world) - own

    def check_divergence(self) -> None:
        """Read the losses so far, and stop the training if too many were not finite.

        Raises:
            DivergedError: more than ``patience`` of this pass.
        """
        self.gather()
        if self._patience is not None:
            guards = [scheduler.guard for scheduler in self.schedulers]
            self.numbers.check_divergence(guards, self._patience, self.where)

    def state_dict(self) -> dict[str, Any]:
        """The numbers of the pass so far; on a GPU this waits."""
        self.gather()
        discarded = [(scheduler.guard.read(), scheduler.guard.parameter) for scheduler in self.schedulers]
        return {"step": self.record.step, **self.numbers.state_dict(), "discarded": discarded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a pass, after ``begin_pass``."""
        self.record.renumber(state["step"])
        self.numbers.load_state_dict(state)
        for scheduler, (discarded, parameter) in zip(self.schedulers, state["discarded"], strict=True):
            scheduler.guard.load(discarded, parameter)

    # A batch of training.

    def fit_batch(self, batch: Any) -> Tensor:
        """Train on one batch. It is what ``Brain.fit_batch`` does.

        Returns:
            The loss, detached, on its device; not finite where the step was discarded. For a batch
            without samples it is 0; nothing is computed then, and no hook of the Brain is called.
        """
        brain, record, schedulers, strategy = self.brain, self.record, self.schedulers, self.strategy
        if not schedulers:
            remedy = "give it opt_class and call fit, or call bind(phase, optim_schedulers, context) first"
            raise StageError(f"{type(brain).__name__}.fit_batch: no OptimScheduler trains it; {remedy}")
        if self._train_autocast and autocast_enabled(self.device):
            with without_autocast(self.device):
                return self.fit_batch(batch)
        counter = self._sample_counter
        # As `samples_of`, without the call.
        samples = 0 if record.stand_in else counter.count(batch) or counter.check_countable(batch)
        record.samples, record.batch, last = samples, None, record.last
        if not samples:
            return self._fit_without_samples(last=last)
        hooked = self._calls_batch_hooks
        if hooked:
            should_step = last or any(scheduler.is_about_to_close() for scheduler in schedulers)
            brain.on_fit_batch_start(batch, should_step)
        if strategy is not None:
            first = schedulers[0]
            closes = last or first.window.batches + 1 >= first.accum_grad
            predictions, returned = strategy.outputs(
                batch, first.loss_name, samples, closes=closes, has_more=record.has_more
            )
        elif self._train_autocast is not None:
            with self._train_autocast:
                predictions = brain.compute_forward(batch, TRAIN)
                returned = brain.compute_objectives(predictions, batch, TRAIN)
        elif (
            self._compute_at_once is not None
            and "compute_objectives" not in brain.__dict__
            and "compute_forward" not in brain.__dict__
        ):
            predictions, returned = self._compute_at_once(batch)
        else:
            predictions = brain.compute_forward(batch, TRAIN)
            returned = brain.compute_objectives(predictions, batch, TRAIN)
        # A scalar tensor is the usual case, checked without a call.
        plain = returned if type(returned) is Tensor and not returned.ndim else None
        losses = losses_by_name(returned, self._loss_source()) if plain is None else {"loss": plain}
        step = self._step_as_overridden if self._steps_as_overridden else backward_and_step
        finite, updated = step(losses, schedulers, self.counters["epoch"], samples, last=last)
        self.counters["samples"] += samples
        self.counters["update"] += updated
        loss = self.numbers.reported_loss(losses) if plain is None else losses["loss"].detach()
        waiting = self.numbers.loss.waiting
        # Without `append`, which would be one more call in each step.
        waiting += [(loss, samples)]
        record.trained = True
        self._fits += 1
        if not finite or self._fits % MOST == 0:
            self.check_divergence()
        if hooked:
            brain.on_fit_batch_end(batch, predictions, loss, should_step)
        record.predictions = None
        if self.keeps_outputs:
            record.predictions, record.losses = predictions, losses
        return loss

    def _fit_without_samples(self, *, last: bool) -> Tensor:
        """Take a batch that has no samples into the open windows. Nothing is computed for it.

        Other ranks may have samples of the same batch, so this makes the same collective calls as
        ``fit_batch``.
        """
        losses: Losses = {}
        if self.strategy is not None:
            name, closes = self.schedulers[0].loss_name, last or self.schedulers[0].is_about_to_close()
            _, losses = self.strategy.outputs(None, name, 0, closes=closes, has_more=self.record.has_more)
        step = self._step_as_overridden if self._steps_as_overridden else backward_and_step
        finite, updated = step(losses, self.schedulers, self.counters["epoch"], 0, last=last)
        self.counters["update"] += updated
        loss = torch.zeros((), device=self.device)
        self.numbers.loss.add(loss, 0)
        self.record.predictions, self.record.losses, self.record.trained = None, {}, True
        self._fits += 1
        if not finite or self._fits % MOST == 0:
            self.check_divergence()
        return loss

    def compute(self, batch: Any) -> tuple[Any, Any]:
        """Return the predictions for a batch and what ``compute_objectives`` returns, in the precision of the training."""
        if self._train_autocast and not autocast_enabled(self.device):
            with self._train_autocast:
                return self.compute(batch)
        predictions = self.brain.compute_forward(batch, TRAIN)
        return predictions, self.brain.compute_objectives(predictions, batch, TRAIN)

    def note_losses(self, losses: Losses) -> None:
        """Note the losses that an update of the user's own has returned for the active batch."""
        record = self.record
        record.losses = losses if record.samples or not record.trained else {}

    def begin_update(self, batch: Any, *, under_autocast: bool) -> bool:
        """Begin an update of the user's own, and return whether its batch is known to have no samples.

        Such an update may make countable batches of one that is not countable, so that one is counted later.

        Args:
            batch: the active batch.
            under_autocast: whether the update runs under autocast.
        """
        record = self.record
        record.under_autocast = under_autocast
        # Counted already if the losses of a window are weighted.
        if record.samples is None:
            counter = self._sample_counter
            if record.stand_in:
                record.samples = 0
            else:
                samples = counter.count(batch)
                record.samples = samples if samples or counter.is_countable(batch) else None
        return record.samples == 0

    def count_losses(self) -> None:
        """Count the loss and the samples of a batch that did not go through ``fit_batch``."""
        record = self.record
        samples, losses = record.count_samples(), record.losses
        if losses:
            reported = self.numbers.reported_loss(losses)
            # Ranks count their losses in step, so one without samples has its place. It may be nan.
            self.numbers.loss.add(reported if samples else torch.zeros_like(reported), samples)
        record.predictions, record.losses = None, losses if samples else {}
        self.counters["samples"] += samples
        if self.strategy is not None:
            self.strategy.add_samples(samples)

    def overrides(self, method: str) -> bool:
        """Whether the class of the Brain has its own ``fit_batch``, or another method with which it steps."""
        return method in self._own_methods

    def average(self, loss: Tensor) -> None:
        """Have the Brain average a loss, unless the batch has no samples."""
        if self.record.samples != 0:
            numbers = self.numbers
            numbers.replace(average=self.brain.update_average(loss, numbers.average or 0.0))

    # The end of a window, as SpeechBrain's methods see it.

    def _step_as_overridden(
        self, losses: Losses, schedulers: Sequence[OptimScheduler], epoch: int, samples: int, *, last: bool = False
    ) -> tuple[bool, bool]:
        """What ``backward_and_step`` does, through the methods that a subclass has overridden."""
        for loss in losses.values() if "check_loss_isfinite" in self._own_methods else ():
            self.brain.check_loss_isfinite(loss)
        finite, _ = backward_and_step(losses, schedulers, epoch, samples, steps=False)
        return finite, self._end_windows([own for own in schedulers if last or own.is_full()])

    def _end_windows(self, due: list[OptimScheduler]) -> bool:
        """Have ``optimizers_step`` close some windows; whether there was an update that it has not counted."""
        self._due, self._own_step = due, bool(due and "optimizers_step" in self._own_methods)
        for scheduler in due if self._own_step else ():
            scheduler.average()
        if due:
            self.brain.optimizers_step()
        self._due = None
        for scheduler in due:
            scheduler.leave_window(stepped=self._own_step)
        return self._own_step

    def _close_windows(self) -> bool:
        """Close the windows that are open at the end of a pass; whether there was an update that nobody has counted."""
        if self._steps_as_overridden:
            return self._end_windows([own for own in self.schedulers if own.window.batches])
        return close_windows(self.schedulers, self.counters["epoch"])

    def begin_step(self) -> list[OptimScheduler] | None:
        """Begin the Brain's own ``optimizers_step``.

        Returns:
            The schedulers whose windows it is to close; None if a ``fit_batch`` of the user's calls it.
        """
        self._own_step = False
        return self._due

    def step(self, schedulers: Sequence[OptimScheduler], *, by_hand: bool) -> bool:
        """Close windows; ``by_hand``: code of the user's has gone backward for them. Return whether one has acted."""
        for scheduler in schedulers if by_hand else ():
            scheduler.open_by_hand(averaged=self.strategy is not None and self.strategy.average is not None)
        with without_autocast(self.device) if autocast_enabled(self.device) else nullcontext():
            return close_windows(schedulers, self.counters["epoch"])

    # Samples.

    def samples_of(self, batch: Any) -> int:
        """Return how many samples a batch holds; 0 for one that stands in for an empty slice.

        Raises:
            DataError: nothing in it can be counted, or the user's function returned no count.
        """
        if self.record.stand_in:
            return 0
        counter = self._sample_counter
        return counter.count(batch) or counter.check_countable(batch)

    def default_count(self, batch: Any) -> int:
        """Return how many samples a batch has, without asking the ``count_samples`` of a subclass."""
        return self._sample_counter.default_count(batch)

    # Evaluation.

    @contextmanager
    def evaluating(self, step: int = 0) -> Iterator[StepRecord]:
        """Keep the numbers and the record of an evaluation apart from those of a pass around it, until the block ends.

        Args:
            step: how many batches were evaluated before.

        Yields:
            The record of the evaluation.
        """
        before = self.record, self.numbers
        record = self.record = StepRecord(self.samples_of)
        record.renumber(step)
        self.numbers = PassNumbers(record.count_samples)
        try:
            yield record
        finally:
            self.record, self.numbers = before

    def predictions_and_losses(self, batch: Any, stage: Stage) -> tuple[Any, Losses]:
        """Predictions and losses of one batch; of a subclass with its own ``evaluate_batch``, the loss alone."""
        if not self.gives_predictions:
            # Not self._eval_autocast: evaluate_batch may call super(), which enters that one, and it cannot be entered twice.
            with autocast(self.options.eval_precision, self.device) or nullcontext():
                returned = self.brain.evaluate_batch(batch, stage)
            return None, losses_by_name(returned, f"{self.where}evaluate_batch")
        predictions = self.predictions(batch, stage)
        return predictions, self.losses(predictions, batch, stage)

    def losses(self, predictions: Any, batch: Any, stage: Stage) -> Losses:
        """The losses of predictions, in the precision of an evaluation."""
        with self._eval_autocast or nullcontext():
            returned = self.brain.compute_objectives(predictions, batch, stage)
        if returned is None or (isinstance(returned, Mapping) and not returned):
            return {}
        return losses_by_name(returned, self._loss_source())

    def predictions(self, batch: Any, stage: Stage) -> Any:
        """The predictions for a batch, in the precision of an evaluation."""
        with self._eval_autocast or nullcontext():
            return self.brain.compute_forward(batch, stage)

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """The loss of one batch, without training. It is what ``Brain.evaluate_batch`` does.

        Raises:
            DataError: ``compute_objectives`` returned no loss.
        """
        losses = self.losses(self.predictions(batch, stage), batch, stage)
        return self.numbers.reported_loss(losses_by_name(losses, self._loss_source()))

    # Modes.

    def freeze_statistics(self, layers: Collection[nn.Module]) -> None:
        """Put layers into evaluation mode at the start of each pass, while they are not trained."""
        self._modes.freeze_statistics(self.modules, layers)

    def log_modes(self) -> None:
        """Log which modules are in evaluation mode while this trains, once."""
        self._modes.log(self._named_modules(), self.where)
