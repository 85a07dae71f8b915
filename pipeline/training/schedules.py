"""The schedules of the learning rate: constant, Noam, decay, warmup, plateau, and any of torch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim import lr_scheduler

from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.parts import options_of
from pipeline.errors import ConfigError, no_loss
from pipeline.training.optim_scheduler import OptimScheduler
from pipeline.user_code import class_path
from pipeline.user_code.class_path import LR_SCHEDULERS


class Constant(OptimScheduler):
    """The rate stays as ``optim_conf`` sets it, or as code sets it in the optimizer."""

    constant: ClassVar[bool] = True

    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Takes no arguments."""
        if args or sche_conf:
            arguments = ", ".join([*map(str, args), *sche_conf])
            raise ConfigError(f"a constant rate takes no arguments, and was given {arguments}; remove them")

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The base rate."""
        return self.base_lr


class Noam(OptimScheduler):
    """Rises linearly for ``warmup_steps`` windows, then falls with the root of their number (Vaswani et al. 2017).

    Args of the schedule:
        d_model: the model's width; the factor is then its inverse root. None: the peak is the base rate.
        warmup_steps: where the peak is.
    """

    def sche_init(self, d_model: int | None = None, warmup_steps: int = 4000) -> None:
        """Take the width and the length of the rise."""
        if warmup_steps < 1:
            raise ConfigError(f"Noam: warmup_steps is {warmup_steps}; it must be above 0")
        self.warmup_steps = warmup_steps
        self.factor = self.base_lr * math.sqrt(warmup_steps) if d_model is None else 1 / math.sqrt(d_model)

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """``factor * min(step^-0.5, step * warmup^-1.5)``."""
        return float(self.factor * min(real_step**-0.5, real_step * self.warmup_steps**-1.5))

    def extra_repr_fn(self) -> str:
        """The length of the rise."""
        return f", warmup_steps={self.warmup_steps}"


class ExponentialDecay(OptimScheduler):
    """Falls by a factor each epoch: ``base * decay_factor^(epoch - 1)``."""

    def sche_init(self, decay_factor: float = 0.999) -> None:
        """Take the factor."""
        if not 0 < decay_factor <= 1:
            raise ConfigError(f"ExponentialDecay: decay_factor is {decay_factor}; write one above 0, and at most 1")
        self.decay_factor = decay_factor

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The base rate, decayed once for each epoch that is over."""
        return float(self.base_lr * self.decay_factor ** (epoch_num - 1))


class _Warmup(OptimScheduler):
    """Rises linearly to the base rate, then falls to ``final`` of it until ``total_steps``, and stays there."""

    def sche_init(self, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> None:
        """Take the lengths, in windows, and the share of the base rate that is left at the end."""
        if not 0 <= warmup_steps < total_steps:
            lengths = f"warmup_steps is {warmup_steps} and total_steps {total_steps}"
            raise ConfigError(f"{type(self).__name__}: {lengths}; the rise must end before the total")
        self.total_steps, self.warmup_steps, self.final = total_steps, warmup_steps, final

    def remaining(self, share: float) -> float:
        """How much of the fall is left when ``share`` of it is over."""
        raise NotImplementedError

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate on the rise, or on the fall."""
        if real_step < self.warmup_steps:
            return self.base_lr * real_step / self.warmup_steps
        over = min((real_step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.base_lr * (self.final + (1 - self.final) * self.remaining(over))


class WarmupLinear(_Warmup):
    """A linear rise, then a linear fall. Arguments: ``total_steps``, ``warmup_steps``, ``final``."""

    def remaining(self, share: float) -> float:
        """``1 - share``."""
        return 1 - share


class WarmupCosine(_Warmup):
    """A linear rise, then half a cosine (Loshchilov and Hutter 2017). Arguments: ``total_steps``, ``warmup_steps``, ``final``."""

    def remaining(self, share: float) -> float:
        """``(1 + cos(pi * share)) / 2``."""
        return (1 + math.cos(math.pi * share)) / 2


class Plateau(OptimScheduler):
    """Falls by ``factor`` when a number of the validation has not improved for more than ``patience`` passes.

    Args of the schedule:
        metric: its name, as the validation reports it: ``valid_loss``.
        mode: ``min`` or ``max``: which is better.
        factor: what the rate is multiplied by.
        patience: passes without an improvement that are borne.
        min_lr: the rate below which it does not fall.
    """

    def sche_init(
        self,
        metric: str = "valid_loss",
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        min_lr: float = 0.0,
    ) -> None:
        """Take what to watch, and how to react."""
        if mode not in {"min", "max"} or not 0 < factor < 1:
            what = f"mode is {mode!r} and factor {factor}"
            raise ConfigError(f"Plateau: {what}; write min or max, and one between 0 and 1")
        self.metric, self.mode, self.factor, self.patience, self.min_lr = metric, mode, factor, patience, min_lr
        self.best = math.inf if mode == "min" else -math.inf
        self.bad, self.scale = 0, 1.0

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far; nan is no improvement."""
        if self.metric not in metrics:
            known, why = ", ".join(metrics) or "nothing", no_loss(self.metric, metrics) or "; name one of those"
            raise ConfigError(f"Plateau watches '{self.metric}', and the validation reports {known}{why}")
        value = metrics[self.metric]
        better = value < self.best if self.mode == "min" else value > self.best
        self.best, self.bad = (value, 0) if better else (self.best, self.bad + 1)
        if self.bad > self.patience:
            self.scale, self.bad = self.scale * self.factor, 0

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The base rate after the falls so far."""
        return max(self.base_lr * self.scale, self.min_lr)

    def schedule_state(self) -> dict[str, Any]:
        """The best so far, how long ago, and the falls."""
        return {"best": self.best, "bad": self.bad, "scale": self.scale}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.best, self.bad, self.scale = state["best"], state["bad"], state["scale"]


class TorchSchedule(OptimScheduler):
    """Any schedule of ``torch.optim.lr_scheduler`` that depends only on the number of its steps.

    Args of the schedule:
        schedule: its class: ``CosineAnnealingLR``, or a class path.
        per: ``step`` (a window) or ``epoch``: what it is stepped for.
        args: its keyword arguments.
    """

    def sche_init(self, schedule: str | type[Any], per: str = "step", args: Mapping[str, Any] | None = None) -> None:
        """Build it with an optimizer of its own, so that its rate and ours do not multiply."""
        if per not in {"step", "epoch"}:
            raise ConfigError(f"TorchSchedule: per is {per!r}; write step or epoch")
        path = class_path.parse(schedule, module=LR_SCHEDULERS) if isinstance(schedule, str) else schedule
        schedule_class: Any = class_path.load_class(path, lr_scheduler.LRScheduler)
        if issubclass(schedule_class, lr_scheduler.ReduceLROnPlateau):
            raise ConfigError("TorchSchedule: ReduceLROnPlateau needs a metric; use Plateau")
        self.per = per
        self.own_optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.base_lr)
        self.schedule = schedule_class(self.own_optimizer, **(args or {}))
        if getattr(self.schedule, "cycle_momentum", False):
            kind = type(self.schedule).__name__
            raise ConfigError(f"TorchSchedule: cycle_momentum of {kind} would be ignored; set cycle_momentum: false")
        # So that torch does not warn of the order of the two.
        self.own_optimizer.step()
        self._fresh = self._state()

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate of the schedule after as many steps as windows, or epochs, are over."""
        over = real_step if self.per == "step" else epoch_num
        while self.schedule.last_epoch < over - 1:
            self.schedule.step()
        return float(self.own_optimizer.param_groups[0]["lr"])

    @property
    def steps(self) -> int | None:
        """How many steps the schedule has; None if it has no end. Only OneCycleLR has one."""
        return self.schedule.total_steps if isinstance(self.schedule, lr_scheduler.OneCycleLR) else None

    def schedule_state(self) -> dict[str, Any]:
        """The state of the schedule, its rate, and its initial state."""
        return {**self._state(), "lr": self.own_optimizer.param_groups[0]["lr"], "configured": self._fresh}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; if its arguments have changed, it is stepped as often as before."""
        if any(differences(state.get("configured"), self._fresh)):
            return
        self.schedule.load_state_dict(state["schedule"])
        self.own_optimizer.param_groups[0]["lr"] = state["lr"]

    def _state(self) -> dict[str, Any]:
        """The state of the schedule, and the options that it has set in its optimizer."""
        [group] = options_of(self.own_optimizer)
        return {"schedule": copy.deepcopy(self.schedule.state_dict()), "options": group}
