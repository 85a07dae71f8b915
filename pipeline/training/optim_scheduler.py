"""One optimizer and its learning rate. Names are SpeeChain's; the schedules are in ``schedules.py``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pipeline import class_path
from pipeline.checks.optimizer_check import OPTIMIZERS, optimizer_name
from pipeline.errors import ConfigError, one_of

Watcher = Callable[..., Any]


class OptimScheduler(ABC):
    """An optimizer over some of a model's parameters, the accumulation of their gradients, and a schedule of its rate.

    Losses reach it through ``optimize`` or ``step``. It gathers the gradients of ``accum_grad`` batches, a window, and
    then acts: once for ``step_per_update`` windows. A subclass says in ``update_lr`` what the rate is.

    Args:
        optim_type: the name of a class of torch.optim, the class path of another, or a class itself.
        optim_conf: its keyword arguments; ``lr`` is the base rate.
        model: whose trainable parameters are optimized.
        distributed: kept for SpeeChain's callers; whether processes share the work is the run's to know.
        optim_loss: the name of the loss that it descends; None is ``loss``.
        updated_modules: the dotted name of a part of the model, or several, to which it is confined; None is all of it.
        step_per_update: windows for each of its steps; in the others nothing is computed for it.
        use_amp: whether it takes the gradient scaler of a run in fp16, on a device that needs one.
        accum_grad: batches in a window.
        ft_factor: scales every rate.
        grad_clip: largest norm of the gradients of its own parameters; None does not clip.
        grad_norm_type: the p of that norm.
        sche_conf: passed on to ``sche_init``.

    Attributes:
        real_step: how many windows are closed.
        batches, samples: how many of each are in the open window.
        scaler: scales the loss in fp16; None elsewhere.
        check_gradients: whether to look for gradients that are not finite where nothing else does.

    Raises:
        ConfigError: an argument is out of range, a module is not there, or nothing in it is trained.

    SpeeChain clips the parameters of the whole model, writes one rate into every group, and lets its decay and
    ``ft_factor`` compound; here each is confined to the own parameters, group ratios stay, and rates scale the base.
    """

    def __init__(
        self,
        optim_type: str | type[Optimizer],
        optim_conf: Mapping[str, Any],
        model: nn.Module,
        distributed: bool = False,
        optim_loss: str | None = None,
        updated_modules: str | Iterable[str] | None = None,
        step_per_update: int = 1,
        use_amp: bool = True,
        accum_grad: int = 1,
        ft_factor: float = 1.0,
        grad_clip: float | None = 1.0,
        grad_norm_type: float = 2.0,
        **sche_conf: Any,
    ) -> None:
        _above_zero(step_per_update=step_per_update, accum_grad=accum_grad, ft_factor=ft_factor, grad_clip=grad_clip)
        self.loss_name = optim_loss or "loss"
        self.parameters = _trained(model, updated_modules)
        everything = [each for each in model.parameters() if each.requires_grad]
        self.owns_all = len(self.parameters) == len(everything)
        chosen = optimizer_name(optim_type)
        path = class_path.parse(chosen, module=OPTIMIZERS) if isinstance(chosen, str) else chosen
        self.optimizer: Optimizer = class_path.load_class(path, Optimizer)(self.parameters, **optim_conf)
        self.step_per_update = step_per_update
        self.use_amp = use_amp
        self.accum_grad = accum_grad
        self.ft_factor = ft_factor
        self.grad_clip = grad_clip
        self.grad_norm_type = grad_norm_type
        self.check_gradients = False
        self.scaler: GradScaler | None = None
        self.real_step = self.batches = self.samples = 0
        self.discards = False
        self.before_update: Watcher | None = None
        self.after_update: Watcher | None = None
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.sche_init(**sche_conf)

    @property
    def base_lr(self) -> float:
        """The rate that ``optim_conf`` gives, of the first group."""
        return self._base_rates[0]

    @abstractmethod
    def sche_init(self, *args: Any, **sche_conf: Any) -> None:
        """Take the arguments of the schedule."""

    @abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate for a window, counted from 1, in an epoch, counted from 1."""

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Learn the numbers of a validation pass; for a schedule that depends on them."""

    def acts(self) -> bool:
        """Whether it will step at the end of the open window; else nothing need be computed for it."""
        return self.step_per_update == 1 or (self.real_step + 1) % self.step_per_update == 0

    def step(
        self,
        losses: Mapping[str, Tensor],
        time_func: Any = None,
        optim_name: str = "main",
        step_num: int | None = None,
        epoch_num: int = 1,
        logger: Any = None,
    ) -> bool:
        """Train on the losses of one batch, by hand: ``optimize(losses, [self])``.

        Args:
            losses: name -> scalar.
            time_func: ``time_func(names)`` gives a block in which the time is measured; None measures nothing.
            optim_name: how the times are named.
            step_num: the batch, counted from 1; it says where in its window the batch is. None counts on.
            epoch_num: counted from 1.
            logger: not needed; SpeeChain's callers give one.

        Returns:
            Whether the loss was finite.
        """
        from pipeline.training.optimize import optimize  # noqa: PLC0415 - it is built on this class

        if step_num is not None:
            self.real_step, self.batches = divmod(step_num - 1, self.accum_grad)
        if time_func is None:
            return optimize(losses, [self], epoch_num - 1)[0]
        with time_func(["optim_time", optim_name]):
            return optimize(losses, [self], epoch_num - 1)[0]

    def apply(self, epoch: int) -> bool:
        """Close the window: unscale, guard, clip, set the rate, step, and forget the gradients; ``epoch`` is from 0.

        Returns:
            Whether it acted, be it that the window was discarded.
        """
        acts = self.acts()
        self.real_step += 1
        if acts:
            if self.before_update:
                self.before_update(optim_scheduler=self)
            if not self.discards and self._prepare():
                self.set_rate(self.ft_factor * self.update_lr(self.real_step, epoch + 1))
                self._step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.after_update:
                self.after_update(optim_scheduler=self)
        self.batches = self.samples = 0
        self.discards = False
        return acts

    def _prepare(self) -> bool:
        """Make the gradients those of the mean loss, clipped; False where they are not finite and nobody else looks."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.accum_grad > 1:
            torch._foreach_div_(self._gradients(), float(self.samples))
        if self.grad_clip is None and not self.check_gradients:
            return True
        limit = math.inf if self.grad_clip is None else self.grad_clip
        norm = nn.utils.clip_grad_norm_(self.parameters, limit, self.grad_norm_type)
        # Reads one number a window; the scaler looks for itself, on the device.
        return bool(self.scaler) or math.isfinite(norm.item())

    def _gradients(self) -> list[Tensor]:
        return [each.grad for each in self.parameters if each.grad is not None]

    def _step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def set_rate(self, rate: float) -> None:
        """Make ``rate`` that of the first group; the others keep their ratio to it."""
        base = self._base_rates[0]
        for group, own in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate if own == base else rate * own / base

    def get_lr(self) -> float:
        """The rate of the first group now."""
        rate = self.optimizer.param_groups[0]["lr"]
        return float(rate.item()) if isinstance(rate, Tensor) else float(rate)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scaler and the place in the schedule. Gradients of an open window are the caller's to keep."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "window": {"real_step": self.real_step, "batches": self.batches, "samples": self.samples},
            "schedule": self.schedule_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of another, as ``state_dict`` gave it."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.scaler and state_dict["scaler"]:
            self.scaler.load_state_dict(state_dict["scaler"])
        for name, value in state_dict["window"].items():
            setattr(self, name, value)
        self.load_schedule_state(state_dict["schedule"])

    def schedule_state(self) -> dict[str, Any]:
        """What the schedule knows beyond the step and epoch; most know nothing."""
        return {}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        """Take what ``schedule_state`` gave."""

    def extra_repr_fn(self) -> str:
        """What a subclass adds to the description."""
        return ""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(optimizer={type(self.optimizer).__name__}, loss={self.loss_name}, "
            f"parameters={len(self.parameters)}, accum_grad={self.accum_grad}, step_per_update={self.step_per_update}, "
            f"grad_clip={self.grad_clip}, lr={self.get_lr():g}{self.extra_repr_fn()})"
        )


def _above_zero(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            remedy = "; None does not clip" if name == "grad_clip" else ""
            raise ConfigError(f"OptimScheduler: {name} is {value}; it must be above 0{remedy}")


def _trained(model: nn.Module, updated_modules: str | Iterable[str] | None) -> list[nn.Parameter]:
    """The trainable parameters of the whole model, or of some parts of it; each once."""
    names = [updated_modules] if isinstance(updated_modules, str) else updated_modules
    parts = {"": model} if names is None else {name: _part(model, name) for name in names}
    found = {id(each): each for part in parts.values() for each in part.parameters() if each.requires_grad}
    if not found:
        where = f"{type(model).__name__}{''.join(f' ({name})' for name in parts if name)}"
        raise ConfigError(f"{where} has no parameter that is trained; set requires_grad on some, or do not train it")
    return list(found.values())


def _part(model: nn.Module, name: str) -> nn.Module:
    """A submodule; a compiled module in the way is looked through."""
    part = model
    for each in name.split("."):
        part = getattr(part, "_orig_mod", part)
        below = dict(part.named_children())
        if each not in below:
            raise ConfigError(f"updated_modules: {type(model).__name__} has no part '{name}'{one_of(each, below)}")
        part = below[each]
    return part
