"""Non-finite losses and gradients: they never reach the weights, they are counted, and too many end the training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pipeline.errors import DivergedError
from pipeline.metrics.meters import Meter


class NonFiniteGuard:
    """Decides for each accumulation window whether its optimizer may step, and counts the windows that it discards.

    On a CPU, and for an optimizer that cannot skip a step by itself, this reads one number a window. A fused optimizer
    on a GPU gets ``found_inf``, as from a gradient scaler, and nothing waits.

    Args:
        optimizer: the one that steps.
        names: name -> parameter of it, for messages.

    Attributes:
        loss: on a GPU, 1 if a loss of the open window is not finite, or when it closes a gradient, else 0; None: not checked.
        discarded: windows of this pass discarded for their gradients, as far as they are read.
        parameter: the first parameter with such a gradient; ``""``: none had one.
        sees_losses: whether a window is not counted as discarded for its gradients where a loss is known not to be finite.
    """

    sees_losses = True

    def __init__(self, optimizer: Optimizer, names: Mapping[str, Tensor]) -> None:
        self.optimizer, self.names = optimizer, names
        self.loss: Tensor | None = None
        self.discarded, self.parameter = 0, ""
        # On a GPU, the number of windows in which the optimizer's kernel or the scaler has skipped the step.
        self._skipped: Tensor | None = None
        self._on_device: tuple[Tensor, Tensor, Sequence[Tensor]] | None = None
        self._norms: tuple[Tensor, ...] = ()

    def record_loss(self, loss: Tensor) -> None:
        """Check a loss on a GPU, without reading it."""
        self.record((~loss.detach().isfinite()).float())

    def record(self, bad: Tensor) -> None:
        """Note on a GPU whether the open window is to be discarded: 1 if so, else 0."""
        self.loss = bad if self.loss is None else torch.maximum(self.loss, bad)

    def judge_alone(self) -> None:
        """From now on count a window once, for its loss or for its gradients: other code counts the loss too."""
        self.sees_losses = False

    def load(self, discarded: int, parameter: str) -> None:
        """Continue in the middle of a pass.

        Args:
            discarded: the windows that were discarded for their gradients.
            parameter: the first parameter with such a gradient.
        """
        self.discarded, self.parameter = discarded, parameter

    def norm_of(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        """The norm of all gradients, as torch computes it; on a GPU that of each, of which it is made, is kept.

        So nobody has to compute them again to say whose gradient is not finite, once one was found.
        """
        self._norms, on_device = (), self.loss is not None or not gradients[0].is_cpu
        kinds = {(gradient.device, gradient.dtype) for gradient in gradients} if on_device else ()
        if len(kinds) != 1:
            return nn.utils.get_total_norm(gradients, norm_type)
        self._norms = torch._foreach_norm(gradients, norm_type)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(self._norms), norm_type)
        return norm

    def allows_step(self, norm: Tensor | None, parameters: Sequence[Tensor], gradients: list[Tensor]) -> bool:
        """Whether the optimizer may be called; it may where it skips the step itself.

        Args:
            norm: of all the gradients; None where nobody asked for it.
            parameters: of the optimizer, with a gradient or without.
            gradients: of those that have one, dense.
        """
        if norm is not None and norm.is_cpu and self.loss is None:
            # Reads one number a window: gradients that are not finite must not reach the weights.
            if math.isfinite(norm.item()):
                return True
            self.discarded += 1
            first = _first_nonfinite(parameters, torch._foreach_norm(gradients))
            self.parameter = self.parameter or self._name(parameters[int(first.item())])
            return False
        bad = self.loss = self.loss if norm is None else self._nonfinite_on_device(norm, parameters, gradients)
        if bad is None:
            return True
        if self._optimizer_skips():
            self._count_skipped(bad)
            self.optimizer.found_inf = bad  # type: ignore[attr-defined] # torch's own way to tell a fused optimizer
            return True
        # Reads one number a window: the price of an optimizer that cannot skip a step on the device.
        return not bad.item()

    def note_scaler(self, scaler: GradScaler) -> None:
        """Count the window if the gradient scaler has just skipped the step, without reading that."""
        found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        if not found:
            # It is disabled.
            return
        first, *others = found.values()
        for other in others:
            first = torch.maximum(first, other.to(first.device))
        self._count_skipped(first)

    def _count_skipped(self, skipped: Tensor) -> None:
        """Count a window on its device: 1 if the step is skipped, else 0."""
        self._skipped = skipped if self._skipped is None else self._skipped + skipped

    def take_skipped(self) -> int:
        """Return how many such windows there were since the last call; on a GPU this waits."""
        skipped = 0 if self._skipped is None else int(self._skipped.item())
        self._skipped = None
        return skipped

    def close(self) -> None:
        """Close the window."""
        if self.loss is not None:
            self.loss = None
            self.optimizer.found_inf = None  # type: ignore[attr-defined] # else the next window would be judged by it

    def read(self) -> int:
        """How many windows of this pass were discarded for their gradients; on a GPU this waits."""
        if self._on_device is not None:
            count, first, parameters = self._on_device
            self._on_device = None
            if number := int(count.item()):
                self.discarded += number
                self.parameter = self.parameter or self._name(parameters[int(first.item())])
        return self.discarded

    def reset(self) -> None:
        """Reset for a new pass."""
        self.discarded, self.parameter, self._on_device = 0, "", None

    def _nonfinite_on_device(self, norm: Tensor, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Tensor:
        """1 where the window is to be discarded, else 0; windows with finite losses and other gradients are counted."""
        infinite = (~norm.isfinite()).float()
        losses = torch.zeros_like(infinite) if self.loss is None else self.loss.to(norm.device)
        norms = self._norms or torch._foreach_norm(gradients)
        bad_gradients, first = (infinite - losses).clamp(min=0), _first_nonfinite(parameters, norms)
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
        """Whether the optimizer's kernel skips the step where ``found_inf`` says so.

        In the first step of a group, the kernel of a fused SGD with momentum would leave the momentum uninitialised.
        """
        state, supported = self.optimizer.state, getattr(self.optimizer, "_step_supports_amp_scaling", False)
        # A loaded state may have switched the kernels of single groups.
        return supported and all(
            group.get("fused") and (not group.get("momentum") or any(map(state.get, group["params"])))
            for group in self.optimizer.param_groups
        )


def _first_nonfinite(parameters: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
    """The index of the first parameter whose gradient is not finite, on its device; meaningless if all are finite.

    Args:
        parameters: with a gradient or without.
        norms: of the gradients that there are.
    """
    remaining, zero = iter(norms), norms[0].new_zeros(())
    all_norms = [zero if parameter.grad is None else next(remaining).to(zero.device) for parameter in parameters]
    return torch.stack(all_norms).isfinite().int().argmin()


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
    discarded = [guard.read() for guard in guards]
    sure = all(guard.sees_losses for guard in guards)
    bad = losses.nonfinite + sum(discarded) if sure else max(losses.nonfinite, *discarded)
    if bad <= patience:
        return
    name = next((guard.parameter for guard in guards if guard.parameter), "")
    parameter = f", the first that of '{name}'" if name else ""
    batch, value = losses.first or (losses.batches, None)
    what = f"the loss is finite, but {bad} of its gradients in this epoch were not finite, up to"
    if losses.first:
        what = f"'loss' is {value}: {bad} of its losses in this epoch were not finite, the first in"
    raise DivergedError(f"{where}{what} iteration {began + batch}{parameter}; {ADVICE}")
