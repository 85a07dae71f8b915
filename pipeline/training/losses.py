"""The losses of one batch, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.data.batch import shape_of
from pipeline.errors import DataError

Losses = dict[str, Tensor]


def named(returned: Any, where: str) -> Losses:
    """What a method returned, as losses by name; a tensor alone is ``loss``.

    Args:
        returned: a scalar tensor, or a dict of them.
        where: the method, for messages.

    Raises:
        DataError: it is something else.
    """
    losses = {"loss": returned} if isinstance(returned, Tensor) else returned
    if not isinstance(losses, dict) or not losses or not all(isinstance(each, Tensor) for each in losses.values()):
        raise DataError(
            f"{where} returned {shape_of(returned)}; return a scalar tensor, or a dict of them with the names that the "
            "OptimSchedulers descend, 'loss' by default"
        )
    for name, each in losses.items():
        if each.ndim:
            raise DataError(
                f"{where}: the loss '{name}' has shape {tuple(each.shape)}; return a scalar, e.g. its mean()"
            )
    return losses
