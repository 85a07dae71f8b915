"""Losses and gradients that are not finite.

They never reach the weights. They are counted, and too many end the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pipeline.errors import DivergedError
from pipeline.metrics.meters import Meter

# The advice at the end of a message about losses or gradients that are not finite.
ADVICE = "lower the learning rate, set grad_clip, or check the data; none of these batches changed the weights"


class NonFiniteGuard:
    """Decides for each accumulation window whether its optimizer may step.

    It counts the windows that it discards.

    On a CPU, and for an optimizer that cannot skip a step itself, this reads one number per window.
    A fused optimizer on a GPU gets ``found_inf``, as from a gradient scaler, and nothing waits for
    the GPU.

    Args:
        optimizer: the optimizer that steps.
        names: name -> parameter of the optimizer, for messages.

    Attributes:
        loss: a number on a GPU, 1 if a loss of the open window, or a gradient when it closes, is
            not finite, else 0; None if nothing was checked.
        discarded: the windows of this pass that were discarded for their gradients, as far as they
            were read.
        parameter: the first parameter with such a gradient; ``""`` if there was none.
        sees_losses: whether a window is not counted as discarded for its gradients if one of its
            losses is known not to be finite.
    """

    sees_losses = True

    def __init__(self, optimizer: Optimizer, names: Mapping[str, Tensor]) -> None:
        self.optimizer = optimizer
        self.names = names
        self.loss: Tensor | None = None
        self.discarded = 0
        self.parameter = ""
        # A number on a GPU: the windows whose step the kernel of the optimizer, or the scaler, has
        # skipped.
        self._skipped: Tensor | None = None
        # On a GPU: how many windows have such gradients, the index of the first parameter, and the
        # parameters.
        self._on_device: tuple[Tensor, Tensor, Sequence[Tensor]] | None = None
        # The norm of each gradient, if the last call of `norm_of` was on a GPU.
        self._norms: tuple[Tensor, ...] = ()

    def record_loss(self, loss: Tensor) -> None:
        """Check a loss on a GPU, without reading it."""
        bad = (~loss.detach().isfinite()).float()
        # The same as in `record`, without its call.
        self.loss = bad if self.loss is None else torch.maximum(self.loss, bad)

    def record(self, bad: Tensor) -> None:
        """Record on a GPU whether the open window must be discarded.

        Args:
            bad: a number on the GPU: 1 if the window must be discarded, else 0.
        """
        self.loss = bad if self.loss is None else torch.maximum(self.loss, bad)

    def judge_alone(self) -> None:
        """Count each window only once from now on, because other code counts its loss, too."""
        self.sees_losses = False

    def load(self, discarded: int, parameter: str) -> None:
        """Continue in the middle of a pass.

        Args:
            discarded: the windows that were discarded for their gradients.
            parameter: the first parameter with such a gradient.
        """
        self.discarded = discarded
        self.parameter = parameter

    def norm_of(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        """Return the norm of all gradients, as torch computes it.

        On a GPU, the norm of each gradient is kept, so that they are not computed again to find the
        gradient that is not finite.

        Args:
            gradients: the gradients, dense.
            norm_type: the p of the norm.
        """
        self._norms = ()
        on_device = self.loss is not None or not gradients[0].is_cpu
        kinds = {(gradient.device, gradient.dtype) for gradient in gradients} if on_device else ()
        if len(kinds) != 1:
            return nn.utils.get_total_norm(gradients, norm_type)
        self._norms = torch._foreach_norm(gradients, norm_type)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(self._norms), norm_type)
        return norm

    def allows_step(self, norm: Tensor | None, parameters: Sequence[Tensor], gradients: list[Tensor]) -> bool:
        """Return whether the optimizer may be called. It may if it skips the step itself.

        Args:
            norm: the norm of all gradients; None if it was not computed.
            parameters: all parameters of the optimizer, with or without a gradient.
            gradients: the gradients of the parameters that have one, dense.
        """
        if norm is not None and norm.is_cpu and self.loss is None:
            # This reads one number per window: gradients that are not finite must not reach the
            # weights.
            if math.isfinite(norm.item()):
                return True
            self.discarded += 1
            first = _first_nonfinite(parameters, torch._foreach_norm(gradients))
            self.parameter = self.parameter or self._name(parameters[int(first.item())])
            return False
        if norm is not None:
            self.loss = self._nonfinite_on_device(norm, parameters, gradients)
        bad = self.loss
        if bad is None:
            return True
        if self._optimizer_skips():
            self._count_skipped(bad)
            self.optimizer.found_inf = bad  # type: ignore[attr-defined] # torch's way to tell a fused optimizer
            return True
        # This reads one number per window, because the optimizer cannot skip a step on the device.
        return not bad.item()

    def note_scaler(self, scaler: GradScaler) -> None:
        """Count the window if the gradient scaler has just skipped the step.

        This does not wait for the GPU.

        Args:
            scaler: the scaler that was called for the step.
        """
        found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        if not found:
            # The scaler is disabled.
            return
        first, *others = found.values()
        for other in others:
            first = torch.maximum(first, other.to(first.device))
        self._count_skipped(first)

    def _count_skipped(self, skipped: Tensor) -> None:
        """Count a window on its device; ``skipped`` is 1 if the step is skipped, else 0."""
        self._skipped = skipped if self._skipped is None else self._skipped + skipped

    def take_skipped(self) -> int:
        """Return how many steps were skipped on a GPU since the last call; this waits for the GPU."""
        skipped = 0 if self._skipped is None else int(self._skipped.item())
        self._skipped = None
        return skipped

    def close(self) -> None:
        """Close the window."""
        if self.loss is not None:
            self.loss = None
            self.optimizer.found_inf = None  # type: ignore[attr-defined] # for the next window

    def read(self) -> int:
        """Return how many windows of this pass were discarded for their gradients.

        On a GPU this waits.
        """
        if self._on_device is not None:
            count, first, parameters = self._on_device
            self._on_device = None
            if number := int(count.item()):
                self.discarded += number
                self.parameter = self.parameter or self._name(parameters[int(first.item())])
        return self.discarded

    def reset(self) -> None:
        """Reset for a new pass."""
        self.discarded = 0
        self.parameter = ""
        self._on_device = None

    def _nonfinite_on_device(self, norm: Tensor, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Tensor:
        """Return on the device 1 if the window must be discarded, else 0.

        The window is counted if its losses are finite and its gradients are not.

        Args:
            norm: the norm of all gradients.
            parameters: all parameters of the optimizer, with or without a gradient.
            gradients: the gradients of the parameters that have one.
        """
        infinite = (~norm.isfinite()).float()
        losses = torch.zeros_like(infinite) if self.loss is None else self.loss.to(norm.device)
        norms = self._norms or torch._foreach_norm(gradients)
        bad_gradients = (infinite - losses).clamp(min=0)
        first = _first_nonfinite(parameters, norms)
        self._norms = ()
        if self._on_device is not None:
            count, earlier, _ = self._on_device
            first = torch.where(count > 0, earlier, first)
            bad_gradients = bad_gradients + count
        self._on_device = (bad_gradients, first, parameters)
        return torch.maximum(infinite, losses)

    def _name(self, parameter: Tensor) -> str:
        return next((name for name, candidate in self.names.items() if candidate is parameter), "?")

    def _optimizer_skips(self) -> bool:
        """Return whether the kernel of the optimizer skips the step if ``found_inf`` is set.

        In the first step of a group, the kernel of a fused SGD with momentum would leave the
        momentum uninitialized.
        """
        state = self.optimizer.state
        supported = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        # A loaded state may have switched the kernels of single groups.
        return supported and all(
            group.get("fused") and (not group.get("momentum") or any(map(state.get, group["params"])))
            for group in self.optimizer.param_groups
        )


def check_divergence(losses: Meter, guards: Sequence[NonFiniteGuard], patience: int, where: str, began: int) -> None:
    """Check how many losses and gradients of a pass were not finite. This waits for a GPU.

    Args:
        losses: the losses of the pass.
        guards: the guards of the optimizers that minimize these losses.
        patience: how many batches may be not finite.
        where: the start of messages.
        began: the iteration before the pass.

    Raises:
        DivergedError: more batches were not finite.
    """
    losses.read()
    discarded = [guard.read() for guard in guards]
    # A guard that does not see the losses also counts windows that ``losses`` counts.
    counted_once = all(guard.sees_losses for guard in guards)
    bad = losses.nonfinite + sum(discarded) if counted_once else max(losses.nonfinite, *discarded)
    if bad <= patience:
        return
    name = next((guard.parameter for guard in guards if guard.parameter), "")
    parameter = f", the first that of '{name}'" if name else ""
    batch, value = losses.first or (losses.batches, None)
    what = f"the loss is finite, but {bad} of its gradients in this epoch were not finite, up to"
    if losses.first:
        what = f"'loss' is {value}: {bad} of its losses in this epoch were not finite, the first in"
    raise DivergedError(f"{where}{what} iteration {began + batch}{parameter}; {ADVICE}")


def _first_nonfinite(parameters: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
    """Return the index of the first parameter whose gradient is not finite, on its device.

    Args:
        parameters: the parameters, with or without a gradient.
        norms: the norms of the gradients, in the order of the parameters that have one.

    Returns:
        A tensor of the shape (); it means nothing if all gradients are finite.
    """
    remaining = iter(norms)
    zero = norms[0].new_zeros(())
    all_norms = [zero if parameter.grad is None else next(remaining).to(zero.device) for parameter in parameters]
    return torch.stack(all_norms).isfinite().int().argmin()
