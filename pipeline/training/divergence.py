"""When training has come to nothing: too many batches whose loss or gradients are not finite."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import DivergedError
from pipeline.training.average import Average
from pipeline.training.guard import Guard

ADVICE = "lower the learning rate, set grad_clip, or check the data; none of these batches changed the weights"


def refuse_divergence(losses: Average, guards: Sequence[Guard], patience: int, where: str, began: int) -> None:
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
