"""LossWatch: finds a loss that broadcasts predictions [n, 1] and a target [n] to [n, n]."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# How the warning starts that torch's losses issue for such a broadcast. They repeat it for each
# size of a batch.
_TORCH_WARNING = "Using a target size"

# torch has no types for these two.
_broadcast_shapes: Any = torch.broadcast_shapes
_DispatchMode: Any = TorchDispatchMode


class LossWatch:
    """A check of the loss of one Brain, which all copies of the Brain share.

    Attributes:
        is_done: whether the loss was watched with predictions that can show a broadcast.
    """

    def __init__(self) -> None:
        self.is_done = False

    def call(self, loss: Callable[[], Any], predictions: Any, target: Any) -> tuple[Any, str]:
        """Call a loss, and describe how it broadcasts predictions and target.

        Only shapes are read, and the loss computes what it always does.

        Args:
            loss: computes the loss of the predictions and the target.
            predictions: a tensor, or multiple tensors in mappings, tuples and lists.
            target: a tensor, or multiple tensors in mappings, tuples and lists.

        Returns:
            What the loss returns, and the description. The description is ``""`` if the loss
            broadcasts nothing.
        """
        # A tensor with a single number hides a broadcast.
        self.is_done = any(tensor.numel() > 1 for tensor in _tensors(predictions))
        return _call_watched(loss, predictions, target)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _call_watched(loss: Callable[[], Any], predictions: Any, target: Any) -> tuple[Any, str]:
    """Do what ``LossWatch.call`` does, and keep no state."""
    pairs = _pairs(predictions, target)
    if not pairs:
        return loss(), ""
    watch = _BroadcastWatch(pairs)
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _observing(watch.observe):
                returned = loss()
    finally:
        has_torch_warned = _warn_again(caught)
    if watch.found is None and has_torch_warned:
        watch.found = pairs[0]
    if watch.found is None:
        return returned, ""
    # The description replaces torch's warnings.
    warnings.filterwarnings("ignore", message=_TORCH_WARNING, category=UserWarning)
    return returned, _describe(*watch.found)


def _warn_again(caught: list[warnings.WarningMessage]) -> bool:
    """Issue the caught warnings again, except torch's warnings of a broadcast.

    Returns:
        Whether torch has warned of a broadcast.
    """
    has_torch_warned = False
    # With this registry, Python shows a repeated warning once, as it does without a watch.
    registry: dict[Any, Any] = {}
    for warning in caught:
        if str(warning.message).startswith(_TORCH_WARNING):
            has_torch_warned = True
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno, registry=registry
            )
    return has_torch_warned


def _describe(predictions: Tensor, target: Tensor) -> str:
    """Return the warning that the loss broadcasts these two tensors, with a remedy."""
    shapes = [tuple(tensor.shape) for tensor in (predictions, target)]
    spread = tuple(_spread(predictions, target))
    what = f"the loss broadcasts predictions {shapes[0]} and a target {shapes[1]} to {spread}"
    longer = "predictions" if predictions.ndim >= target.ndim else "target"
    remedy = f"give both one shape, such as {longer}.squeeze(-1)"
    return f"{what}, so it compares each prediction with every target; {remedy}"


def _tensors(value: Any) -> list[Tensor]:
    """Return the strided tensors in nested values.

    Nested and sparse tensors are left out, because they have no single shape or storage.
    """
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]


def _pairs(predictions: Any, target: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of a prediction and a target whose broadcast is a mistake."""
    return [
        (prediction, label)
        for prediction in _tensors(predictions)
        for label in _tensors(target)
        if _would_broadcast(prediction, label)
    ]


def _would_broadcast(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors with equally many elements broadcast to more elements."""
    if first.numel() != second.numel() or first.shape == second.shape:
        return False
    try:
        return math.prod(_spread(first, second)) > first.numel()
    except RuntimeError:
        # Their shapes do not broadcast at all.
        return False


def _spread(first: Tensor, second: Tensor) -> torch.Size:
    """Return the shape to which two tensors broadcast."""
    shape: torch.Size = _broadcast_shapes(first.shape, second.shape)
    return shape


def _observing(observe: Callable[[Any, Any], None]) -> Any:
    """Return a context manager that observes each operation of torch.

    Args:
        observe: called after each operation, with its arguments and its results.
    """

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
    """A search for the operation that broadcasts a prediction with a target.

    A loss may make the two shapes equal first. It may also compare predictions with each other.
    Neither is reported.

    Args:
        pairs: predictions and targets that would broadcast.

    Attributes:
        pairs: the same.
        found: the pair that an operation has broadcast; None if no operation has.
        prediction_storages: the storages of the predictions, and of all results that were computed
            from a prediction.
        target_storages: the storages of the targets, and of all results that were computed from a
            target.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.pairs = pairs
        self.found: tuple[Tensor, Tensor] | None = None
        self.prediction_storages = {_storage_of(prediction) for prediction, _ in pairs}
        self.target_storages = {_storage_of(target) for _, target in pairs}
        # Results stay alive, so that their storage is not used again for something else.
        self._results: list[Tensor] = []

    def observe(self, arguments: Any, returned: Any) -> None:
        """Check the shapes of an operation's arguments and results."""
        inputs = _tensors(arguments)
        results = _tensors(returned)
        predictions = [tensor for tensor in inputs if _storage_of(tensor) in self.prediction_storages]
        targets = [tensor for tensor in inputs if _storage_of(tensor) in self.target_storages]
        if self.found is None:
            shapes = {tensor.shape for tensor in (*inputs, *results)}
            self.found = self._find(predictions, targets, shapes)
        self._results += results
        if predictions:
            self.prediction_storages.update(map(_storage_of, results))
        if targets:
            self.target_storages.update(map(_storage_of, results))

    def _find(
        self, predictions: list[Tensor], targets: list[Tensor], shapes: set[torch.Size]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the pair that an operation broadcasts; None if it broadcasts no pair.

        Args:
            predictions: the operation's inputs that were computed from a prediction.
            targets: the operation's inputs that were computed from a target.
            shapes: the shapes of all inputs and results.
        """
        found = None
        for pair in self.pairs:
            prediction, target = pair
            meets = _has_shape_of(prediction, predictions) and _has_shape_of(target, targets)
            # An operation that uses a target as an index has a result of another shape.
            if meets and _spread(prediction, target) in shapes:
                found = pair
        return found


def _storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which its views share."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _has_shape_of(original: Tensor, candidates: Iterable[Tensor]) -> bool:
    """Return whether a candidate has the shape of the original, apart from having been expanded."""
    return any(_unexpanded(tensor, original.ndim) == original.shape for tensor in candidates)


def _unexpanded(tensor: Tensor, dimensions: int) -> tuple[int, ...]:
    """Return the shape that a tensor had before it was expanded; expanding sets strides of 0."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [1 if stride == 0 else size for size, stride in strides]
    added = max(0, len(shape) - dimensions) if 0 in tensor.stride() else 0
    return tuple(shape[added:])
