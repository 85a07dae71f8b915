"""The protocol of a metric, how metrics are built from a config, and the metrics that are means.

The means are Mean, Accuracy, LogLoss, MAE and RMSE. ``SumMetric`` and ``MeanMetric`` are the base
classes of the metrics of this package. The functions at the end check and flatten what ``update``
gets.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from pipeline.data.batch import SparseSlot, shape_of
from pipeline.distributed.world import current_world
from pipeline.errors import ConfigError, DataError, one_of
from pipeline.user_code import class_path

# Name -> ``{class, args, batch}``.
Settings: TypeAlias = Mapping[str, Mapping[str, Any]]

# Messages about wrong values. Each follows the number of such values.
LABELS = "labels are neither 0 nor 1; make them so, e.g. (rating > 3).float()"
CLASSES = "numbers in the target are of no score; count from 0, and leave out what is to be ignored"
_WEIGHTS = "weights are negative or not finite; a weight says as how many samples one counts"

# The least logarithm in LogLoss, as in torch.nn.BCELoss.
_LEAST_LOG = -100.0


class Metric(Protocol):
    """The methods that the runner calls on a metric."""

    def update(self, predictions: Any, target: Any) -> None:
        """Add one batch."""

    def compute(self) -> Any:
        """Return the number over all batches since the last reset.

        It is a float, or a tensor with one element.
        """

    def reset(self) -> None:
        """Forget all batches. It is called before each pass, including the first."""


def build_metrics(settings: Settings, workspace: Path | None, where: str = "metrics") -> dict[str, Any]:
    """Build the metrics of a phase.

    Args:
        settings: metric name -> ``{class, args, batch}``. A class without a module is looked up in
            ``pipeline.metrics``.
        workspace: the workspace in which class paths are resolved.
        where: where the config has the settings; error messages start with it.

    Returns:
        The metrics by name. A metric with ``batch`` is wrapped in a ``FromBatch``.

    Raises:
        ClassPathError: a class cannot be loaded.
        ConfigError: ``update``, ``compute`` or ``reset`` of a metric takes other arguments.
    """
    metrics = {}
    for name, setting in settings.items():
        path = setting["class"]
        if isinstance(path, str):
            path = class_path.parse(path, name="Metric", workspace=workspace, module=class_path.METRICS)
        metric = class_path.load_class(path, object)(**setting.get("args", {}))
        fields = setting.get("batch") or {}
        address = f"{where}.{name}"
        _require_method(metric, "update", address, "predictions", "target", fields=fields)
        _require_method(metric, "compute", address)
        _require_method(metric, "reset", address)
        metrics[name] = FromBatch(metric, fields, address) if fields else metric
    return metrics


def build_train_metrics(phase: str, settings: Settings, workspace: Path | None) -> dict[str, Any]:
    """Build the ``train_metrics`` of a phase, which also need a state.

    Args:
        phase: the name of the phase.
        settings: see ``build_metrics``.
        workspace: see ``build_metrics``.

    Returns:
        The metrics by name.

    Raises:
        ClassPathError: a class cannot be loaded.
        ConfigError: a method of a metric takes other arguments; or a metric lacks ``state_dict`` or
            ``load_state_dict``, without which a run cannot be resumed within an epoch; or, with
            more than one process, it lacks ``merge``.
    """
    metrics = build_metrics(settings, workspace, f"phase.{phase}.train_metrics")
    for name, metric in metrics.items():
        address = f"phase.{phase}.train_metrics.{name}"
        if not (hasattr(metric, "state_dict") and hasattr(metric, "load_state_dict")):
            what = f"{address}: {class_name(metric)} lacks state_dict or load_state_dict"
            raise ConfigError(f"{what}, without which no run could go on within an epoch; add both")
        inner = metric.metric if isinstance(metric, FromBatch) else metric
        _require_method(inner, "state_dict", address)
        _require_method(inner, "load_state_dict", address, "state")
        if current_world().size > 1 and not hasattr(metric, "merge"):
            what = f"{address}: {class_name(metric)} lacks merge(states)"
            raise ConfigError(f"{what}, without which several processes have no number together; add it")
        # A metric of torchmetrics leaves its state out of state_dict() unless it is persistent.
        if hasattr(metric, "persistent"):
            metric.persistent(True)
    return metrics


def _require_method(
    metric: Any, method: str, address: str, *arguments: str, fields: Mapping[str, str] | None = None
) -> None:
    """Raise an error if a method of a metric does not take the arguments with which it is called.

    A method that is missing, or whose signature is unknown, is accepted.

    Args:
        metric: the metric.
        method: the name of the method.
        address: where the config names the metric.
        arguments: the names of the arguments that are passed by position, for the message.
        fields: the arguments that are passed by name -> field of the batch.

    Raises:
        ConfigError: the method does not take these arguments.
    """
    function = getattr(metric, method, None)
    try:
        signature = inspect.signature(function) if callable(function) else None
    except ValueError:
        # A function that is written in C may have no signature.
        signature = None
    if signature is None:
        return
    by_name = fields or {}
    try:
        signature.bind(*arguments, **by_name)
    except TypeError as error:
        call = ", ".join([*arguments, *(f"{name}=…" for name in by_name)])
        what = f"{address}: {type(metric).__name__}.{method}{signature} is called as {method}({call})"
        remedy = f"write `def {method}({', '.join(['self', *arguments])})`"
        if method == "update":
            remedy += "; what else it takes, `batch:` names"
        raise ConfigError(f"{what}: {error}; {remedy}") from error


class FromBatch:
    """A metric whose ``update`` also gets fields of the batch, as ``batch:`` of its config says.

    All other methods and attributes are those of the wrapped metric.

    Args:
        metric: the wrapped metric.
        fields: keyword argument of its ``update`` -> field of the batch, which is a mapping.
        where: where the config has the metric; error messages start with it.
    """

    def __init__(self, metric: Any, fields: Mapping[str, str], where: str) -> None:
        self.metric = metric
        self.fields = fields
        self.where = where

    def __getattr__(self, name: str) -> Any:
        if name == "metric":
            # copy and pickle look up attributes before ``metric`` is set. Without this, the lookup
            # would not end.
            raise AttributeError(name)
        return getattr(self.metric, name)

    def update(self, predictions: Any, target: Any, batch: Any) -> None:
        """Add one batch.

        Args:
            predictions: what the metric compares.
            target: what it compares the predictions with.
            batch: the batch whose fields are passed on; of a ``SparseSlot`` its ``ids``.

        Raises:
            DataError: the batch is not a mapping or lacks a field, or the metric raises a
                DataError.
        """
        if not isinstance(batch, Mapping):
            raise DataError(f"{self.where}.batch: the batch is {shape_of(batch)}; only a mapping has fields with names")
        for argument, field in self.fields.items():
            if field not in batch:
                what = f"{self.where}.batch.{argument}: the batch has no '{field}'"
                raise DataError(f"{what}{one_of(field, [str(key) for key in batch])}")
        try:
            fields = {}
            for argument, field in self.fields.items():
                value = batch[field]
                fields[argument] = value.ids if isinstance(value, SparseSlot) else value
            self.metric.update(predictions, target, **fields)
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from error


def judge(metric: Any, predictions: Any, target: Any, batch: Any) -> None:
    """Update a metric with one batch, and with the fields of the batch that it needs."""
    if isinstance(metric, FromBatch):
        metric.update(predictions, target, batch)
    else:
        metric.update(predictions, target)


def needs_target(metric: Any) -> bool:
    """Return whether the target is a required argument of a metric's ``update``."""
    inner = metric.metric if isinstance(metric, FromBatch) else metric
    parameters = [*inspect.signature(inner.update).parameters.values()]
    # The first parameter takes the predictions. Without a second one, ``*args`` takes the target.
    if not parameters[1:]:
        return True
    return parameters[1].default is inspect.Parameter.empty


def class_name(metric: Any) -> str:
    """Return the name of a metric's class."""
    return type(metric.metric if isinstance(metric, FromBatch) else metric).__name__


class SumMetric:
    """A metric that is computed from named sums over the batches.

    The sums stay on the device of the predictions until they are read. A batch is added out of
    place, so a state that was returned earlier does not change.

    Attributes:
        mistakes: name of a sum that counts wrong values -> the error message about them, which
            follows their number.
        sums: name -> sum over all batches since the last reset.
    """

    mistakes: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, **parts: Tensor) -> None:
        """Add the sums of one batch."""
        for name, part in parts.items():
            before = self.sums.get(name)
            self.sums[name] = part if before is None else before.to(part.device) + part

    def weights_of(self, weights: Any, values: Tensor) -> Tensor:
        """Return the weight of each value.

        Weights that are negative or not finite are counted, and ``read`` raises an error about
        them.

        Args:
            weights: a tensor with one weight per value, of any shape.
            values: the values that are weighted.

        Returns:
            The weights, flat, in the type in which their device sums.

        Raises:
            DataError: there is not one weight per value.
        """
        flat = require_tensor(self, weights).flatten().to(wide(values.device))
        if flat.numel() != values.numel():
            what = f"{type(self).__name__} weighs {values.numel()} numbers, and got {flat.numel()} weights"
            raise DataError(f"{what}; give one weight per sample")
        self.add(unweighable=(~((flat >= 0) & flat.isfinite())).sum())
        return flat

    def read(self) -> dict[str, Tensor]:
        """Return the sums, on the CPU.

        Raises:
            DataError: there were wrong values.
        """
        sums = {name: total.cpu() for name, total in self.sums.items()}
        for name, message in {**self.mistakes, "unweighable": _WEIGHTS}.items():
            count = int(sums[name]) if name in sums else 0
            if count:
                raise DataError(f"{type(self).__name__}: {count} {message}")
        return sums

    def reset(self) -> None:
        """Forget all batches."""
        self.sums = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last reset: name -> tensor."""
        return dict(self.sums)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.sums = dict(state)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks together."""
        self.reset()
        for state in states:
            self.add(**state)


class MeanMetric(SumMetric):
    """The mean of one number per sample."""

    def add_values(self, values: Tensor, weights: Any = None) -> None:
        """Add one number per sample.

        Args:
            values: the numbers, [samples].
            weights: how much each sample counts, [samples]; None if all count the same.

        Raises:
            DataError: there is not one weight per value.
        """
        if weights is None:
            samples = torch.full((), values.numel(), device=values.device)
            self.add(total=values.sum(dtype=wide(values.device)), samples=samples)
        else:
            weights = self.weights_of(weights, values)
            self.add(total=(values * weights).sum(), samples=weights.sum())

    def compute(self) -> float:
        """Return the mean over samples; nan if there were none.

        Raises:
            DataError: there were wrong values among predictions, targets or weights.
        """
        sums = self.read()
        return float(sums["total"] / sums["samples"]) if sums else math.nan


class Mean(MeanMetric):
    """The mean of the predictions, for example the click rate that a model expects.

    Example:
        >>> import torch
        >>> from pipeline.metrics import Mean
        >>> mean = Mean()
        >>> mean.update(torch.tensor([0.25, 0.75, 0.5]))
        >>> mean.compute()
        0.5
    """

    def update(self, predictions: Tensor, target: Any = None, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: numbers of any unit, in a tensor of any shape, such as [batch].
            target: ignored; the metric needs none.
            weights: one weight per prediction; None if all count the same.

        Raises:
            DataError: the predictions are not a tensor, or there is not one weight per prediction.
        """
        self.add_values(require_tensor(self, predictions).flatten(), weights)

    def add_mean(self, value: Tensor, samples: int) -> None:
        """Add a detached scalar that is the mean over this number of samples."""
        self.add(total=(value * samples).to(wide(value.device)), samples=torch.tensor(samples))


class Accuracy(MeanMetric):
    """The share of samples whose class has the highest score, from 0 to 1.

    It equals ``MulticlassAccuracy(average="micro")`` of torchmetrics. It is nan if a score is nan.

    Example:
        >>> import torch
        >>> from pipeline.metrics import Accuracy
        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
        >>> accuracy.update(torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([1, 0]))
        >>> accuracy.compute()
        0.75
    """

    mistakes: ClassVar[Mapping[str, str]] = {"strangers": CLASSES}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: scores of any scale, [batch, classes]. There may be further dimensions of
                samples after the batch.
            target: integer classes, counted from 0, [batch], with the same further dimensions.
            weights: of the shape of the target; None if all samples count the same.

        Raises:
            DataError: the shapes differ, the target is not of integers, or there is not one weight
                per sample.
        """
        scores, classes = flat_classes(self, predictions, target, "classes", "use another metric")
        hits = (scores.argmax(-1) == classes).to(wide(scores.device))
        self.add_values(hits.masked_fill(scores.isnan().any(-1), math.nan), weights)
        self.add(strangers=count_outside(classes, 0, scores.shape[-1] - 1))


class LogLoss(MeanMetric):
    """Mean binary cross entropy in nats: the mean of -(y log p + (1 - y) log(1 - p)).

    It equals ``torch.nn.BCELoss``, where a logarithm is at least -100, so a certain but wrong
    prediction is not infinite. With ``from_logits`` it equals ``torch.nn.BCEWithLogitsLoss``.

    Args:
        from_logits: whether predictions are logits instead of probabilities.

    Example:
        >>> import torch
        >>> from pipeline.metrics import LogLoss
        >>> log_loss = LogLoss()
        >>> log_loss.update(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
        >>> round(log_loss.compute(), 4)  # log(2)
        0.6931
    """

    mistakes: ClassVar[Mapping[str, str]] = {
        "improbable": "predictions outside [0, 1] are no probabilities; for logits write args: {from_logits: true}",
        "unlabelled": "labels are outside [0, 1]; make them 0 and 1, or probabilities",
    }

    def __init__(self, from_logits: bool = False) -> None:
        super().__init__()
        self.from_logits = from_logits

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: probabilities in [0, 1], or logits with ``from_logits``, such as [batch].
            target: labels in [0, 1], of the same shape.
            weights: of the same shape; None if all samples count the same.

        Raises:
            DataError: the shapes differ, or there is not one weight per sample.
        """
        p, y = flat_numbers(self, predictions, target, "labels")
        if self.from_logits:
            losses = torch.nn.functional.binary_cross_entropy_with_logits(p, y, reduction="none")
            self.add_values(losses, weights)
        else:
            # torch's binary_cross_entropy checks the probabilities first, and so waits for the
            # device.
            positive = -y * p.log().clamp(min=_LEAST_LOG)
            negative = (1 - y) * (-p).log1p().clamp(min=_LEAST_LOG)
            self.add_values(positive - negative, weights)
            self.add(improbable=count_outside(p, 0, 1))
        self.add(unlabelled=count_outside(y, 0, 1))


class MAE(MeanMetric):
    """Mean absolute error, in the unit of the target: the mean of |prediction - target|.

    It equals ``torch.nn.L1Loss`` over the whole pass.

    Example:
        >>> import torch
        >>> from pipeline.metrics import MAE
        >>> error = MAE()
        >>> error.update(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 5.0]))
        >>> error.compute()
        2.0
    """

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: numbers, such as [batch].
            target: numbers of the same shape.
            weights: of the same shape; None if all samples count the same.

        Raises:
            DataError: the shapes differ, or there is not one weight per sample.
        """
        predictions, target = flat_numbers(self, predictions, target, "targets")
        self.add_values((predictions - target).abs(), weights)


class RMSE(MeanMetric):
    """Root mean square error, in the unit of the target.

    That is the root of the mean of (prediction - target)² over the whole pass. It equals the root
    of ``torch.nn.MSELoss`` over the whole pass.

    Example:
        >>> import torch
        >>> from pipeline.metrics import RMSE
        >>> error = RMSE()
        >>> error.update(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 9.0]))
        >>> error.compute()
        5.0
    """

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            predictions: numbers, such as [batch].
            target: numbers of the same shape.
            weights: of the same shape; None if all samples count the same.

        Raises:
            DataError: the shapes differ, or there is not one weight per sample.
        """
        predictions, target = flat_numbers(self, predictions, target, "targets")
        self.add_values((predictions - target).square(), weights)

    def compute(self) -> float:
        """Return the root; nan if there were no samples.

        Raises:
            DataError: there were wrong weights.
        """
        return math.sqrt(super().compute())


def require_tensor(metric: object, value: Any) -> Tensor:
    """Return a value that must be a tensor, detached.

    Args:
        metric: the metric that got the value, for the message.
        value: the value.

    Raises:
        DataError: the value is not a tensor.
    """
    if not isinstance(value, Tensor):
        what = f"{type(metric).__name__} takes tensors, and got {shape_of(value)}"
        raise DataError(f"{what}; return one tensor, or write a metric of your own")
    return value.detach()


def flat_numbers(metric: object, predictions: Tensor, target: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return predictions and target as flat tensors, in the type in which their device sums.

    Args:
        metric: the metric that got them, for the message.
        predictions: see ``flat_pairs``.
        target: see ``flat_pairs``.
        what: the name of a target in the plural, for the message.

    Raises:
        DataError: the shapes differ.
    """
    pairs = f"predictions [batch] with {what} [batch]"
    predictions, target = flat_pairs(metric, predictions, target, pairs, "return one prediction per sample")
    dtype = wide(predictions.device)
    return predictions.to(dtype), target.to(dtype)


def flat_pairs(metric: object, predictions: Any, target: Any, pairs: str, remedy: str) -> tuple[Tensor, Tensor]:
    """Return predictions and target as flat, detached tensors whose numbers form pairs.

    Shapes that differ only in dimensions of size 1 are accepted, such as [batch, 1] and [batch].

    Args:
        metric: the metric that got them, for the message.
        predictions: as many numbers as the target has, in the same shape except for dimensions of
            size 1. If one of the two is flat, the other may have any shape.
        target: what the predictions are compared with.
        pairs: what the metric compares with what, for the message.
        remedy: what to do about other shapes, for the message.

    Raises:
        DataError: the shapes differ.
    """
    predictions = require_tensor(metric, predictions)
    target = require_tensor(metric, target)
    shapes = [values.squeeze().shape for values in (predictions, target)]
    if predictions.numel() != target.numel() or (shapes[0] != shapes[1] and min(map(len, shapes)) > 1):
        raise _wrong_shapes(metric, predictions, target, pairs, remedy)
    return predictions.flatten(), target.flatten()


def flat_classes(metric: object, predictions: Any, target: Any, what: str, remedy: str) -> tuple[Tensor, Tensor]:
    """Return scores [samples, classes] and classes [samples], detached.

    Args:
        metric: the metric that got them, for the message.
        predictions: scores [batch, …, classes], with any number of dimensions of samples.
        target: integer classes [batch, …].
        what: the name of a class in the plural, for the message.
        remedy: what to do about other shapes, for the message.

    Raises:
        DataError: the shapes differ, or the target is not of integers.
    """
    predictions = require_tensor(metric, predictions)
    target = require_tensor(metric, target)
    if predictions.dim() < 2 or predictions.shape[:-1] != target.shape:
        raise _wrong_shapes(metric, predictions, target, f"scores [batch, {what}] with {what} [batch]", remedy)
    if target.is_floating_point():
        kind = str(target.dtype).removeprefix("torch.")
        raise DataError(f"{type(metric).__name__} takes {what} as integers, and got {kind}; give it target.long()")
    return predictions.flatten(0, -2), target.flatten().long()


def _wrong_shapes(metric: object, predictions: Tensor, target: Tensor, pairs: str, remedy: str) -> DataError:
    got = f"{tuple(predictions.shape)} and {tuple(target.shape)}"
    return DataError(f"{type(metric).__name__} compares {pairs}, and got {got}; {remedy}")


def wide(device: torch.device) -> torch.dtype:
    """Return the type in which a device sums: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def count_outside(values: Tensor, low: float, high: float) -> Tensor:
    """Return how many values are below ``low`` or above ``high``; nan is neither."""
    return ((values < low) | (values > high)).sum()


def count_wrong_labels(labels: Tensor) -> Tensor:
    """Return how many labels are neither 0 nor 1."""
    return ((labels != 0) & (labels != 1)).sum()
