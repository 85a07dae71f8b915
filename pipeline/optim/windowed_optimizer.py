"""An optimizer that accumulates the gradients of a window of batches before each step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

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
from pipeline.optim.active_batch import ActiveBatch, AnyBatch
from pipeline.optim.nonfinite import NonFiniteGuard
from pipeline.optim.touched_rows import with_dense_gradients

# A function that plugins have called at a backward or an update; None if no plugin listens.
Watcher: TypeAlias = Callable[..., Any] | None


class WindowedOptimizer(ABC):
    """A torch optimizer that accumulates gradients over a window of batches, and its learning rate.

    A window has ``accum_grad`` batches; the end of a pass closes it earlier. When it closes, the
    optimizer sets its rate, scales the gradients to those of the mean loss over the samples of the
    window, clips them, steps, and clears them. With ``step_per_update`` above 1, it acts only in
    the last of so many windows. A window whose loss or gradients are not finite is discarded: it
    counts as an update, but makes no step.

    ``backward_and_step`` and ``close_windows`` in ``stepping.py`` train with one or multiple of
    these. A subclass defines ``update_lr``, which returns the rate of an update. Its constructor
    ends with a call of ``remember_options``.

    Args:
        optimizer: steps the parameters.
        names: name -> each parameter of the optimizer.
        loss_name: the name of the loss that it minimizes.
        base_group: the index of the parameter group that has the base rate: 0, or -1 for the last
            one.
        step_per_update: the number of windows per step. In the other windows nothing is computed
            for it.
        use_amp: whether it uses the gradient scaler of a run in fp16, on a device that needs one.
        accum_grad: the number of batches in a window.
        ft_factor: a factor of every rate.
        grad_clip: the largest norm of the gradients of its parameters; None does not clip.
        grad_norm_type: the p of this norm.
        grad_clip_value: the largest absolute value of a gradient; None does not clip. With
            ``grad_clip`` too, the norm is clipped first.
        sparse: whether gradients of its parameters may be sparse.

    Attributes:
        parameters: the parameters of the optimizer, in the order of its groups.
        configured: for each group, the options that the optimizer was made with. A resumed run
            keeps them.
        owns_all: whether its loss reaches no other trained parameter, so that a plain backward is
            enough. Only code that knows the whole model sets this.
        real_step: the number of closed windows.
        window: the open window.
        discarded_windows: the windows without an optimizer step since these were last logged, as
            far as known.
        record: describes the active batch. It is shared with the Brain that the optimizer is bound
            to.
        last_gradients: the ``number`` of the last batch for which ``optimize`` has computed the
            gradients.
        last_batch: the ``number`` of the last batch that counted in a window.
        last_update: the ``number`` of the last batch that ended an update.
        rate: the rate of the last update in the base group; None before the first update.
        base_lr: the rate of the base group as configured.
        gradient_norm: the norm of the gradients in the last update, before clipping; None if
            nothing needs it.
        scaler: scales the loss in fp16; None in other precisions.
        stepped: whether the scaler has made a step since it was last updated.
        finite_on_ranks: whether no rank is known to have had a loss that is not finite, in the
            windows that were closed from the previous batch to the last one.
        partners: the other optimizers of the last call of ``optimize``; they train other
            parameters.
        guarded: whether losses are checked to be finite.
        check_gradients: whether gradients are checked to be finite even if nothing else needs it.
        measures_norm: whether the norm of the gradients is computed even if nothing else needs it.
        guard: discards the windows that are not finite, and counts them.
        strategy: combines the gradients of all ranks; None if there is only one process.
        before_backward, after_backward, before_update, after_update: the functions of the plugins
            that are called at these moments.

    Raises:
        ConfigError: the base rate is 0, and the rate of another group is not.
    """

    # Whether the schedule never changes the rate, so that ``update_lr`` is not called.
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
        self.step_per_update = step_per_update
        self.use_amp = use_amp
        self.accum_grad = accum_grad
        self.configured_accum_grad = accum_grad
        self.ft_factor = ft_factor
        self.grad_clip = grad_clip
        self.grad_norm_type = grad_norm_type
        self.grad_clip_value = grad_clip_value
        self.sparse = sparse
        self.scaler: GradScaler | None = None
        self.owns_all = False
        self.check_gradients = False
        self.stepped = False
        self.measures_norm = False
        self.guarded = True
        self.real_step = 0
        self.discarded_windows = 0
        self.window = Window()
        self.strategy = Strategy(current_world()) if current_world().size > 1 else None
        self.record: ActiveBatch = AnyBatch()
        self.last_batch = -1
        self.last_update = -1
        self.last_gradients = 0
        self.finite_on_ranks = True
        # The same for the windows that were closed since the last batch.
        self._finite_since_batch = True
        self.partners: list[WindowedOptimizer] | None = None
        self.rate: float | Tensor | None = None
        self.gradient_norm: float | Tensor | None = None
        self.before_backward: Watcher = None
        self.after_backward: Watcher = None
        self.before_update: Watcher = None
        self.after_update: Watcher = None
        self._base_group = base_group
        self.parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.guard = NonFiniteGuard(optimizer, names)
        self._take_rates()

    def remember_options(self) -> None:
        """Remember the options that the optimizer was made with, to recognize later changes."""
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
        """Connect the optimizer with a Brain or an experiment, which computes its losses.

        None leaves a value as it is.

        Args:
            record: describes the active batch.
            scaler: scales the loss in fp16.
            strategy: combines the gradients of all ranks.
            owns_all: whether the loss reaches no other trained parameter.
            guarded: whether losses are checked to be finite.
            check_gradients: whether gradients are checked to be finite even if nothing else needs
                it.
        """
        owned = self.owns_gradients
        self.record = record
        self._mark_gradients(owned=owned)
        if scaler is not None:
            self.scaler = scaler
        if strategy is not None:
            self.strategy = strategy
        if owns_all is not None:
            self.owns_all = owns_all
        if guarded is not None:
            self.guarded = guarded
        if check_gradients is not None:
            self.check_gradients = check_gradients

    def watch(
        self,
        *,
        before_backward: Watcher = None,
        after_backward: Watcher = None,
        before_update: Watcher = None,
        after_update: Watcher = None,
    ) -> None:
        """Set the functions that are called at these moments; None calls none."""
        self.before_backward = before_backward
        self.after_backward = after_backward
        self.before_update = before_update
        self.after_update = after_update

    def remember_partners(self, partners: Iterable[WindowedOptimizer]) -> None:
        """Remember the other optimizers that step on the same losses.

        Args:
            partners: the other optimizers.

        Raises:
            ConfigError: two of all these optimizers train the same parameter. The first step would
                clear the gradients of the second.
        """
        partners = list(partners)
        trained: set[Tensor] = set()
        for optimizer in (self, *partners):
            if shared := trained.intersection(optimizer.parameters):
                name = next((name for name, parameter in optimizer.guard.names.items() if parameter in shared), "?")
                raise ConfigError(
                    f"two OptimSchedulers train '{name}'; confine each to other modules with updated_modules"
                )
            trained.update(optimizer.parameters)
        self.partners = partners

    # Whether gradients that exist without an open window are left over from other code.

    @property
    def owns_gradients(self) -> bool:
        """Whether ``optimize`` has computed the gradients of the last batch.

        If it has, gradients that exist without an open window are left over from other code. If it
        has not, code that steps the optimizer itself may accumulate its gradients there.
        """
        return self.last_gradients >= self.record.number

    def _mark_gradients(self, *, owned: bool) -> None:
        self.last_gradients = self.record.number if owned else -1

    def note_cleared(self) -> None:
        """Check after a batch whether other code accumulates gradients: not if there are none."""
        if not self.owns_gradients:
            self._mark_gradients(owned=all(parameter.grad is None for parameter in self.parameters))

    # The open window.

    def acts(self) -> bool:
        """Return whether it steps at the end of the open window.

        If not, nothing has to be computed for it.
        """
        return self.step_per_update == 1 or (self.real_step + 1) % self.step_per_update == 0

    def has_open_window(self) -> bool:
        """Return whether there are gradients of a window, or a backward for one is running."""
        return self.window.weighted or self.window.batches > 0

    def is_full(self) -> bool:
        """Return whether the window has all of its batches."""
        return self.window.batches >= self.accum_grad

    def is_about_to_close(self) -> bool:
        """Return whether the next batch fills the window."""
        return self.window.batches + 1 >= self.accum_grad

    def move_to_batch(self, number: int) -> None:
        """Set the position in the schedule and in the window to that before a batch.

        Args:
            number: of the batch, counted from 0 over the whole training.
        """
        self.real_step, self.window.batches = divmod(number, self.accum_grad)

    def open_by_hand(self, *, averaged: bool) -> None:
        """Take gradients that user code has computed as a window of one batch.

        Args:
            averaged: whether they are averaged over all ranks already.
        """
        self.window.batches = 1
        self.window.samples = 1
        self.window.averaged = averaged
        # The code that has computed the loss may count it, too.
        self.guard.judge_alone()

    def skip_update(self) -> None:
        """Discard the open window, so that the optimizer makes no step and clears its gradients.

        Plugins call it in ``before_update``. The window counts as any other one, for counters and
        schedule. It does not count as one that is not finite.
        """
        self.window.discards = True

    def backward(self, loss: Tensor, sharing: Sequence[WindowedOptimizer], samples: int, **arguments: Any) -> bool:
        """Run one backward for the optimizers that share a loss and a scaler.

        Args:
            loss: a scalar, the mean over the samples of the batch.
            sharing: these optimizers, with this one as the first.
            samples: how many samples the batch has.
            arguments: of torch's ``backward``, such as the parameters that get gradients. By
                default all tensors that the loss depends on get them.

        Returns:
            False if the loss is known not to be finite.

        Raises:
            DataError: the loss has no gradient.
        """
        strategy = self.strategy
        if not samples and (strategy is None or strategy.in_ddp is None):
            # The loss may be nan, and nan times 0 is nan. In DDP, a rank without samples
            # contributes zeros.
            return True
        if not loss.requires_grad:
            self.raise_no_gradient()
        weighted = strategy is not None
        for optimizer in sharing:
            weighted = weighted or optimizer.accum_grad > 1
            if optimizer.guarded and not loss.is_cpu:
                optimizer.guard.record_loss(loss)
            # This reads one number on the CPU: a loss that is not finite must not reach the
            # weights. The comparisons save a call of math.isfinite.
            elif optimizer.guarded and not -math.inf < loss.item() < math.inf:
                for each in sharing:
                    each.window.discards = True
                # In DDP, a rank takes part in the backward anyway.
                if strategy is None or strategy.in_ddp is None:
                    return False
        for optimizer in sharing:
            optimizer.window.weighted = weighted
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
        """Raise the error for a loss without a gradient.

        Raises:
            DataError: always.
        """
        remedy = "compute it from the model's output, outside of torch.no_grad()"
        raise DataError(f"the loss '{self.loss_name}' has no gradient; {remedy}")

    def add_batch(self, samples: int) -> None:
        """Add a batch to the window, after its backward.

        Args:
            samples: how many samples the batch has.
        """
        window = self.window
        self.last_gradients = self.record.number
        self.last_batch = self.record.number
        window.batches += 1
        window.samples += samples
        window.weighted = window.weighted or self.accum_grad > 1
        self.finite_on_ranks = self._finite_since_batch
        self._finite_since_batch = True

    def apply(self, epoch: int, samples: int | None = None) -> bool:  # noqa: PLR0912, PLR0915 # a call per part would be one per step
        """Close the window: set the rate, prepare the gradients, step, and clear the gradients.

        A rate that a plugin sets in ``before_update`` holds for this update only.

        Args:
            epoch: the current epoch, counted from 0.
            samples: the samples of a batch that is added to the window first; None adds no batch.

        Returns:
            Whether it acted, even if the window was discarded.
        """
        acts = self.step_per_update == 1 or self.acts()
        window = self.window
        if samples is not None:
            # The same as in add_batch, without its call.
            self.last_gradients = self.record.number
            window.batches += 1
            window.samples += samples
            window.weighted = window.weighted or self.accum_grad > 1
        self.real_step += 1
        self.last_batch = self.record.number
        if acts:
            self.last_update = self.last_batch
            self.gradient_norm = None
            groups = self.optimizer.param_groups
            rates: list[float | Tensor] = []
            if self.strategy is not None and not window.averaged:
                # The same as in _share_window, without its call.
                window.samples, window.discards, bad = self.strategy.close(
                    self.parameters, window.samples, discards=window.discards, bad=self.guard.loss, sparse=self.sparse
                )
                window.weighted = True
                self._finite_since_batch = self._finite_since_batch and not window.discards
                if bad is not None and self.guarded:
                    self.guard.record(bad)
            # On GPUs the samples of all ranks are a tensor, and the guard discards the window.
            if window.batches and type(window.samples) is not Tensor and not window.samples:
                window.discards = True
            if not (self.constant or window.discards):
                rate = self.update_lr(self.real_step, epoch + 1)
                # An invalid rate would reach the weights.
                if type(rate) is not float or not 0 <= rate < math.inf:
                    rate = self._checked_rate(rate, self.real_step)
                self.set_rate(self.ft_factor * rate)
            if self.before_update:
                # The products are copies: a plugin may change a rate that is a tensor in place.
                rates = [group["lr"] * 1.0 for group in groups]
                self.before_update(optim_scheduler=self)
            is_ready = (
                not self.scaler
                and self.grad_clip is None
                and self.grad_clip_value is None
                and not self.check_gradients
                and not self.measures_norm
                and self.accum_grad == 1
                and not window.weighted
                and self.guard.loss is None
            )
            steps = not window.discards and (is_ready or self._prepare_gradients())
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
            self.rate = groups[self._base_group]["lr"]
            if rates:
                self.rate = self.rate * 1.0
                self._restore_rates(rates)
        window.batches = 0
        window.samples = 0
        window.discards = False
        window.weighted = False
        window.averaged = False
        if self.guard.loss is not None:
            self.guard.close()
        if samples is not None:
            self.finite_on_ranks = self._finite_since_batch
            self._finite_since_batch = True
        return acts

    def _share_window(self, strategy: Strategy) -> None:
        """Combine the gradients and the samples of the window with those of the other ranks."""
        window = self.window
        window.samples, window.discards, bad = strategy.close(
            self.parameters, window.samples, discards=window.discards, bad=self.guard.loss, sparse=self.sparse
        )
        window.weighted = True
        self._finite_since_batch = self._finite_since_batch and not window.discards
        if bad is not None and self.guarded:
            self.guard.record(bad)

    def _prepare_gradients(self) -> bool:
        """Scale the gradients to those of the mean loss, and clip them.

        Returns:
            False if they are known not to be finite.
        """
        parameters = with_dense_gradients(self.parameters) if self.sparse else self.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.scaler:
            # The scaler checks the gradients only, which may be finite although a loss is not.
            if self.guard.loss is not None and gradients:
                gradients[0].div_((1 - self.guard.loss).to(gradients[0].device))
            self.scaler.unscale_(self.optimizer)
        if gradients and (self.window.weighted or self.accum_grad > 1):
            samples = self.window.samples
            torch._foreach_div_(gradients, samples if type(samples) is Tensor else float(samples))
        norm = None
        judges_norm = self.grad_clip is not None or self.check_gradients
        if gradients and (judges_norm or self.measures_norm):
            norm = self.guard.norm_of(gradients, self.grad_norm_type)
            self.gradient_norm = norm
        # A scaler checks the gradients itself. Steps that it skips while it searches its scale
        # are not faults.
        judges = not self.scaler and (judges_norm or self.guard.loss is not None)
        if judges and not self.guard.allows_step(norm if judges_norm else None, self.parameters, gradients):
            return False
        if norm is not None and self.grad_clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.grad_clip, norm)
        if self.grad_clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.grad_clip_value)
        return True

    def average(self) -> None:
        """Scale the gradients of the open window to those of its mean loss on all ranks.

        Code that steps the optimizer itself needs such gradients.
        """
        window = self.window
        if self.strategy is not None:
            self._share_window(self.strategy)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and (window.weighted or self.accum_grad > 1):
            # Without samples the gradients are zeros, and a division by 0 would turn them into nan.
            samples = window.samples if type(window.samples) is Tensor else float(window.samples or 1)
            torch._foreach_div_(gradients, samples)
        window.samples = 1
        window.weighted = False
        window.averaged = True

    def leave_window(self, *, stepped: bool) -> None:
        """End a window that ``apply`` has not closed.

        Args:
            stepped: whether other code has stepped the optimizer; if not, the gradients wait for
                the next window.
        """
        window = self.window
        window.batches = 0
        window.averaged = False
        # The other code may keep the gradients, or they wait.
        self._mark_gradients(owned=not (stepped or window.samples))
        if stepped:
            self.last_batch = self.record.number
            if self.acts():
                self.last_update = self.last_batch
            self.real_step += 1
            window.samples = 0
            window.discards = False
            self.guard.close()

    def take_discarded_windows(self) -> int:
        """Return how many windows were discarded since the last call.

        On a GPU this waits for the work so far.
        """
        count = self.discarded_windows + self.guard.take_skipped()
        self.discarded_windows = 0
        return count

    # The learning rate.

    @abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the learning rate of an update, before ``ft_factor``.

        Args:
            real_step: the number of the window that closes, counted from 1.
            epoch_num: the current epoch, counted from 1.
        """

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Receive the numbers of a validation pass, for a schedule that depends on them.

        Args:
            metrics: name -> number.
        """

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the base group. The other groups keep their ratio to it."""
        base = self.base_lr
        for group, group_base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            new = rate if group_base == base else rate * group_base / base
            if type(group["lr"]) is Tensor:
                # A captured or compiled step reads this very tensor.
                group["lr"].fill_(new)
            else:
                group["lr"] = new

    def adopt_groups(self) -> None:
        """Accept the parameter groups that a plugin has made, with their rates as base rates."""
        if len(self.optimizer.param_groups) != len(self._base_rates):
            self._take_rates()
            self.configured = options_of(self.optimizer)

    def _take_rates(self) -> None:
        """Remember the present rates of the groups as their base rates."""
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.base_lr = float(self.optimizer.defaults["lr"]) if self._base_group else self._base_rates[0]
        if self.base_lr == 0 and any(self._base_rates) and not (self.constant and self.ft_factor == 1.0):
            rates = ", ".join(f"{rate:g}" for rate in self._base_rates)
            what = f"the base rate is 0, and the rates of the groups are {rates}"
            raise ConfigError(f"OptimScheduler: {what}; make it above 0, as the groups keep their ratio to it")

    def _checked_rate(self, value: Any, window: int) -> float:
        """Return the result of ``update_lr`` as a number.

        Raises:
            ConfigError: it is not a finite number of 0 or more.
        """
        value = without_numpy(value)
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        rate = float(value) if is_number else math.nan
        if not 0 <= rate < math.inf:
            what = f"{type(self).__name__}.update_lr returned {value!r} for window {window}"
            raise ConfigError(f"{what}; return a finite rate of 0 or more")
        return rate

    def _restore_rates(self, rates: Sequence[float | Tensor]) -> None:
        """Undo what a plugin has set for one update."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if type(group["lr"]) is Tensor:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # The state.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, scaler, schedule and the open window with its gradients."""
        window = self.window
        self.discarded_windows += self.guard.take_skipped()
        names = self.guard.names.items() if window.batches else ()
        return {
            "optimizer": optimizer_state_of(self.optimizer, self.configured),
            "groups": self._names_of_groups(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "accum_grad": self.accum_grad,
            "configured_accum_grad": self.configured_accum_grad,
            "window": {
                "real_step": self.real_step,
                "batches": window.batches,
                "samples": window.samples,
                "owns_gradients": self.owns_gradients,
                "discarded_windows": self.discarded_windows,
                "discards": window.discards or bool(self.guard.loss),
                "rate": None if self.rate is None else float(self.rate),
                "gradient_norm": None if self.gradient_norm is None else float(self.gradient_norm),
            },
            "schedule": self.schedule_state(),
            "gradients": {name: parameter.grad for name, parameter in names if parameter.grad is not None},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``. Options that the config has changed keep their new value.

        A state of SpeeChain, which has no position, can be loaded too: its callers give the
            position to each ``step``.

        Args:
            state_dict: what ``state_dict`` has returned.

        Raises:
            CheckpointError: the state has an open window of another length, or the groups of the
                optimizer have other parameters.
        """
        names = self._names_of_groups()
        if [*map(list, state_dict.get("groups", names))] != names:
            # Torch numbers the parameters, so it would give the moments to other parameters.
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
            # A plugin may have set another length, which stays.
            self.accum_grad = length
        elif self.window.batches and length != self.accum_grad:
            what = f"accum_grad: {length} -> {self.accum_grad}: has changed, and a window of accumulation is open"
            raise CheckpointError(f"{what}; set it back until the epoch is over, or resume one between two epochs")
        self.load_schedule_state(state_dict["schedule"])

    def _names_of_groups(self) -> list[list[str]]:
        """Return the names of the parameters in each group of the optimizer."""
        names = {parameter: name for name, parameter in self.guard.names.items()}
        return [[names.get(parameter, "?") for parameter in group["params"]] for group in self.optimizer.param_groups]

    def _load_window(self, state: WindowState) -> None:
        self.window.batches = state.batches
        self.window.samples = state.samples
        self.window.discards = state.discards
        self.real_step = state.real_step
        self.discarded_windows = state.discarded_windows
        self.rate = state.rate
        self.gradient_norm = state.gradient_norm
        self._mark_gradients(owned=state.owns_gradients)

    def schedule_state(self) -> dict[str, Any]:
        """Return the state of the schedule beyond step and epoch; most schedules have none."""
        return {}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Restore a ``schedule_state``."""


class Window:
    """The batches whose gradients are accumulated until the optimizer steps.

    Attributes:
        batches: how many batches there are.
        samples: how many samples they have; a tensor while a window closes that multiple GPUs
            share.
        discards: whether the window is discarded, as far as known.
        weighted: whether the gradients are sums over samples.
        averaged: whether the gradients are those of the mean loss already.
    """

    __slots__ = ("averaged", "batches", "discards", "samples", "weighted")

    def __init__(self) -> None:
        self.batches = 0
        self.samples: Any = 0
        self.discards = False
        self.weighted = False
        self.averaged = False


def update_scalers(optimizers: Sequence[WindowedOptimizer]) -> None:
    """Update each gradient scaler that has made a step.

    Args:
        optimizers: all optimizers that share these scalers.

    Raises:
        ConfigError: an open window has gradients of the present scale.
    """
    for scaler in {optimizer.scaler for optimizer in optimizers if optimizer.scaler and optimizer.stepped}:
        sharing = [optimizer for optimizer in optimizers if optimizer.scaler is scaler]
        if any(optimizer.window.batches for optimizer in sharing):
            factors = " and ".join(str(optimizer.accum_grad) for optimizer in sharing)
            what = f"OptimSchedulers with an accum_grad of {factors} share a GradScaler"
            raise ConfigError(f"{what}, whose scale would change within a window; give each a scaler of its own")
        scaler.update()
        for optimizer in sharing:
            optimizer.stepped = False
