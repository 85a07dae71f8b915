"""The schedules of the learning rate: constant, Noam, decay, warmup, plateau, and any of torch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from loguru import logger
from torch.optim import lr_scheduler

from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.optimizer_state import options_of
from pipeline.config.schema import too_short
from pipeline.errors import ConfigError, no_loss
from pipeline.optim.optim_scheduler import OptimScheduler
from pipeline.optim.planned_schedule import PlannedSchedule
from pipeline.user_code import class_path


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


class Noam(PlannedSchedule, OptimScheduler):
    """Rises linearly for ``warmup_steps`` windows, then falls with the root of their number (Vaswani et al. 2017).

    Args of the schedule:
        d_model: the model's width; the factor is then its inverse root. None: the peak is the base rate.
        warmup_steps: where the peak is; a float below 1 is a share of the training.
    """

    def sche_init(self, d_model: int | None = None, warmup_steps: float = 4000) -> None:
        """Take the width and the length of the rise."""
        if d_model is not None and (not isinstance(d_model, int) or d_model < 1):
            raise ConfigError(f"Noam: d_model is {d_model!r}; write the model's width, a whole number of 1 or more")
        self.is_open = _is_share(type(self).__name__, warmup_steps, 1)
        self.rise = self.warmup_steps = warmup_steps
        self.d_model = d_model

    @property
    def init_lr(self) -> float:
        """The factor of the curve."""
        return float(self.base_lr * self.warmup_steps**0.5 if self.d_model is None else self.d_model**-0.5)

    def take_length(self, steps: int) -> None:
        """The rise is its share of that."""
        self.warmup_steps = max(1, round(self.rise * steps))

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """``init_lr * min(step^-0.5, step * warmup^-1.5)``."""
        if self.warmup_steps < 1:
            raise _not_planned(type(self).__name__, "warmup_steps")
        return float(self.init_lr * min(real_step**-0.5, real_step * self.warmup_steps**-1.5))

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


class WarmupLinear(PlannedSchedule, OptimScheduler):
    """A linear rise to the base rate, then a linear fall to ``final`` of it until ``total_steps``, where it stays.

    Arguments: ``total_steps``, ``warmup_steps``, ``final``.
    """

    def sche_init(self, total_steps: int | None = None, warmup_steps: float = 0, final: float = 0.0) -> None:
        """Take the lengths, in windows, and the share of the base rate that is left at the end; None is the training's."""
        self.total_steps, self.final, self.is_open = total_steps, final, total_steps is None
        self.rise = self.warmup_steps = warmup_steps
        self.is_share = _is_share(type(self).__name__, warmup_steps, 0)
        if total_steps is not None:
            self.take_length(total_steps)

    def take_length(self, steps: int) -> None:
        """The rise, if it is a share, is one of that; the fall ends then."""
        # A share is below 1, whatever it is rounded to.
        rise = min(round(self.rise * steps), steps - 1) if self.is_share else self.rise
        if rise >= steps:
            lengths = f"warmup_steps is {rise} and total_steps {steps}"
            raise ConfigError(f"{type(self).__name__}: {lengths}; the rise must end before the total")
        self.total_steps, self.warmup_steps = steps, rise

    def remaining(self, share: float) -> float:
        """How much of the fall is left when ``share`` of it is over."""
        return 1 - share

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate on the rise, or on the fall."""
        if self.total_steps is None:
            raise _not_planned(type(self).__name__, "total_steps")
        if real_step < self.warmup_steps:
            return self.base_lr * real_step / self.warmup_steps
        over = min((real_step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.base_lr * (self.final + (1 - self.final) * self.remaining(over))


class WarmupCosine(WarmupLinear):
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
            raise ConfigError(f"Plateau: mode is {mode!r}, factor {factor}; write min or max, and one between 0 and 1")
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


# Schedules of torch that cannot do without the length of the training -> the argument that it is.
LENGTHS: dict[Any, str] = {lr_scheduler.OneCycleLR: "total_steps", lr_scheduler.CosineAnnealingLR: "T_max"}

# Those that change the momentum of the optimizer too.
_CYCLES = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)


class TorchSchedule(PlannedSchedule, OptimScheduler):
    """Any schedule of ``torch.optim.lr_scheduler`` that depends only on the number of its steps.

    OneCycleLR and CyclicLR change the momentum of the optimizer too, unless ``cycle_momentum`` is false.

    Args of the schedule:
        schedule: its class: ``CosineAnnealingLR``, or a class path.
        per: ``step`` (a window) or ``epoch``: what it is stepped for.
        args: its keyword arguments; ``total_steps`` of OneCycleLR and ``T_max`` of CosineAnnealingLR are by default the
            length of the training.
    """

    def sche_init(self, schedule: str | type[Any], per: str = "step", args: Mapping[str, Any] | None = None) -> None:
        """Build it with an optimizer of its own, so that its rate and ours do not multiply."""
        if per not in {"step", "epoch"}:
            raise ConfigError(f"TorchSchedule: per is {per!r}; write step or epoch")
        path = class_path.parse(schedule, module=class_path.LR_SCHEDULERS) if isinstance(schedule, str) else schedule
        schedule_class: Any = class_path.load_class(path, lr_scheduler.LRScheduler)
        if issubclass(schedule_class, lr_scheduler.ReduceLROnPlateau):
            raise ConfigError("TorchSchedule: ReduceLROnPlateau needs a metric; use Plateau")
        self.per, self.schedule_class, self.args = per, schedule_class, dict(args or {})
        length = self.args.get(LENGTHS.get(schedule_class, ""))
        is_open = length is None and not {"epochs", "steps_per_epoch"} <= self.args.keys()
        self.is_open = schedule_class in LENGTHS and is_open
        self.schedule: Any = None
        self._saved: Mapping[str, Any] = {}
        self._is_over = False
        if not self.is_open:
            self._build(self.args)

    def _build(self, args: Mapping[str, Any]) -> None:
        self.own_optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.base_lr)
        if issubclass(self.schedule_class, _CYCLES):
            # It looks whether there is a momentum to change, as there is in the real one.
            momentum = {name: value for name, value in self.optimizer.defaults.items() if name in ("momentum", "betas")}
            del self.own_optimizer.defaults["momentum"]
            self.own_optimizer.defaults.update(momentum)
            self.own_optimizer.param_groups[0].update(momentum)
        try:
            self.schedule = self.schedule_class(self.own_optimizer, **args)
        except ValueError as error:
            raise ConfigError(f"TorchSchedule: {self.schedule_class.__name__}: {error}; change its args") from error
        # So that torch does not warn of the order of the two.
        self.own_optimizer.step()
        self._fresh = self._state()

    def take_length(self, steps: int) -> None:
        """Build it with that, and go on from where it was."""
        self._build({**self.args, LENGTHS[self.schedule_class]: steps})
        self.load_schedule_state(self._saved)

    def check_length(self, steps: int) -> None:
        """Raise if the schedule has fewer steps than the training."""
        if self.steps is not None and steps > self.steps:
            kind = self.schedule_class.__name__
            raise ConfigError(too_short(kind, self.steps, steps, per_epoch=self.per == "epoch"))

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate of the schedule after as many steps as windows, or epochs, are over; that of its last from there on."""
        if self.schedule is None:
            raise _not_planned(type(self).__name__, LENGTHS[self.schedule_class])
        over = real_step if self.per == "step" else epoch_num
        if self.steps is not None and over > self.steps:
            if not self._is_over:
                kind = self.schedule_class.__name__
                logger.warning(f"{kind} has {self.steps} steps, and the training goes on; its last rate stays")
            over, self._is_over = self.steps, True
        while self.schedule.last_epoch < over - 1:
            self.schedule.step()
        [own] = self.own_optimizer.param_groups
        for group in self.optimizer.param_groups if getattr(self.schedule, "cycle_momentum", False) else ():
            if "betas" in group:
                group["betas"] = (own["betas"][0], *group["betas"][1:])
            else:
                group["momentum"] = own["momentum"]
        return float(own["lr"])

    @property
    def steps(self) -> int | None:
        """How many steps the schedule has; None if it has no end. Only OneCycleLR has one."""
        return self.schedule.total_steps if isinstance(self.schedule, lr_scheduler.OneCycleLR) else None

    def schedule_state(self) -> dict[str, Any]:
        """The state of the schedule, its rate, and its initial state."""
        if self.schedule is None:
            return dict(self._saved)
        return {**self._state(), "lr": self.own_optimizer.param_groups[0]["lr"], "configured": self._fresh}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; if its arguments have changed, it is stepped as often as before."""
        self._saved = state
        if self.schedule is None or any(differences(state.get("configured"), self._fresh)):
            return
        self.schedule.load_state_dict(state["schedule"])
        self.own_optimizer.param_groups[0].update(state["options"], lr=state["lr"])

    def _state(self) -> dict[str, Any]:
        """The state of the schedule, and the options that it has set in its optimizer."""
        [group] = options_of(self.own_optimizer)
        return {"schedule": copy.deepcopy(self.schedule.state_dict()), "options": group}


def _not_planned(kind: str, key: str) -> ConfigError:
    """Return the error for a schedule whose argument ``key`` needs a length that it was not given."""
    why = "depends on how long the training is, and only the default Runner says that"
    return ConfigError(f"{kind}: {key} {why}; write it as a number of steps")


def _is_share(kind: str, warmup_steps: float, least: int) -> bool:
    """Return whether a rise is a share of the training, and not a number of steps.

    Args:
        kind: the schedule, for messages.
        warmup_steps: the rise.
        least: the smallest number of steps.

    Raises:
        ConfigError: it is neither.
    """
    is_share = isinstance(warmup_steps, float)
    if is_share:
        is_valid = 0 <= warmup_steps < 1
        remedy = "write a whole number of steps, or a share of them, of 0 or more and below 1"
    else:
        is_valid = warmup_steps >= least
        remedy = f"it must be {least} or more"
    if not is_valid:
        raise ConfigError(f"{kind}: warmup_steps is {warmup_steps}; {remedy}")
    return is_share
