"""An optimizer that steps once for each accumulation window, a number of batches whose gradients it gathers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pipeline.checkpoint.optimizer_state import load_optimizer, optimizer_state_of, options_of, remember_numbers
from pipeline.checkpoint.state import WindowState
from pipeline.checkpoint.storage import without_numpy
from pipeline.distributed.strategy import Strategy
from pipeline.distributed.world import current_world
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.optim.losses import Losses
from pipeline.optim.nonfinite import NonFiniteGuard
from pipeline.optim.touched_rows import with_dense_gradients

Watcher: TypeAlias = Callable[..., Any] | None


class ActiveBatch(Protocol):
    """What an OptimScheduler knows of the batch whose losses it gets; of a Brain it is its ``StepRecord``."""

    @property
    def is_open(self) -> bool:
        """Whether the batch is one of a pass of training."""

    @property
    def number(self) -> int:
        """The number of the batch in all passes."""

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""

    @property
    def under_autocast(self) -> bool:
        """Whether the code that trains may run under autocast."""

    def count_samples(self) -> int:
        """Return how many samples the batch has."""

    def add_losses(self, losses: Losses) -> None:
        """Note losses that the batch was trained on."""


class AnyBatch:
    """What an OptimScheduler without a Brain knows of a batch: nothing, so all of them count alike."""

    is_open, number, epoch, under_autocast = False, 0, 0, True

    def count_samples(self) -> int:
        """Return 1."""
        return 1

    def add_losses(self, losses: Losses) -> None:
        """Note nothing, since nobody asks for it."""


class Window:
    """The batches whose gradients are gathered until the optimizer steps.

    Attributes:
        batches: how many there are.
        samples: how many they have; a tensor while a window closes that several GPUs share.
        discards: whether the window is discarded, as far as that is known.
        weighted: whether the gradients are weighted by samples.
        averaged: whether the gradients are those of the mean loss already.
    """

    __slots__ = ("averaged", "batches", "discards", "samples", "weighted")

    def __init__(self) -> None:
        self.batches = 0
        self.samples: Any = 0
        self.discards = self.weighted = self.averaged = False


class WindowedOptimizer(ABC):
    """An optimizer over some of a model's parameters, the accumulation of their gradients, and a schedule of its rate.

    Losses reach it through ``optimize`` or ``step``. It gathers the gradients of ``accum_grad`` batches, a window, and
    then acts: once for ``step_per_update`` windows. A subclass says in ``update_lr`` what the rate is.

    Args:
        optim_type: the name of a class of torch.optim, the class path of another, a class itself, or a function that
            makes an optimizer of the parameters.
        optim_conf: its keyword arguments; ``lr`` is the base rate, and ``learning_rate`` another name for it.
        model: whose trainable parameters are optimized.
        distributed: for SpeeChain's callers; whether processes share the work is the run's to know.
        optim_loss: the name of the loss that it descends; None is ``loss``.
        updated_modules: the dotted name of a part of the model, or several, to which it is confined; None is all of it.
        step_per_update: windows for each of its steps; in the others nothing is computed for it.
        use_amp: whether it takes the gradient scaler of a run in fp16, on a device that needs one.
        accum_grad: batches in a window.
        ft_factor: scales every rate.
        grad_clip: largest norm of the gradients of its own parameters; None does not clip.
        grad_norm_type: the p of that norm.
        grad_clip_value: largest absolute value of a gradient; None does not clip. With both, the norm comes first.
        groups: parameter groups by the names of parameters or modules: ``{"params": "*.bias", "weight_decay": 0}``, with
            ``params`` a pattern or several. The first that matches has a parameter; what none matches is the last group,
            with ``optim_conf`` alone. A rate ``"0.1x"`` is a multiple of the base rate.
        remove_vector_weight_decay: whether vectors (biases, norms) have no weight decay, but in a group that sets it.
        lazy_mode: whether of a parameter with a sparse gradient only the rows are stepped that have one. PaddlePaddle's name.
        sche_conf: passed on to ``sche_init``.

    Attributes:
        model, optim_loss, updated_modules: as they were given; one module is a list of one.
        distributed: whether it was given as true, or several processes share the work.
        parameters: what the optimizer trains.
        configured: of each group, the options with which the optimizer was made; a resumed run keeps to them.
        owns_all: whether its loss reaches no other parameter that is trained, so that one plain backward will do; only
            whoever knows the whole model may say so.
        real_step: how many windows are closed.
        window: the open window.
        discarded_windows: windows without an optimizer step, as far as they are known, since they were last logged.
        record: what happens to the active batch; shared with the Brain to which the scheduler is bound.
        last_gradients, last_batch, last_update: the ``number`` of the last batch for which ``optimize`` has computed the
            gradients, of the last that counted in a window, and of the last that ended an update.
        rate: of the last update, in the first group, with ``groups`` in the last; None before the first.
        base_lr: the rate of the first group, as ``optim_conf`` sets it.
        gradient_norm: of the last update, before it was clipped; None where nothing computes it.
        losses: the losses of the last ``optimize`` in which this scheduler was the first one, detached.
        scaler: scales the loss in fp16; None elsewhere.
        sparse: whether gradients of its parameters may be sparse.
        stepped: whether the scaler has made a step that it has not yet adapted to.
        guarded: whether to look for losses that are not finite.
        check_gradients: whether to look for gradients that are not finite where nothing else does.
        measures_norm: whether to compute the norm of the gradients where nothing else does, to report it.
        guard: discards windows that are not finite, and counts them.
        strategy: makes gradients those of all ranks; None: there is one process.
        before_backward, after_backward, before_update, after_update: called at these moments, for the plugins.

    Raises:
        ConfigError: an argument is out of range, a module is not there, or nothing in it is trained.

    SpeeChain clips the parameters of the whole model, writes one rate into every group, and lets its decay and
    ``ft_factor`` compound; here each is confined to the own parameters, group ratios stay, and rates scale the base.
    """

    # Whether the schedule leaves the rate as it is, so that it need not be asked at each step.
    constant: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[str, Tensor],
        *,
        loss_name: str = "loss",
        base_group: int = 0,
        step_per_update: int = 1,
        use_amp: bool = True,
        accum_grad: int = 1,
        ft_factor: float = 1.0,
        grad_clip: float | None = 1.0,
        grad_norm_type: float = 2.0,
        grad_clip_value: float | None = None,
        sparse: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.loss_name = loss_name
        self.step_per_update, self.use_amp, self.ft_factor = step_per_update, use_amp, ft_factor
        self.accum_grad = self.configured_accum_grad = accum_grad
        self.grad_clip, self.grad_norm_type, self.grad_clip_value = grad_clip, grad_norm_type, grad_clip_value
        self.sparse = sparse
        self.scaler: GradScaler | None = None
        self.owns_all = self.check_gradients = self.stepped = self.measures_norm = False
        self.guarded = True
        self.real_step = self.discarded_windows = 0
        self.window = Window()
        self.strategy = Strategy(current_world()) if current_world().size > 1 else None
        self.record: ActiveBatch = AnyBatch()
        self.last_batch = self.last_update = -1
        self.last_gradients = 0
        self.finite_on_ranks = True
        # The same for the windows since the last batch.
        self._finite_since_batch = True
        self.partners: list[WindowedOptimizer] | None = None
        self.rate: float | Tensor | None = None
        self.gradient_norm: float | Tensor | None = None
        self.before_backward = self.after_backward = self.before_update = self.after_update = cast("Watcher", None)
        self._base = base_group
        self.parameters: list[Tensor] = [own for group in optimizer.param_groups for own in group["params"]]
        self.guard = NonFiniteGuard(optimizer, names)
        self._take_rates()

    def remember_options(self) -> None:
        """Remember the options with which the optimizer was made; a subclass calls this at the end of its constructor."""
        self.configured = options_of(self.optimizer)
        remember_numbers(self.optimizer)

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.record.epoch

    def bind(
        self,
        record: ActiveBatch,
        *,
        scaler: GradScaler | None = None,
        strategy: Strategy | None = None,
        owns_all: bool | None = None,
        guarded: bool | None = None,
        check_gradients: bool | None = None,
    ) -> None:
        """Connect this with what computes its losses: a Brain, or an experiment. None leaves a value as it is.

        Args:
            record: what happens to the active batch.
            scaler: scales the loss in fp16.
            strategy: makes gradients those of all ranks.
            owns_all: whether the loss reaches no other parameter that is trained.
            guarded: whether to look for losses that are not finite.
            check_gradients: whether to look for gradients that are not finite where nothing else does.
        """
        owned = self.owns_gradients
        self.record = record
        self._own_gradients(owned=owned)
        self.scaler = self.scaler if scaler is None else scaler
        self.strategy = self.strategy if strategy is None else strategy
        self.owns_all = self.owns_all if owns_all is None else owns_all
        self.guarded = self.guarded if guarded is None else guarded
        self.check_gradients = self.check_gradients if check_gradients is None else check_gradients

    def watch(
        self,
        *,
        before_backward: Watcher = None,
        after_backward: Watcher = None,
        before_update: Watcher = None,
        after_update: Watcher = None,
    ) -> None:
        """Have functions called at these moments; None calls none."""
        self.before_backward, self.after_backward = before_backward, after_backward
        self.before_update, self.after_update = before_update, after_update

    # Whether gradients that are there without an open window are left over from other code.

    @property
    def owns_gradients(self) -> bool:
        """Whether ``optimize`` has computed the gradients of the last batch.

        If it has, other code has left what is there without an open window. If not, code that steps by itself may gather
        its gradients there.
        """
        return self.last_gradients >= self.record.number

    def _own_gradients(self, *, owned: bool) -> None:
        self.last_gradients = self.record.number if owned else -1

    def note_cleared(self) -> None:
        """After a batch: if there are no gradients, code that steps by itself gathers none."""
        if not self.owns_gradients:
            self._own_gradients(owned=all(parameter.grad is None for parameter in self.parameters))

    def step_beside(self, partners: Sequence[WindowedOptimizer]) -> None:
        """Take the other optimizers that are to step on the same losses.

        Raises:
            ConfigError: two of all train the same parameter: the first step would clear the gradients of the second.
        """
        trained: set[Tensor] = set()
        for optimizer in (self, *partners):
            if shared := trained.intersection(optimizer.parameters):
                name = next((name for name, parameter in optimizer.guard.names.items() if parameter in shared), "?")
                raise ConfigError(
                    f"two OptimSchedulers train '{name}'; confine each to other modules with updated_modules"
                )
            trained.update(optimizer.parameters)
        self.partners = list(partners)

    # The open window.

    def has_open_window(self) -> bool:
        """Whether gradients of a window are there, or a backward for one is running."""
        return self.window.weighted or self.window.batches > 0

    def is_full(self) -> bool:
        """Whether the window has all of its batches."""
        return self.window.batches >= self.accum_grad

    def is_about_to_close(self) -> bool:
        """Whether the window has all of its batches with the next one."""
        return self.window.batches + 1 >= self.accum_grad

    def move_to(self, batch: int) -> None:
        """Take the place in the schedule and in the window before a batch, counted from 0."""
        self.real_step, self.window.batches = divmod(batch, self.accum_grad)

    def open_by_hand(self, *, averaged: bool) -> None:
        """Take gradients that code of the user's has computed as a window of one batch.

        Args:
            averaged: whether they are those of all ranks already.
        """
        self.window.batches = self.window.samples = 1
        self.window.averaged = averaged
        # The loss may be counted as well, by the code that has computed it.
        self.guard.judge_alone()

    def adopt_groups(self) -> None:
        """Take the groups into which a plugin has divided the parameters, each with the rate that it starts from."""
        if len(self.optimizer.param_groups) != len(self._base_rates):
            self._take_rates()
            self.configured = options_of(self.optimizer)

    def _take_rates(self) -> None:
        """Remember the rates with which the groups begin: that of ``optim_conf`` is the base."""
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.base_lr = float(self.optimizer.defaults["lr"]) if self._base else self._base_rates[0]
        if self.base_lr == 0 and any(self._base_rates) and not (self.constant and self.ft_factor == 1.0):
            rates = ", ".join(f"{rate:g}" for rate in self._base_rates)
            what = f"the base rate is 0, and the rates of the groups are {rates}"
            raise ConfigError(f"OptimScheduler: {what}; make it above 0, as the groups keep their ratio to it")

    @abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate for a window, counted from 1, in an epoch, counted from 1."""

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Receive the numbers of a validation pass, for a schedule that depends on them."""

    def acts(self) -> bool:
        """Whether it will step at the end of the open window; if not, nothing has to be computed for it."""
        return self.step_per_update == 1 or (self.real_step + 1) % self.step_per_update == 0

    def backward(self, loss: Tensor, group: Sequence[WindowedOptimizer], samples: int, **arguments: Any) -> bool:
        """Run backward for schedulers that share the loss and the scaler; False if the loss is known not to be finite.

        Args:
            loss: the loss.
            group: the schedulers.
            samples: how many the batch has.
            arguments: of torch's backward, such as the parameters that get gradients; else all that the loss depends on.
        """
        strategy = self.strategy
        weighted = strategy is not None
        if not samples and (strategy is None or strategy.in_ddp is None):
            # The loss may be nan, and nan times 0 is nan. In DDP, a rank without samples gives zeros.
            return True
        if not loss.requires_grad:
            self.raise_no_gradient()
        for scheduler in group:
            weighted = weighted or scheduler.accum_grad > 1
            if scheduler.guarded and not loss.is_cpu:
                scheduler.guard.record_loss(loss)
            # Reads one number, on the CPU: a loss that is not finite must not reach the weights.
            elif scheduler.guarded and not -math.inf < loss.item() < math.inf:
                for sharing in group:
                    sharing.window.discards = True
                # In DDP a rank takes part all the same.
                if strategy is None or strategy.in_ddp is None:
                    return False
        for scheduler in group:
            scheduler.window.weighted = weighted
        if weighted:
            loss = loss * samples
        if self.scaler:
            loss = self.scaler.scale(loss)
        if strategy is not None:
            window = self.window
            loss = strategy.with_numbers(loss, window.samples + samples, discards=window.discards, bad=self.guard.loss)
        torch.autograd.backward(loss, **arguments)
        return True

    def raise_no_gradient(self) -> NoReturn:
        """Raise the error for a loss without a gradient."""
        remedy = "compute it from the model's output, outside of torch.no_grad()"
        raise DataError(f"the loss '{self.loss_name}' has no gradient; {remedy}")

    def add_batch(self, samples: int) -> None:
        """Add a batch whose gradients are computed to the window.

        Args:
            samples: how many the batch has.
        """
        window = self.window
        self.last_gradients = self.last_batch = self.record.number
        window.batches += 1
        window.samples += samples
        self.finite_on_ranks = self._finite_since_batch
        self._finite_since_batch = True

    def apply(self, epoch: int, samples: int | None = None) -> bool:  # noqa: PLR0912, PLR0915 # each call would be one a step
        """Close the window: set the rate, unscale, guard, clip, step, clear the gradients.

        The rate that a plugin sets in ``before_update`` is that of this one update.

        Args:
            epoch: counted from 0.
            samples: of a batch that is added to the window first; None: there is none.

        Returns:
            Whether it acted, be it that the window was discarded.
        """
        acts = self.step_per_update == 1 or self.acts()
        window = self.window
        if samples is not None:
            # The same as add_batch does, without its call.
            self.last_gradients = self.record.number
            window.batches += 1
            window.samples += samples
        self.real_step += 1
        self.last_batch = self.record.number
        if acts:
            self.last_update = self.last_batch
            rates, groups, self.gradient_norm = [], self.optimizer.param_groups, None
            if self.strategy is not None and not window.averaged:
                # The same as _share_window does, without its call.
                window.samples, window.discards, bad = self.strategy.close(
                    self.parameters, window.samples, discards=window.discards, bad=self.guard.loss, sparse=self.sparse
                )
                window.weighted = True
                self._finite_since_batch = self._finite_since_batch and not window.discards
                if bad is not None and self.guarded:
                    self.guard.record(bad)
            # On GPUs the samples of all ranks are a tensor; there the guard discards the window.
            if window.batches and type(window.samples) is not Tensor and not window.samples:
                window.discards = True
            if not (self.constant or window.discards):
                rate = self.update_lr(self.real_step, epoch + 1)
                # A rate that is none would reach the weights.
                if type(rate) is not float or not 0 <= rate < math.inf:
                    rate = self._rate_of(rate, self.real_step)
                self.set_rate(self.ft_factor * rate)
            if self.before_update:
                # Products are copies: a rate that is a Tensor is set in place.
                rates = [group["lr"] * 1.0 for group in groups]
                self.before_update(optim_scheduler=self)
            plain = not self.scaler and self.grad_clip is None and not self.check_gradients and self.accum_grad == 1
            plain = plain and not (window.weighted or self.measures_norm) and self.guard.loss is None
            plain = plain and self.grad_clip_value is None
            steps = not window.discards and (plain or self._prepare())
            self.discarded_windows += not steps
            if steps:
                if self.scaler:
                    self.scaler.step(self.optimizer)
                    self.guard.note_scaler(self.scaler)
                    self.stepped = True
                else:
                    self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.after_update:
                self.after_update(optim_scheduler=self)
            self.rate = groups[self._base]["lr"]
            if rates:
                self.rate = self.rate * 1.0
                self._put_back(rates)
        window.batches = window.samples = 0
        window.discards = window.weighted = window.averaged = False
        if self.guard.loss is not None:
            self.guard.close()
        if samples is not None:
            self.finite_on_ranks = self._finite_since_batch
            self._finite_since_batch = True
        return acts

    def _share_window(self, strategy: Strategy) -> None:
        """Make the gradients and the samples of the window those of all ranks."""
        window = self.window
        window.samples, window.discards, bad = strategy.close(
            self.parameters, window.samples, discards=window.discards, bad=self.guard.loss, sparse=self.sparse
        )
        window.weighted = True
        self._finite_since_batch = self._finite_since_batch and not window.discards
        if bad is not None and self.guarded:
            self.guard.record(bad)

    def average(self) -> None:
        """Make the gradients of the open window those of its mean loss on all ranks, for code that steps by itself."""
        window = self.window
        if self.strategy is not None:
            self._share_window(self.strategy)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and (window.weighted or self.accum_grad > 1):
            # Without samples the gradients are zeros, which 0 would turn into nan.
            samples = window.samples if type(window.samples) is Tensor else float(window.samples or 1)
            torch._foreach_div_(gradients, samples)
        window.samples, window.weighted, window.averaged = 1, False, True

    def leave_window(self, *, stepped: bool) -> None:
        """End a window in which this did not act: others have stepped the optimizer, or its gradients wait for the next."""
        window = self.window
        window.batches, window.averaged = 0, False
        # Others keep them, or they wait.
        self._own_gradients(owned=not (stepped or window.samples))
        if stepped:
            self.last_batch = self.record.number
            if self.acts():
                self.last_update = self.last_batch
            self.real_step, window.samples, window.discards = self.real_step + 1, 0, False
            self.guard.close()

    def skip_update(self) -> None:
        """In ``before_update``: discard the window, so that the optimizer does not step and its gradients are cleared.

        The window counts as any other, for counters and schedule, and not as one that is not finite.
        """
        self.window.discards = True

    def take_discarded_windows(self) -> int:
        """Return how many windows were discarded since the last call; on a GPU this waits for the work so far."""
        count = self.discarded_windows + self.guard.take_skipped()
        self.discarded_windows = 0
        return count

    def _rate_of(self, value: Any, window: int) -> float:
        """The result of ``update_lr``, checked to be a learning rate.

        Raises:
            ConfigError: it is none.
        """
        value = without_numpy(value)
        number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number or not 0 <= (rate := float(value)) < math.inf:
            what = f"{type(self).__name__}.update_lr returned {value!r} for window {window}"
            raise ConfigError(f"{what}; return a finite rate of 0 or more")
        return rate

    def _prepare(self) -> bool:
        """Scale the gradients to the mean loss and clip them; return False if they are known not to be finite."""
        parameters = with_dense_gradients(self.parameters) if self.sparse else self.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.scaler:
            # It checks gradients alone, which may well be finite where a loss is not.
            if self.guard.loss is not None and gradients:
                gradients[0].div_((1 - self.guard.loss).to(gradients[0].device))
            self.scaler.unscale_(self.optimizer)
        if gradients and (self.window.weighted or self.accum_grad > 1):
            samples = self.window.samples
            torch._foreach_div_(gradients, samples if type(samples) is Tensor else float(samples))
        norm, judges = None, self.grad_clip is not None or self.check_gradients
        if gradients and (judges or self.measures_norm):
            norm = self.gradient_norm = self.guard.norm_of(gradients, self.grad_norm_type)
        # A scaler looks for itself, and what it skips while it finds its scale is no fault.
        asked = not self.scaler and (judges or self.guard.loss is not None)
        if asked and not self.guard.allows_step(norm if judges else None, self.parameters, gradients):
            return False
        if norm is not None and self.grad_clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.grad_clip, norm)
        if self.grad_clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.grad_clip_value)
        return True

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the group that has the base rate; the other groups keep their ratio to it."""
        base = self.base_lr
        for group, group_base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            new = rate if group_base == base else rate * group_base / base
            if type(group["lr"]) is Tensor:
                # A captured or compiled step reads this very tensor.
                group["lr"].fill_(new)
            else:
                group["lr"] = new

    def _put_back(self, rates: Sequence[float | Tensor]) -> None:
        """Undo what a plugin has set for one update."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if type(group["lr"]) is Tensor:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _names_of_groups(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer."""
        names = {parameter: name for name, parameter in self.guard.names.items()}
        return [[names.get(parameter, "?") for parameter in group["params"]] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scaler, the position in the schedule, and the gradients of an open window."""
        window = self.window
        counts = {"real_step": self.real_step, "batches": window.batches, "samples": window.samples}
        counts["owns_gradients"] = self.owns_gradients
        self.discarded_windows += self.guard.take_skipped()
        counts["discarded_windows"] = self.discarded_windows
        numbers = {"rate": self.rate, "gradient_norm": self.gradient_norm}
        names = self.guard.names.items() if window.batches else ()
        read = {name: None if number is None else float(number) for name, number in numbers.items()}
        return {
            "optimizer": optimizer_state_of(self.optimizer, self.configured),
            "groups": self._names_of_groups(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "accum_grad": self.accum_grad,
            "configured_accum_grad": self.configured_accum_grad,
            "window": {**counts, "discards": window.discards or bool(self.guard.loss), **read},
            "schedule": self.schedule_state(),
            "gradients": {name: parameter.grad for name, parameter in names if parameter.grad is not None},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``; options that the config has changed keep their new value.

        That of SpeeChain, which knows no position, is taken too: its callers say to each ``step`` where it is.

        Raises:
            CheckpointError: it has an open window of another length, or other parameters in the groups of the optimizer.
        """
        names = self._names_of_groups()
        if [*map(list, state_dict.get("groups", names))] != names:
            # Torch would give the moments to other parameters: it keeps them by number.
            what = "the parameter groups of the optimizer hold other parameters than those of the checkpoint"
            raise CheckpointError(f"{what}; set groups and modules back, or begin anew with init_model_path")
        load_optimizer(self.optimizer, state_dict["optimizer"], self.configured, scheduled=not self.constant)
        if self.scaler and state_dict["scaler"]:
            self.scaler.load_state_dict(state_dict["scaler"])
        if state_dict.keys() == {"optimizer", "scaler"}:
            return
        for name, gradient in state_dict.get("gradients", {}).items():
            parameter = self.guard.names[name]
            parameter.grad = gradient.to(parameter.device, copy=True)
        self._load_window(WindowState.from_tree(state_dict["window"], "window"))
        length = state_dict["accum_grad"]
        if state_dict["configured_accum_grad"] == self.accum_grad:
            # What a plugin has set goes on.
            self.accum_grad = length
        elif self.window.batches and length != self.accum_grad:
            what = f"accum_grad: {length} -> {self.accum_grad}: has changed, and a window of accumulation is open"
            raise CheckpointError(f"{what}; set it back until the epoch is over, or resume one between two epochs")
        self.load_schedule_state(state_dict["schedule"])

    def _load_window(self, state: WindowState) -> None:
        self.window.batches, self.window.samples, self.window.discards = state.batches, state.samples, state.discards
        self.real_step, self.discarded_windows = state.real_step, state.discarded_windows
        self.rate, self.gradient_norm = state.rate, state.gradient_norm
        self._own_gradients(owned=state.owns_gradients)

    def schedule_state(self) -> dict[str, Any]:
        """The state of the schedule beyond step and epoch; most schedules have none."""
        return {}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Restore a ``schedule_state``."""


def update_scalers(optim_schedulers: Sequence[WindowedOptimizer]) -> None:
    """Update each gradient scaler after a step; no window with gradients of its scale may be open then."""
    for scaler in {scheduler.scaler for scheduler in optim_schedulers if scheduler.scaler and scheduler.stepped}:
        sharing = [scheduler for scheduler in optim_schedulers if scheduler.scaler is scaler]
        if any(scheduler.window.batches for scheduler in sharing):
            factors = " and ".join(str(scheduler.accum_grad) for scheduler in sharing)
            what = f"OptimSchedulers with an accum_grad of {factors} share a GradScaler"
            raise ConfigError(f"{what}, whose scale would change within a window; give each a scaler of its own")
        scaler.update()
        for scheduler in sharing:
            scheduler.stepped = False
