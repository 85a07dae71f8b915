"""One optimizer and its learning rate. Names are SpeeChain's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline import class_path
from pipeline.errors import ConfigError
from pipeline.optimizer_check import OPTIMIZERS, optimizer_name


class OptimScheduler(ABC):
    """An optimizer over a model's parameters, with a schedule of its learning rate.

    A subclass says in ``update_lr`` what the rate is.

    Args:
        optim_type: the name of a class of torch.optim, the class path of another, or a class itself.
        optim_conf: its keyword arguments; ``lr`` is the base rate.
        model: whose trainable parameters are optimized.
        grad_clip: largest norm of their gradients; None does not clip.
        grad_norm_type: the p of that norm.
        sche_conf: passed on to ``sche_init``.

    Attributes:
        real_step: how many steps it has made.
    """

    def __init__(
        self,
        optim_type: str | type[Optimizer],
        optim_conf: Mapping[str, Any],
        model: nn.Module,
        grad_clip: float | None = 1.0,
        grad_norm_type: float = 2.0,
        **sche_conf: Any,
    ) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError(
                f"{type(model).__name__} has no parameter that is trained; set requires_grad on some, or do not train it"
            )
        chosen = optimizer_name(optim_type)
        path = class_path.parse(chosen, module=OPTIMIZERS) if isinstance(chosen, str) else chosen
        self.optimizer: Optimizer = class_path.load_class(path, Optimizer)(self.parameters, **optim_conf)
        self.grad_clip = grad_clip
        self.grad_norm_type = grad_norm_type
        self.real_step = 0
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.sche_init(**sche_conf)

    @abstractmethod
    def sche_init(self, **sche_conf: Any) -> None:
        """Take the arguments of the schedule."""

    @abstractmethod
    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The rate for a step, counted from 1, in an epoch, counted from 1."""

    def apply(self, epoch: int) -> None:
        """Clip the gradients, set the rate, step, and forget the gradients; ``epoch`` counts from 0."""
        if self.grad_clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.grad_clip, self.grad_norm_type)
        self.real_step += 1
        self._set_rate(self.update_lr(self.real_step, epoch + 1))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _set_rate(self, rate: float) -> None:
        """Scale every group alike, so that their ratios stay."""
        base = self._base_rates[0]
        for group, own in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate if own == base else rate * own / base

    def get_lr(self) -> float:
        """The rate of the first group now."""
        rate = self.optimizer.param_groups[0]["lr"]
        return float(rate.item()) if isinstance(rate, torch.Tensor) else float(rate)


class Constant(OptimScheduler):
    """The rate stays what ``optim_conf`` says."""

    def sche_init(self, **sche_conf: Any) -> None:
        """Takes no arguments."""
        if sche_conf:
            raise ConfigError(f"a constant rate takes no arguments, and was given {', '.join(sche_conf)}; remove them")

    def update_lr(self, real_step: int, epoch_num: int) -> float:
        """The base rate."""
        return float(self._base_rates[0])
