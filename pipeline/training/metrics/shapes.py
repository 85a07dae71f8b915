"""Whether predictions and target have the shapes that a metric reads, and how it says so where they have not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.data.batch import shape_of
from pipeline.errors import DataError


def tensor(metric: object, value: Any) -> Tensor:
    """The value, detached; it has to be a tensor.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, Tensor):
        raise DataError(
            f"{type(metric).__name__} takes tensors, and got {shape_of(value)}; return one tensor, or write a metric of your own"
        )
    return value.detach()


def paired(metric: object, predictions: Any, target: Any, wanted: str, remedy: str) -> tuple[Tensor, Tensor]:
    """Two flat tensors that go together number by number, detached; [batch, 1] and [batch] do.

    Args:
        metric: whose.
        predictions: as many numbers as the target has; also its shape, but for dimensions of 1, or one of the two is flat.
        target: what they are compared with.
        wanted: what the metric compares with what, for the message.
        remedy: what to do, likewise.

    Raises:
        DataError: the shapes are others.
    """
    predictions, target = tensor(metric, predictions), tensor(metric, target)
    shapes = [each.squeeze().shape for each in (predictions, target)]
    if predictions.numel() != target.numel() or (shapes[0] != shapes[1] and min(map(len, shapes)) > 1):
        raise _refused(metric, predictions, target, wanted, remedy)
    return predictions.flatten(), target.flatten()


def classified(metric: object, predictions: Any, target: Any, what: str, remedy: str) -> tuple[Tensor, Tensor]:
    """Scores [samples, classes] and classes [samples], detached, of any number of dimensions before the last.

    Args:
        metric: whose.
        predictions: scores [batch, …, classes].
        target: classes [batch, …], integers.
        what: what a class is called, in the plural, for the message.
        remedy: what to do, likewise.

    Raises:
        DataError: the shapes are others, or the target is not of integers.
    """
    predictions, target = tensor(metric, predictions), tensor(metric, target)
    if predictions.dim() < 2 or predictions.shape[:-1] != target.shape:
        raise _refused(metric, predictions, target, f"scores [batch, {what}] with {what} [batch]", remedy)
    if target.is_floating_point():
        kind = str(target.dtype).removeprefix("torch.")
        raise DataError(f"{type(metric).__name__} takes {what} as integers, and got {kind}; give it target.long()")
    return predictions.flatten(0, -2), target.flatten().long()


def _refused(metric: object, predictions: Tensor, target: Tensor, wanted: str, remedy: str) -> DataError:
    got = f"{tuple(predictions.shape)} and {tuple(target.shape)}"
    return DataError(f"{type(metric).__name__} compares {wanted}, and got {got}; {remedy}")
