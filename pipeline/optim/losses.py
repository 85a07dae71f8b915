"""The losses of a batch, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from pipeline.data.batch import shape_of
from pipeline.errors import DataError

Losses: TypeAlias = dict[str, Tensor]


def losses_by_name(returned: Any, where: str) -> Losses:
    """Return the losses that a method has returned, by name.

    Example:
        >>> import torch
        >>> losses_by_name(torch.tensor([0.5]), "Model.loss")
        {'loss': tensor(0.5000)}

    Args:
        returned: a scalar tensor, which gets the name ``loss``, or a mapping of scalar tensors. The
            shape of a scalar is () or (1,).
        where: the method, for messages.

    Returns:
        name -> loss of the shape ().

    Raises:
        DataError: ``returned`` is something else.
    """
    losses = {"loss": returned} if isinstance(returned, Tensor) else returned
    if not isinstance(losses, Mapping) or not losses or not all(isinstance(loss, Tensor) for loss in losses.values()):
        remedy = "return a scalar tensor, or a dict of them with the names that the OptimSchedulers descend"
        raise DataError(f"{where} returned {shape_of(returned)}; {remedy}, 'loss' by default")
    for name, loss in losses.items():
        if loss.ndim and loss.shape != (1,):
            raise DataError(f"{where}: the loss '{name}' has shape {tuple(loss.shape)}; return a scalar, e.g. mean()")
    return {name: loss.squeeze() if loss.ndim else loss for name, loss in losses.items()}
