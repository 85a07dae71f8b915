"""Learning rate schedules: constant, Noam, decay, warmup, plateau, and the schedules of torch."""

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
    """A rate that stays as ``optim_conf`` sets it, or as code sets it in the optimizer.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> scheduler = Constant("SGD", {"lr": 0.1}, model)
        >>> scheduler.step(model(torch.ones(4, 2)).mean())
        True
        >>> scheduler.get_lr()
        0.1
    """

    constant: ClassVar[bool] = True

    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Refuse any argument.

        Raises:
            ConfigError: there is one.
        """
        if args or sche_conf:
            arguments = ", ".join([*map(str, args), *sche_conf])
            raise ConfigError(f"a constant rate takes no arguments, and was given {arguments}; remove them")

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the base rate."""
        return self.base_lr


class Noam(PlannedSchedule, OptimScheduler):
    """A rate that rises linearly, then falls with the inverse root of the number of windows.

    It is the schedule of Vaswani et al. 2017.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> scheduler = Noam("Adam", {"lr": 0.1}, model, warmup_steps=4)
        >>> [round(scheduler.update_lr(step, 1), 4) for step in (1, 2, 4, 16)]
        [0.025, 0.05, 0.1, 0.05]

    Args of the schedule:
        d_model: the width of the model, whose inverse root is then the factor of the curve. With
            None, the peak is the base rate.
        warmup_steps: the window of the peak; a float below 1 is a share of the training.
    """

    def sche_init(self, d_model: int | None = None, warmup_steps: float = 4000) -> None:
        """Take the width and the length of the rise.

        Raises:
            ConfigError: one of them is out of range.
        """
        if d_model is not None and (not isinstance(d_model, int) or d_model < 1):
            raise ConfigError(f"Noam: d_model is {d_model!r}; write the model's width, a whole number of 1 or more")
        self.is_open = _is_share(type(self).__name__, warmup_steps, 1)
        self.rise = warmup_steps
        self.warmup_steps = warmup_steps
        self.d_model = d_model

    @property
    def init_lr(self) -> float:
        """The factor of the curve."""
        return float(self.base_lr * self.warmup_steps**0.5 if self.d_model is None else self.d_model**-0.5)

    def take_length(self, steps: int) -> None:
        """Set the rise to its share of ``steps`` windows."""
        self.warmup_steps = max(1, round(self.rise * steps))

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return ``init_lr * min(step^-0.5, step * warmup^-1.5)``.

        Raises:
            ConfigError: the rise is a share of the training, whose length is not known.
        """
        if self.warmup_steps < 1:
            raise _not_planned(type(self).__name__, "warmup_steps")
        return float(self.init_lr * min(real_step**-0.5, real_step * self.warmup_steps**-1.5))

    def extra_repr_fn(self) -> str:
        """Return the length of the rise."""
        return f", warmup_steps={self.warmup_steps}"


class ExponentialDecay(OptimScheduler):
    """A rate that falls by a factor after each epoch: ``base * decay_factor^(epoch - 1)``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> scheduler = ExponentialDecay("SGD", {"lr": 0.1}, model, decay_factor=0.5)
        >>> [scheduler.update_lr(1, epoch) for epoch in (1, 2, 3)]
        [0.1, 0.05, 0.025]

    Args of the schedule:
        decay_factor: above 0, and at most 1.
    """

    def sche_init(self, decay_factor: float = 0.999) -> None:
        """Take the factor.

        Raises:
            ConfigError: it is out of range.
        """
        if not 0 < decay_factor <= 1:
            raise ConfigError(f"ExponentialDecay: decay_factor is {decay_factor}; write one above 0, and at most 1")
        self.decay_factor = decay_factor

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the base rate, decayed once for each finished epoch."""
        return float(self.base_lr * self.decay_factor ** (epoch_num - 1))


class WarmupLinear(PlannedSchedule, OptimScheduler):
    """A rate that rises linearly to the base rate, then falls linearly to a share of it.

    After ``total_steps`` it stays there.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> scheduler = WarmupLinear("SGD", {"lr": 0.1}, model, total_steps=6, warmup_steps=2)
        >>> [round(scheduler.update_lr(step, 1), 3) for step in (1, 2, 4, 6, 7)]
        [0.05, 0.1, 0.05, 0.0, 0.0]

    Args of the schedule:
        total_steps: the number of the window that ends the fall; None is the length of the
            training.
        warmup_steps: the number of the window that ends the rise; a float below 1 is a share of the
            total.
        final: the share of the base rate that is left at the end.
    """

    def sche_init(self, total_steps: int | None = None, warmup_steps: float = 0, final: float = 0.0) -> None:
        """Take the lengths, in windows, and the share of the base rate that is left at the end.

        Raises:
            ConfigError: ``warmup_steps`` is out of range.
        """
        self.total_steps = total_steps
        self.final = final
        self.is_open = total_steps is None
        self.rise = warmup_steps
        self.warmup_steps = warmup_steps
        self.is_share = _is_share(type(self).__name__, warmup_steps, 0)
        if total_steps is not None:
            self.take_length(total_steps)

    def take_length(self, steps: int) -> None:
        """Set the end of the fall to window ``steps``, and a rise that is a share to its share.

        Raises:
            ConfigError: the rise does not end before the fall.
        """
        # A share is below 1, whatever it is rounded to.
        rise = min(round(self.rise * steps), steps - 1) if self.is_share else self.rise
        if rise >= steps:
            lengths = f"warmup_steps is {rise} and total_steps {steps}"
            raise ConfigError(f"{type(self).__name__}: {lengths}; the rise must end before the total")
        self.total_steps = steps
        self.warmup_steps = rise

    def remaining(self, share: float) -> float:
        """Return how much of the fall is left when ``share`` of it is over, both from 0 to 1."""
        return 1 - share

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the rate on the rise or on the fall.

        Raises:
            ConfigError: the length of the training is not known.
        """
        if self.total_steps is None:
            raise _not_planned(type(self).__name__, "total_steps")
        if real_step < self.warmup_steps:
            return self.base_lr * real_step / self.warmup_steps
        over = min((real_step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.base_lr * (self.final + (1 - self.final) * self.remaining(over))


class WarmupCosine(WarmupLinear):
    """A rate that rises linearly, then falls along half a cosine (Loshchilov and Hutter 2017).

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> scheduler = WarmupCosine("SGD", {"lr": 0.1}, model, total_steps=6, warmup_steps=2)
        >>> [round(scheduler.update_lr(step, 1), 3) for step in (1, 2, 4, 6)]
        [0.05, 0.1, 0.05, 0.0]

    The schedule has the arguments of ``WarmupLinear``.
    """

    def remaining(self, share: float) -> float:
        """Return ``(1 + cos(pi * share)) / 2``."""
        return (1 + math.cos(math.pi * share)) / 2


class Plateau(OptimScheduler):
    """A rate that falls by ``factor`` when a number of the validation stops improving.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> scheduler = Plateau("SGD", {"lr": 0.1}, model, patience=1, factor=0.5)
        >>> for loss in (0.9, 0.8, 0.8, 0.8):
        ...     scheduler.take_metrics({"valid_loss": loss})
        >>> scheduler.update_lr(1, 1)
        0.05

    Args of the schedule:
        metric: the name of the number, as the validation reports it, such as ``valid_loss``.
        mode: ``min`` or ``max``, whichever is better.
        factor: the factor of the rate, between 0 and 1.
        patience: the rate falls after more passes than this without an improvement.
        min_lr: the lowest rate.
    """

    def sche_init(
        self,
        metric: str = "valid_loss",
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        min_lr: float = 0.0,
    ) -> None:
        """Take what to watch, and how to react.

        Raises:
            ConfigError: ``mode`` or ``factor`` is out of range.
        """
        if mode not in {"min", "max"} or not 0 < factor < 1:
            raise ConfigError(f"Plateau: mode is {mode!r}, factor {factor}; write min or max, and one between 0 and 1")
        self.metric = metric
        self.mode = mode
        self.factor = factor
        self.patience = patience
        self.min_lr = min_lr
        self.best = math.inf if mode == "min" else -math.inf
        self.bad = 0
        self.scale = 1.0

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Compare the number with the best one so far. A nan is not an improvement.

        Args:
            metrics: name -> number of a validation pass.

        Raises:
            ConfigError: the validation does not report the number.
        """
        if self.metric not in metrics:
            known = ", ".join(metrics) or "nothing"
            why = no_loss(self.metric, metrics) or "; name one of those"
            raise ConfigError(f"Plateau watches '{self.metric}', and the validation reports {known}{why}")
        value = metrics[self.metric]
        is_better = value < self.best if self.mode == "min" else value > self.best
        if is_better:
            self.best = value
            self.bad = 0
        else:
            self.bad += 1
        if self.bad > self.patience:
            self.scale *= self.factor
            self.bad = 0

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the base rate after the falls so far."""
        return max(self.base_lr * self.scale, self.min_lr)

    def schedule_state(self) -> dict[str, Any]:
        """Return the best number so far, the passes since then, and the factor of all falls."""
        return {"best": self.best, "bad": self.bad, "scale": self.scale}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Restore a ``schedule_state``."""
        self.best = state["best"]
        self.bad = state["bad"]
        self.scale = state["scale"]


# Schedules of torch that need the length of the training -> the argument for it.
LENGTHS: dict[Any, str] = {lr_scheduler.OneCycleLR: "total_steps", lr_scheduler.CosineAnnealingLR: "T_max"}

# Schedules of torch that also change the momentum of the optimizer.
_CYCLES = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)


class TorchSchedule(PlannedSchedule, OptimScheduler):
    """A schedule of ``torch.optim.lr_scheduler`` that depends only on the number of its steps.

    OneCycleLR and CyclicLR also change the momentum of the optimizer, unless ``cycle_momentum`` is
    false.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> args = {"step_size": 2, "gamma": 0.5}
        >>> scheduler = TorchSchedule("SGD", {"lr": 0.1}, model, schedule="StepLR", args=args)
        >>> [scheduler.update_lr(step, 1) for step in (1, 2, 3)]
        [0.1, 0.1, 0.05]

    Args of the schedule:
        schedule: its class, the name of a class of torch such as ``CosineAnnealingLR``, or a class
            path.
        per: the unit of its steps: ``step``, which is a window, or ``epoch``.
        args: its keyword arguments. ``total_steps`` of OneCycleLR and ``T_max`` of
            CosineAnnealingLR are by default the length of the training.
    """

    def sche_init(self, schedule: str | type[Any], per: str = "step", args: Mapping[str, Any] | None = None) -> None:
        """Build the schedule with a separate optimizer, so that two rates are not multiplied.

        Raises:
            ConfigError: an argument is wrong, or the schedule needs a metric.
        """
        if per not in {"step", "epoch"}:
            raise ConfigError(f"TorchSchedule: per is {per!r}; write step or epoch")
        path = class_path.parse(schedule, module=class_path.LR_SCHEDULERS) if isinstance(schedule, str) else schedule
        schedule_class: Any = class_path.load_class(path, lr_scheduler.LRScheduler)
        if issubclass(schedule_class, lr_scheduler.ReduceLROnPlateau):
            raise ConfigError("TorchSchedule: ReduceLROnPlateau needs a metric; use Plateau")
        self.per = per
        self.schedule_class = schedule_class
        self.args = dict(args or {})
        length = self.args.get(LENGTHS.get(schedule_class, ""))
        lacks_length = length is None and not {"epochs", "steps_per_epoch"} <= self.args.keys()
        self.is_open = schedule_class in LENGTHS and lacks_length
        self.schedule: Any = None
        self._saved: Mapping[str, Any] = {}
        self._is_over = False
        if not self.is_open:
            self._build(self.args)

    def _build(self, args: Mapping[str, Any]) -> None:
        self.own_optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.base_lr)
        if issubclass(self.schedule_class, _CYCLES):
            # The schedule checks whether there is a momentum to change, as there may be in the real
            # optimizer.
            momentum = {name: value for name, value in self.optimizer.defaults.items() if name in ("momentum", "betas")}
            del self.own_optimizer.defaults["momentum"]
            self.own_optimizer.defaults.update(momentum)
            self.own_optimizer.param_groups[0].update(momentum)
        try:
            self.schedule = self.schedule_class(self.own_optimizer, **args)
        except ValueError as error:
            raise ConfigError(f"TorchSchedule: {self.schedule_class.__name__}: {error}; change its args") from error
        # Torch warns if the schedule steps before the optimizer.
        self.own_optimizer.step()
        self._fresh = self._state()

    def take_length(self, steps: int) -> None:
        """Build the schedule with the length of the training, and continue where it was."""
        self._build({**self.args, LENGTHS[self.schedule_class]: steps})
        self.load_schedule_state(self._saved)

    def check_length(self, steps: int) -> None:
        """Raise if the schedule has fewer steps than the training.

        Raises:
            ConfigError: it has.
        """
        if self.steps is not None and steps > self.steps:
            kind = self.schedule_class.__name__
            raise ConfigError(too_short(kind, self.steps, steps, per_epoch=self.per == "epoch"))

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """Return the rate of the schedule after as many steps as windows, or epochs, are over.

        After the last step of the schedule its rate stays.

        Raises:
            ConfigError: the length of the training is not known.
        """
        if self.schedule is None:
            raise _not_planned(type(self).__name__, LENGTHS[self.schedule_class])
        over = real_step if self.per == "step" else epoch_num
        if self.steps is not None and over > self.steps:
            if not self._is_over:
                kind = self.schedule_class.__name__
                logger.warning(f"{kind} has {self.steps} steps, and the training goes on; its last rate stays")
            over = self.steps
            self._is_over = True
        while self.schedule.last_epoch < over - 1:
            self.schedule.step()
        [options] = self.own_optimizer.param_groups
        if getattr(self.schedule, "cycle_momentum", False):
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (options["betas"][0], *group["betas"][1:])
                else:
                    group["momentum"] = options["momentum"]
        return float(options["lr"])

    @property
    def steps(self) -> int | None:
        """How many steps the schedule has; None if it has no end. Only OneCycleLR has an end."""
        return self.schedule.total_steps if isinstance(self.schedule, lr_scheduler.OneCycleLR) else None

    def schedule_state(self) -> dict[str, Any]:
        """Return the state of the schedule, its rate, and its initial state."""
        if self.schedule is None:
            return dict(self._saved)
        return {**self._state(), "lr": self.own_optimizer.param_groups[0]["lr"], "configured": self._fresh}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Restore a ``schedule_state``.

        If the arguments have changed, ``update_lr`` steps a new schedule as often as the saved one.
        """
        self._saved = state
        if self.schedule is None or any(differences(state.get("configured"), self._fresh)):
            return
        self.schedule.load_state_dict(state["schedule"])
        self.own_optimizer.param_groups[0].update(state["options"], lr=state["lr"])

    def _state(self) -> dict[str, Any]:
        """Return the state of the schedule, and the options that it has set in its optimizer."""
        [options] = options_of(self.own_optimizer)
        return {"schedule": copy.deepcopy(self.schedule.state_dict()), "options": options}


def _not_planned(kind: str, key: str) -> ConfigError:
    """Return the error for a schedule that needs the length of the training, which is not known.

    Args:
        kind: the class of the schedule.
        key: the argument that depends on the length.
    """
    why = "depends on how long the training is, and only the default Runner says that"
    return ConfigError(f"{kind}: {key} {why}; write it as a number of steps")


def _is_share(kind: str, warmup_steps: float, least: int) -> bool:
    """Return whether a rise is a share of the training, and not a number of steps.

    Args:
        kind: the class of the schedule, for messages.
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
