"""Trainable: how a Brain is trained and evaluated on one batch, and what is counted for it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pipeline.compute.custom_code import NO_CUSTOM_CODE, ComputeOptions, CustomCode, LossAverage
from pipeline.compute.module_modes import ModuleModes
from pipeline.compute.pass_numbers import PassNumbers
from pipeline.compute.sample_counter import SampleCounter
from pipeline.compute.stage import TRAIN, Stage
from pipeline.context import TRAIN_STATE, Context
from pipeline.distributed.strategy import Strategy
from pipeline.distributed.world import current_world
from pipeline.errors import StageError
from pipeline.metrics.meters import MOST
from pipeline.optim.losses import Losses, losses_by_name
from pipeline.optim.precision import autocast, autocast_enabled, make_scaler, without_autocast
from pipeline.optim.stepping import backward_and_step, close_windows
from pipeline.optim.windowed_optimizer import WindowedOptimizer


class Computation(Protocol):
    """The part of a Brain that training and evaluation use."""

    modules: nn.ModuleDict
    device: torch.device
    scaler: GradScaler
    train_sampler: Any

    @property
    def _trainable(self) -> Trainable:
        """How the engine trains and evaluates it."""

    def bind(
        self,
        phase: str,
        optim_schedulers: Mapping[str, WindowedOptimizer],
        context: Context | None = None,
        patience: int | None = 3,
    ) -> None:
        """Prepare for a phase and its optimizers."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Return the predictions for a batch."""

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses | None:
        """Return the loss, or multiple losses by name."""

    def fit_batch(self, batch: Any) -> Tensor:
        """Train on a batch, and return the loss."""

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """Return the loss of a batch, without training."""

    def target(self, batch: Any) -> Any:
        """Return what metrics compare the predictions with."""

    def readable(self, predictions: Any, batch: Any) -> Any:
        """Return the predictions in the form that metrics take."""

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Run the code of a subclass before a pass."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Run the code of a subclass after a pass."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Run the code of a subclass before a training batch."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        """Run the code of a subclass after a training batch."""


class StepRecord:
    """The facts about the active batch.

    The loop starts it for each batch, and the code that trains on the batch fills it in. The class
    is in this file because ``Trainable.fit_batch`` writes its attributes directly, which costs no
    calls.

    Args:
        count: returns how many samples a batch has.
        under_autocast: whether the code that trains may run under autocast.

    Attributes:
        step: the number of the batch in its pass, from 1.
        number: the number of the batch in all passes, from 1.
        is_open: whether a pass of training has started and not ended.
        batch: the batch until its samples are counted; then None, so that the record does not keep
            it alive.
        samples: the number of samples in the batch; None until they are counted.
        losses: name -> loss that the batch was trained on; None if there is none yet.
        predictions: the predictions for the batch, if a plugin or a metric needs them.
        trained: whether ``Trainable.fit_batch`` has counted its loss, samples and update.
        updates_before: the number of updates before the batch.
        epoch: the current epoch, counted from 0.
        last: whether the batch is known to be the last of its pass, so that it closes every window.
        stand_in: whether the batch stands in for an empty slice of this rank.
        has_more: whether this rank has another batch after this one; None if all ranks have equally
            many.
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
        self._count = count
        self.under_autocast = under_autocast
        self.step = 0
        self.number = 0
        self.is_open = False
        self.batch: Any = None
        self.samples: int | None = 1
        self.losses: Losses | None = None
        self.predictions: Any = None
        self.trained = False
        self.updates_before = 0
        self.epoch = 0
        self.last = False
        self.stand_in = False
        self.has_more: bool | None = None

    def open(self) -> None:
        """Start a pass of training."""
        self.is_open = True
        self.step = 0
        self.last = False
        self.under_autocast = False

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
        """Make a batch the active one.

        Args:
            batch: the batch.
            update: the number of updates before the batch.
            epoch: as the attribute.
            last: as the attribute.
            stand_in: as the attribute.
            has_more: as the attribute.
        """
        self.batch = batch
        self.samples = None
        self.losses = None
        self.predictions = None
        self.step += 1
        self.number += 1
        self.trained = False
        self.last = last
        self.stand_in = stand_in
        self.has_more = has_more
        self.updates_before = update
        self.epoch = epoch

    def count_samples(self) -> int:
        """Return the number of samples in the batch. They are counted once."""
        if self.samples is None:
            batch = self.batch
            self.batch = None
            self.samples = self._count(batch)
        return self.samples

    def add_losses(self, losses: Losses) -> None:
        """Add losses that the batch was trained on. Losses of earlier calls for the batch stay."""
        self.losses = {**(self.losses or {}), **losses}

    def renumber(self, step: int) -> None:
        """Continue the numbers of the batches in the pass from another number."""
        self.step = operator.index(step)

    def note_outputs(self, predictions: Any, losses: Losses | None = None) -> None:
        """Note what was computed for the batch. After a failure there may be no losses."""
        self.predictions = predictions
        self.losses = losses

    def take_outputs(self) -> tuple[Any, Losses]:
        """Return the predictions and losses of the batch, and remove them from the record."""
        outputs = self.predictions, self.losses or {}
        self.predictions = None
        self.losses = None
        return outputs

    def close(self) -> None:
        """End the pass. After that there is no active batch."""
        self.is_open = False
        self.last = False
        self.batch = None
        self.samples = 1
        self.stand_in = False
        self.has_more = None
        self.under_autocast = False


def trainable_of(brain: Computation) -> Trainable:
    """Return the Trainable of a Brain."""
    return brain._trainable


def trainables(models: Any) -> Iterator[tuple[str, Trainable]]:
    """Yield the phase and the Trainable of each entry of ``context["model"]`` that has a Brain."""
    if not isinstance(models, Mapping):
        return
    for phase, entry in models.items():
        brain = entry.get("brain") if isinstance(entry, Mapping) else None
        trainable = getattr(brain, "_trainable", None)
        if isinstance(trainable, Trainable):
            yield phase, trainable


class Trainable:
    """The training and evaluation of a Brain, batch by batch.

    The Brain computes predictions and losses. Everything around that is here: samples and updates
    are counted, losses go to the optimizers, and the numbers of a pass are collected.

    Args:
        brain: computes predictions and losses.
        count: counts the samples of a batch if neither a method nor the config does.
        counts_itself: the method ``count_samples`` of a subclass, with its name for messages; None
            if the subclass does not define it.
        compute_at_once: returns the predictions and losses of a training batch, with fewer calls
            than the two methods of the Brain need; None if there is no such function.
        loss_source: returns the name of the function that returns the losses, for messages.
        compiled: wraps a function so that its calls of the modules are compiled, if the options say
            so.
        named_modules: returns the modules by the names that ``freeze`` has for them.
        custom: which parts of the training the class of the Brain does with code of its own.

    Attributes:
        options: the run options.
        compiled: wraps a function so that its calls of the modules are compiled, if the options say
            so.
        counters: ``context["train_state"]`` in a run.
        schedulers: the OptimSchedulers that the losses drive.
        strategy: how the ranks share the work on a batch; None if there is one process.
        record: the facts about the active batch.
        numbers: the numbers of the pass.
        phase: the name of the phase, for messages.
        in_run: whether it is part of a run of a config.
        custom: which parts of the training the class of the Brain does with code of its own.
        keeps_outputs: whether a plugin or a metric needs the outputs of each training batch.
    """

    def __init__(
        self,
        brain: Computation,
        count: Callable[[Any], int],
        counts_itself: tuple[Callable[[Any], Any], str] | None,
        compute_at_once: Callable[[Any], tuple[Any, Any]] | None,
        loss_source: Callable[[], str],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        named_modules: Callable[[], dict[str, nn.Module]],
        custom: CustomCode = NO_CUSTOM_CODE,
    ) -> None:
        self.brain = brain
        self.options: ComputeOptions
        self.counters: dict[str, int] = dict.fromkeys(TRAIN_STATE, 0)
        self.schedulers: list[WindowedOptimizer] = []
        self.strategy: Strategy | None = None
        self.phase = ""
        self.in_run = False
        self.keeps_outputs = False
        self.custom = custom
        self.compiled = compiled
        self._compute_at_once = compute_at_once
        self._loss_source = loss_source
        self._named_modules = named_modules
        self._sample_counter = SampleCounter(count, counts_itself)
        self._modes = ModuleModes()
        self.record = StepRecord(self.samples_of)
        self.numbers = PassNumbers(self.record.count_samples)
        self._patience: int | None = None
        self._train_autocast: torch.autocast | None = None
        self._eval_autocast: torch.autocast | None = None
        self._batches_trained = 0

    @property
    def modules(self) -> nn.ModuleDict:
        """The modules that are trained."""
        return self.brain.modules

    @property
    def device(self) -> torch.device:
        """The device on which the Brain computes."""
        return self.brain.device

    @property
    def where(self) -> str:
        """The start of messages: the phase, or an empty string if there is none."""
        return f"phase.{self.phase}: " if self.phase else ""

    # Before the training.

    def take_options(self, options: ComputeOptions) -> None:
        """Compute as the options say.

        Raises:
            ConfigError: the device cannot compute in a precision.
        """
        self.options = options
        self._train_autocast = autocast(options.precision, self.device)
        self._eval_autocast = autocast(options.eval_precision, self.device)

    def count_with(self, function: Callable[[Any], Any]) -> None:
        """Count the samples of each batch with the function that the config names."""
        self._sample_counter.count_with(function)

    def freeze_statistics(self, layers: Collection[nn.Module]) -> None:
        """Put layers into evaluation mode at the start of each pass, while they are not trained."""
        self._modes.freeze_statistics(self.modules, layers)

    def bind(
        self,
        phase: str,
        optim_schedulers: Sequence[WindowedOptimizer],
        *,
        counters: dict[str, int] | None,
        patience: int | None,
        sync_batchnorm: bool,
        keeps_outputs: bool,
    ) -> None:
        """Prepare for a phase and its optimizers.

        Args:
            phase: its name, for messages.
            optim_schedulers: the OptimSchedulers that the losses drive.
            counters: ``context["train_state"]`` in a run; None elsewhere.
            patience: how many non-finite batches a pass may have before training ends; None does
                not check.
            sync_batchnorm: whether BatchNorm covers the slices of all ranks, on GPUs.
            keeps_outputs: whether a plugin needs the outputs of each training batch.
        """
        self.phase = phase
        self._sample_counter.name_phase(phase)
        self._patience = patience
        self.in_run = counters is not None
        if counters is not None:
            self.counters = counters
        self.keeps_outputs = keeps_outputs
        self.schedulers = list(optim_schedulers)
        parameters = self._trained_parameters()
        # Windows that close together share a scaler, since its scale may change only between two
        # windows.
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
        if self.strategy is None:
            self.strategy = Strategy(current_world(), self, sync_batchnorm=sync_batchnorm)
        strategy = self.strategy
        parameters = self._trained_parameters()
        trains_all_at_each_step = [
            parameters <= set(scheduler.parameters) and scheduler.step_per_update == 1 for scheduler in self.schedulers
        ]
        kind = type(self.brain).__name__
        if trains_all_at_each_step != [True]:
            strategy.forgo_ddp(f"{kind} has not one optimizer that trains all of it at each step")
        elif any(getattr(module, "sparse", False) for module in self.modules.modules()):
            strategy.forgo_ddp("embeddings have sparse gradients")
        elif self.custom.stepping_method:
            strategy.forgo_ddp(f"{kind} has its own {self.custom.stepping_method}")
        for scheduler in self.schedulers:
            scheduler.bind(self.record, strategy=strategy)

    def _trained_parameters(self) -> set[nn.Parameter]:
        return {parameter for parameter in self.modules.parameters() if parameter.requires_grad}

    def work_alone(self) -> None:
        """Forget how the ranks shared the work of an earlier training."""
        self.strategy = None

    # A pass of training.

    def begin_pass(self, *, keeps_outputs: bool = False) -> None:
        """Reset the modes and the numbers of the last pass.

        Args:
            keeps_outputs: whether a plugin or a metric needs the outputs of each training batch.
        """
        self._modes.start_pass(self.modules, in_run=self.in_run, where=self.where)
        self.keeps_outputs = self.keeps_outputs or keeps_outputs
        self.record.open()
        self.numbers = PassNumbers(self.record.count_samples, self.counters["iteration"])
        if self.strategy:
            self.strategy.begin_pass()
        for scheduler in self.schedulers:
            scheduler.guard.reset()

    def log_modes(self) -> None:
        """Log which modules are in evaluation mode during the training. They are logged once."""
        self._modes.log(self._named_modules(), self.where)

    def weighs_batches(self) -> bool:
        """Return whether losses are weighted by the number of samples in their batch.

        They are in windows of multiple batches, and with multiple ranks.
        """
        if self.strategy is not None and self.strategy.average is not None:
            return True
        return any(scheduler.accum_grad > 1 or scheduler.strategy is not None for scheduler in self.schedulers)

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
        """Add up the numbers of the pass, and its samples, over all ranks. All ranks call it.

        With one process it has no effect.
        """
        if self.strategy is not None:
            samples = self.strategy.take_samples()
            of_all_ranks = self.numbers.gather(samples, self.strategy.world)
            self.counters["samples"] += of_all_ranks - samples

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
        """Return the numbers of the pass so far. On a GPU this waits."""
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

    def fit_batch(self, batch: Any) -> Tensor:  # noqa: PLR0915 # helpers would cost calls in each step
        """Train on one batch. ``Brain.fit_batch`` calls this.

        Returns:
            The loss, detached, on its device; not finite where the step was discarded. For a batch
            without samples it is 0; nothing is computed then, and no hook of the Brain is called.
        """
        brain = self.brain
        record = self.record
        schedulers = self.schedulers
        strategy = self.strategy
        if not schedulers:
            remedy = "give it opt_class and call fit, or call bind(phase, optim_schedulers, context) first"
            raise StageError(f"{type(brain).__name__}.fit_batch: no OptimScheduler trains it; {remedy}")
        if self._train_autocast and autocast_enabled(self.device):
            with without_autocast(self.device):
                return self.fit_batch(batch)
        # The same as `samples_of`.
        counter = self._sample_counter
        samples = 0 if record.stand_in else counter.count(batch) or counter.check_countable(batch)
        record.samples = samples
        record.batch = None
        last = record.last
        if not samples:
            return self._fit_without_samples(last=last)
        hooked = self.custom.has_batch_hooks
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
        # A scalar tensor is the usual case, and checked without a call.
        plain = returned if type(returned) is Tensor and not returned.ndim else None
        losses = losses_by_name(returned, self._loss_source()) if plain is None else {"loss": plain}
        finite, updated = self._backward_and_step(losses, schedulers, self.counters["epoch"], samples, last=last)
        self.counters["samples"] += samples
        self.counters["update"] += updated
        loss = self.numbers.reported_loss(losses) if plain is None else losses["loss"].detach()
        waiting = self.numbers.loss.waiting
        # Without `append`, which would be one more call in each step.
        waiting += [(loss, samples)]
        record.trained = True
        self._batches_trained += 1
        if not finite or self._batches_trained % MOST == 0:
            self.check_divergence()
        if hooked:
            brain.on_fit_batch_end(batch, predictions, loss, should_step)
        record.predictions = None
        if self.keeps_outputs:
            record.predictions = predictions
            record.losses = losses
        return loss

    def _fit_without_samples(self, *, last: bool) -> Tensor:
        """Add a batch that has no samples to the open windows. Nothing is computed for it.

        Other ranks may have samples of the same batch, so this makes the same collective calls as
        ``fit_batch``.
        """
        losses: Losses = {}
        if self.strategy is not None:
            first = self.schedulers[0]
            closes = last or first.is_about_to_close()
            has_more = self.record.has_more
            _, losses = self.strategy.outputs(None, first.loss_name, 0, closes=closes, has_more=has_more)
        finite, updated = self._backward_and_step(losses, self.schedulers, self.counters["epoch"], 0, last=last)
        self.counters["update"] += updated
        loss = torch.zeros((), device=self.device)
        self.numbers.loss.add(loss, 0)
        self.record.predictions = None
        self.record.losses = {}
        self.record.trained = True
        self._batches_trained += 1
        if not finite or self._batches_trained % MOST == 0:
            self.check_divergence()
        return loss

    def compute(self, batch: Any) -> tuple[Any, Any]:
        """Return the predictions for a batch and the result of ``compute_objectives``.

        They are computed in the precision of the training.
        """
        if self._train_autocast and not autocast_enabled(self.device):
            with self._train_autocast:
                return self.compute(batch)
        predictions = self.brain.compute_forward(batch, TRAIN)
        return predictions, self.brain.compute_objectives(predictions, batch, TRAIN)

    # A batch that an update of the user trains on.

    def begin_update(self, batch: Any, *, under_autocast: bool) -> bool:
        """Start an update of the user, and return whether its batch is known to have no samples.

        Such an update may make countable batches of a batch that is not countable. So the samples
        of such a batch are counted later.

        Args:
            batch: the active batch.
            under_autocast: whether the update runs under autocast.
        """
        record = self.record
        record.under_autocast = under_autocast
        # If the losses of a window are weighted, the samples are counted already.
        if record.samples is None:
            if record.stand_in:
                record.samples = 0
            else:
                samples = self._sample_counter.count(batch)
                is_known = samples or self._sample_counter.is_countable(batch)
                record.samples = samples if is_known else None
        return record.samples == 0

    def note_losses(self, losses: Losses) -> None:
        """Note the losses that an update of the user has returned for the active batch."""
        record = self.record
        record.losses = losses if record.samples or not record.trained else {}

    def count_losses(self) -> None:
        """Count the loss and the samples of a batch that did not go through ``fit_batch``."""
        record = self.record
        samples = record.count_samples()
        losses = record.losses
        if losses:
            reported = self.numbers.reported_loss(losses)
            # All ranks count the same number of losses, so a batch without samples counts as well.
            # Its loss may be nan, so it is replaced by 0.
            self.numbers.loss.add(reported if samples else torch.zeros_like(reported), samples)
        record.predictions = None
        record.losses = losses if samples else {}
        self.counters["samples"] += samples
        if self.strategy is not None:
            self.strategy.add_samples(samples)

    # What a subclass may do in another way.

    # One backward for each loss, then a step of each optimizer whose window is full.
    _backward_and_step: ClassVar[Callable[..., tuple[bool, bool]]] = staticmethod(backward_and_step)

    def _close_windows(self) -> bool:
        """Close the windows that are open at the end of a pass.

        Returns:
            Whether there was an update that is not counted yet.
        """
        return close_windows(self.schedulers, self.counters["epoch"])

    def around(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function for the loop that trains on a batch with an update."""
        return update

    def mean_loss(self) -> float:
        """Return the mean loss of the pass; nan if no loss was computed."""
        return self.numbers.loss.mean()

    def custom_average(self) -> LossAverage | None:
        """Return the mean loss of an evaluation as the class of the user computes it; None if it does not."""
        return None

    # Samples.

    def samples_of(self, batch: Any) -> int:
        """Return how many samples a batch has; 0 if it stands in for an empty slice.

        Raises:
            DataError: nothing in it can be counted, or the user's function returned no count.
        """
        counter = self._sample_counter
        if self.record.stand_in:
            return 0
        return counter.count(batch) or counter.check_countable(batch)

    def default_count(self, batch: Any) -> int:
        """Return how many samples a batch has, as ``SampleCounter.default_count`` counts them."""
        return self._sample_counter.default_count(batch)

    # Evaluation.

    @contextmanager
    def evaluating(self, step: int = 0) -> Iterator[StepRecord]:
        """Use another record and other numbers for an evaluation, until the block ends.

        So an evaluation within a pass leaves the record and the numbers of that pass as they are.

        Args:
            step: how many batches were evaluated before.

        Yields:
            The record of the evaluation.
        """
        record_of_pass = self.record
        numbers_of_pass = self.numbers
        record = StepRecord(self.samples_of)
        record.renumber(step)
        self.record = record
        self.numbers = PassNumbers(record.count_samples)
        try:
            yield record
        finally:
            self.record = record_of_pass
            self.numbers = numbers_of_pass

    def predictions_and_losses(self, batch: Any, stage: Stage) -> tuple[Any, Losses]:
        """Return the predictions and losses of one batch."""
        predictions = self.predictions(batch, stage)
        return predictions, self.losses(predictions, batch, stage)

    def predictions(self, batch: Any, stage: Stage) -> Any:
        """Return the predictions for a batch, in the precision of an evaluation."""
        with self._eval_autocast or nullcontext():
            return self.brain.compute_forward(batch, stage)

    def losses(self, predictions: Any, batch: Any, stage: Stage) -> Losses:
        """Return the losses of predictions, in the precision of an evaluation."""
        with self._eval_autocast or nullcontext():
            returned = self.brain.compute_objectives(predictions, batch, stage)
        if returned is None or (isinstance(returned, Mapping) and not returned):
            return {}
        return losses_by_name(returned, self._loss_source())

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """Return the loss of one batch, without training. ``Brain.evaluate_batch`` calls this.

        Raises:
            DataError: ``compute_objectives`` returned no loss.
        """
        losses = self.losses(self.predictions(batch, stage), batch, stage)
        return self.numbers.reported_loss(losses_by_name(losses, self._loss_source()))
