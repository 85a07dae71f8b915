"""Finds a loss that broadcasts predictions [n, 1] and a target [n] to n times n numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# How torch's own losses warn of it. They do so for each size of a batch.
_TORCH_WARNING = "Using a target size"

# torch has no types for these.
_broadcast_shapes: Any = torch.broadcast_shapes
_DispatchMode: Any = TorchDispatchMode


class LossWatch:
    """Whether the loss of a Brain was watched. All copies of the Brain share it."""

    def __init__(self) -> None:
        self.is_done = False

    def call(self, loss: Callable[[], Any], predictions: Any, target: Any) -> tuple[Any, str]:
        """Do what ``call_watched`` does; the loss is watched once the predictions have several samples."""
        self.is_done = has_several(predictions)
        return call_watched(loss, predictions, target)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def call_watched(loss: Callable[[], Any], predictions: Any, target: Any) -> tuple[Any, str]:
    """Call a loss, and describe how it broadcasts predictions and target.

    Only shapes are read, and the loss computes what it always does.

    Args:
        loss: computes the loss of the predictions and the target.
        predictions: a tensor, or several in mappings, tuples and lists.
        target: likewise.

    Returns:
        What the loss returns, and the description; ``""`` if it broadcasts nothing.
    """
    pairs = _pairs(predictions, target)
    if not pairs:
        return loss(), ""
    watch = _BroadcastWatch(pairs)
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _observing(watch.look_at):
                returned = loss()
    finally:
        is_told_by_torch = _warn_again(caught)
    if watch.found is None and is_told_by_torch:
        watch.found = pairs[0]
    if watch.found is None:
        return returned, ""
    # The description takes the place of torch's warnings.
    warnings.filterwarnings("ignore", message=_TORCH_WARNING, category=UserWarning)
    return returned, _describe(*watch.found)


def has_several(predictions: Any) -> bool:
    """Whether there is a tensor with more than one number: a single one hides a broadcast."""
    return any(tensor.numel() > 1 for tensor in _tensors(predictions))


def _warn_again(caught: list[warnings.WarningMessage]) -> bool:
    """Issue the warnings of a loss, and return whether torch has warned of its broadcast."""
    is_told_by_torch = False
    # Repeated warnings are shown once, as they are without a watch.
    registry: dict[Any, Any] = {}
    for warning in caught:
        if str(warning.message).startswith(_TORCH_WARNING):
            is_told_by_torch = True
        else:
            place = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, warning.category, *place, registry=registry)
    return is_told_by_torch


def _describe(predictions: Tensor, target: Tensor) -> str:
    shapes = [tuple(tensor.shape) for tensor in (predictions, target)]
    spread = tuple(_spread(predictions, target))
    what = f"the loss broadcasts predictions {shapes[0]} and a target {shapes[1]} to {spread}"
    longer = "predictions" if predictions.ndim >= target.ndim else "target"
    remedy = f"give both one shape, such as {longer}.squeeze(-1)"
    return f"{what}, so it compares each prediction with every target; {remedy}"


def _tensors(value: Any) -> list[Tensor]:
    """Return the strided tensors; nested and sparse tensors have no single shape or storage."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [own for own in tensors if own.layout is torch.strided and not own.is_nested]


def _pairs(predictions: Any, target: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs with equally many elements that broadcast to more elements."""
    return [
        (prediction, label)
        for prediction in _tensors(predictions)
        for label in _tensors(target)
        if _would_broadcast(prediction, label)
    ]


def _would_broadcast(first: Tensor, second: Tensor) -> bool:
    if first.numel() != second.numel() or first.shape == second.shape:
        return False
    try:
        return math.prod(_spread(first, second)) > first.numel()
    except RuntimeError:
        return False


def _spread(first: Tensor, second: Tensor) -> torch.Size:
    """Return the shape to which two tensors broadcast."""
    shape: torch.Size = _broadcast_shapes(first.shape, second.shape)
    return shape


def _observing(observe: Callable[[Any, Any], None]) -> Any:
    """Return a context manager in which each operation's arguments and results are observed."""

    def run(
        _: Any,
        operation: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        returned = operation(*args, **(kwargs or {}))
        observe((args, kwargs), returned)
        return returned

    members = {
        "__torch_dispatch__": run,
        # Otherwise torch.compile never compiles a function that is first called in this context.
        "ignore_compile_internals": classmethod(lambda _: True),
        # Otherwise torch refuses operations such as torch.cond.
        "supports_higher_order_operators": True,
    }
    return type("Observing", (_DispatchMode,), members)()


class _BroadcastWatch:
    """Finds the operation in which a prediction and a target meet and broadcast.

    A loss that makes their shapes equal first is fine. So is one that compares predictions with
    each other.

    Args:
        pairs: predictions and targets that would broadcast.

    Attributes:
        found: the pair that has met; None: none has.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.pairs = pairs
        self.found: tuple[Tensor, Tensor] | None = None
        # The memory of what is computed from the predictions alone, and from the targets.
        self.of_predictions = {_memory(prediction) for prediction, _ in pairs}
        self.of_targets = {_memory(target) for _, target in pairs}
        # Results stay alive, so that their memory is not used again for something else.
        self._results: list[Tensor] = []

    def look_at(self, arguments: Any, returned: Any) -> None:
        """Check the shapes of an operation's arguments and results."""
        inputs = _tensors(arguments)
        results = _tensors(returned)
        predictions = [tensor for tensor in inputs if _memory(tensor) in self.of_predictions]
        targets = [tensor for tensor in inputs if _memory(tensor) in self.of_targets]
        shapes = {tensor.shape for tensor in (*inputs, *results)}
        for pair in self.pairs if self.found is None else ():
            meets = _has_shape_of(pair[0], predictions) and _has_shape_of(pair[1], targets)
            # An operation that uses a target as an index has another result.
            if meets and _spread(*pair) in shapes:
                self.found = pair
        self._results += results
        if predictions:
            self.of_predictions.update(map(_memory, results))
        if targets:
            self.of_targets.update(map(_memory, results))


def _memory(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which its views share."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _has_shape_of(original: Tensor, candidates: Iterable[Tensor]) -> bool:
    return any(_unexpanded(tensor, original.ndim) == original.shape for tensor in candidates)


def _unexpanded(tensor: Tensor, dimensions: int) -> tuple[int, ...]:
    """Return the shape that a tensor had before it was expanded; expanding sets strides of 0."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [1 if stride == 0 else size for size, stride in strides]
    added = max(0, len(shape) - dimensions) if 0 in tensor.stride() else 0
    return tuple(shape[added:])
