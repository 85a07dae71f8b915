"""What keeps numbers that are not finite from the weights of one optimizer, without waiting for a GPU where that can be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class Guard:
    """Says of each window of an optimizer whether its gradients may be used, and counts those that may not.

    On a CPU, and for an optimizer that cannot skip a step by itself, this reads one number a window. A fused optimizer
    on a GPU is told by ``found_inf``, as a gradient scaler does it, and nobody waits.

    Args:
        optimizer: the one that steps.
        names: name -> parameter of it, for messages.

    Attributes:
        loss: on a GPU, above 0 where a loss of the open window is not finite; None: not looked at.
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
            parameters: those that have a gradient.
        """
        if norm is None and self.loss is None:
            return True
        if norm is not None and norm.is_cpu:
            # Reads one number a window: gradients that are not finite must not reach the weights.
            return math.isfinite(norm.item()) or self._discard(parameters)
        bad = self._on_gpu(norm, parameters)
        if self._skips_by_itself():
            self.optimizer.found_inf = bad  # type: ignore[attr-defined] # torch's own way to tell a fused optimizer
            return True
        # Reads one number a window: the price of an optimizer that cannot skip a step on the device.
        return not bad.item()

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

    def _on_gpu(self, norm: Tensor | None, parameters: Sequence[Tensor]) -> Tensor:
        """Above 0 where the window is to be discarded; what the gradients alone are to blame for is counted."""
        losses = (
            self.loss if self.loss is not None else torch.zeros((), device=norm.device if norm is not None else None)
        )
        if norm is None:
            return losses
        infinite = (~norm.isfinite()).float()
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

        In its first step, the kernel of a fused SGD with momentum would leave the momentum uninitialised.
        """
        fused = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        momentum = any(group.get("momentum") for group in self.optimizer.param_groups)
        return bool(fused and (self.optimizer.state or not momentum))


def _first_not_finite(parameters: Sequence[Tensor]) -> Tensor:
    """The index, on their device, of the first whose gradient is not finite; meaningless where all are."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    return torch.stack(torch._foreach_norm(gradients)).isfinite().int().argmin()
