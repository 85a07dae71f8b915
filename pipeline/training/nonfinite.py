"""Losses and gradients that are not finite: kept from the weights, counted, and the end of a training that diverged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.errors import DivergedError
from pipeline.training.meters import Meter


class NonFiniteGuard:
    """Says of each window of an optimizer whether its gradients may be used, and counts those that may not.

    On a CPU, and for an optimizer that cannot skip a step by itself, this reads one number a window. A fused optimizer
    on a GPU is told by ``found_inf``, as a gradient scaler does it, and nobody waits.

    Args:
        optimizer: the one that steps.
        names: name -> parameter of it, for messages.

    Attributes:
        loss: on a GPU, 1 where a loss of the open window is not finite, at its close a gradient too, else 0; None: not
            looked at.
        discarded: windows discarded for their gradients since it was last set to 0, as far as they are read.
        parameter: the first parameter with such a gradient; ``""`` while there is none.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.names = names
        self.loss: Tensor | None = None
        self.discarded = 0
        self.parameter = ""
        self._on_device: tuple[Tensor, Tensor, Sequence[Tensor]] | None = None

    def note_loss(self, loss: Tensor) -> None:
        """Look at a loss on a GPU, without reading it."""
        bad = (~loss.detach().isfinite()).float()
        self.loss = bad if self.loss is None else torch.maximum(self.loss, bad)

    def passes(self, norm: Tensor | None, parameters: Sequence[Tensor]) -> bool:
        """Whether the optimizer may be called; it may where it skips the step by itself.

        Args:
            norm: of all the gradients; None where nobody asked for it.
            parameters: of the optimizer, with a gradient or without.
        """
        if norm is not None and norm.is_cpu and self.loss is None:
            # Reads one number a window: gradients that are not finite must not reach the weights.
            return math.isfinite(norm.item()) or self._discard(parameters)
        bad = self.loss = self.loss if norm is None else self._on_gpu(norm, parameters)
        if bad is None:
            return True
        if self._skips_by_itself():
            self.optimizer.found_inf = bad  # type: ignore[attr-defined] # torch's own way to tell a fused optimizer
            return True
        # Reads one number a window: the price of an optimizer that cannot skip a step on the device.
        return not bad.item()

    def tell_scaler(self, gradients: Sequence[Tensor]) -> None:
        """Make a gradient infinite if a loss was: a scaler looks at gradients alone, and these may well be finite."""
        if self.loss is not None and gradients:
            gradients[0].div_((1 - self.loss).to(gradients[0].device))

    def sees_bad_loss(self) -> bool:
        """Whether a loss of the open window is not finite; a GPU makes this wait."""
        return self.loss is not None and bool(self.loss.item())

    def close(self) -> None:
        """The window is over."""
        if self.loss is not None:
            self.loss = None
            self.optimizer.found_inf = None  # type: ignore[attr-defined] # else the next window would be judged by it

    def read(self) -> int:
        """How many windows were discarded for their gradients since ``discarded`` was 0; a GPU makes this wait."""
        if self._on_device is not None:
            count, first, parameters = self._on_device
            self._on_device = None
            if number := int(count.item()):
                self.discarded += number
                self.parameter = self.parameter or self._name(parameters[int(first.item())])
        return self.discarded

    def forget(self) -> None:
        """A new pass begins."""
        self.discarded, self.parameter, self._on_device = 0, "", None

    def _discard(self, parameters: Sequence[Tensor]) -> bool:
        self.discarded += 1
        self.parameter = self.parameter or self._name(parameters[int(_first_not_finite(parameters).item())])
        return False

    def _on_gpu(self, norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """1 where the window is to be discarded, else 0; what the gradients alone are to blame for is counted."""
        infinite = (~norm.isfinite()).float()
        losses = torch.zeros_like(infinite) if self.loss is None else self.loss.to(norm.device)
        blamed, first = (infinite - losses).clamp(min=0), _first_not_finite(parameters)
        if self._on_device is not None:
            before, earlier, _ = self._on_device
            first = torch.where(before > 0, earlier, first)
            blamed = blamed + before
        self._on_device = (blamed, first, parameters)
        return torch.maximum(infinite, losses)

    def _name(self, parameter: Tensor) -> str:
        return next((name for name, each in self.names.items() if each is parameter), "?")

    def _skips_by_itself(self) -> bool:
        """Whether the optimizer's kernel skips the step where ``found_inf`` says so.

        In the first step of a group, the kernel of a fused SGD with momentum would leave the momentum uninitialised.
        """
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return False
        # A loaded state may have switched the kernels of single groups.
        return all(group.get("fused") and self._has_momentum(group) for group in self.optimizer.param_groups)

    def _has_momentum(self, group: Mapping[str, Any]) -> bool:
        """Whether the momentum of a group exists, or need not."""
        return not group.get("momentum") or any(self.optimizer.state.get(each) for each in group["params"])


def _first_not_finite(parameters: Sequence[Tensor]) -> Tensor:
    """The index, on their device, of the first whose gradient is not finite; meaningless where all are."""
    norms = torch._foreach_norm([each.grad for each in parameters if each.grad is not None])
    left, none = iter(norms), norms[0].new_zeros(())
    every = [none if each.grad is None else next(left).to(none.device) for each in parameters]
    return torch.stack(every).isfinite().int().argmin()


ADVICE = "lower the learning rate, set grad_clip, or check the data; none of these batches changed the weights"


def check_divergence(losses: Meter, guards: Sequence[NonFiniteGuard], patience: int, where: str, began: int) -> None:
    """Read the losses of a pass, and what the guards of its optimizers have counted; a GPU makes this wait.

    Args:
        losses: those of the pass.
        guards: of the optimizers that descend them.
        patience: how many batches may be other than finite.
        where: what messages begin with.
        began: the iteration before the pass.

    Raises:
        DivergedError: there were more.
    """
    losses.read()
    bad = losses.nonfinite + sum(guard.read() for guard in guards)
    if bad <= patience:
        return
    names = [guard.parameter for guard in guards if guard.parameter]
    parameter = f", the first that of '{names[0]}'" if names else ""
    if losses.first:
        batch, value = losses.first
        times = f"{bad} of its losses in this epoch were not finite, the first in iteration {began + batch}"
        raise DivergedError(f"{where}'loss' is {value}: {times}{parameter}; {ADVICE}")
    times = f"{bad} of its gradients in this epoch were not finite, up to iteration {began + losses.batches}"
    raise DivergedError(f"{where}the loss is finite, but {times}{parameter}; {ADVICE}")
