"""The protocol of a metric, and those that are means: Mean, MAE, RMSE, LogLoss, Accuracy."""

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


def tensor(metric: object, value: Any) -> Tensor:
    """The value, detached; it has to be a tensor.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, Tensor):
        what = f"{type(metric).__name__} takes tensors, and got {shape_of(value)}"
        raise DataError(f"{what}; return one tensor, or write a metric of your own")
    return value.detach()


def flat_pairs(metric: object, predictions: Any, target: Any, pairs: str, remedy: str) -> tuple[Tensor, Tensor]:
    """Two flat tensors that go together number by number, detached; [batch, 1] and [batch] do.

    Args:
        metric: whose.
        predictions: as many numbers as the target has; also its shape, but for dimensions of 1, or one of the two is flat.
        target: what they are compared with.
        pairs: what the metric compares with what, for the message.
        remedy: what to do, likewise.

    Raises:
        DataError: the shapes are others.
    """
    predictions, target = tensor(metric, predictions), tensor(metric, target)
    shapes = [values.squeeze().shape for values in (predictions, target)]
    if predictions.numel() != target.numel() or (shapes[0] != shapes[1] and min(map(len, shapes)) > 1):
        raise _refused(metric, predictions, target, pairs, remedy)
    return predictions.flatten(), target.flatten()


def flat_classes(metric: object, predictions: Any, target: Any, what: str, remedy: str) -> tuple[Tensor, Tensor]:
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


def _refused(metric: object, predictions: Tensor, target: Tensor, pairs: str, remedy: str) -> DataError:
    got = f"{tuple(predictions.shape)} and {tuple(target.shape)}"
    return DataError(f"{type(metric).__name__} compares {pairs}, and got {got}; {remedy}")


class Metric(Protocol):
    """What the runner asks of a metric."""

    def update(self, predictions: Any, target: Any) -> None:
        """Take in one batch."""

    def compute(self) -> Any:
        """The number over all batches since the last reset: a float or a tensor with one element."""

    def reset(self) -> None:
        """Start again; called before each pass, the first one too."""


class FromBatch:
    """A metric whose ``update`` also gets fields of the batch, as ``batch:`` of its config says.

    Args:
        metric: which has all other methods.
        fields: keyword argument of its ``update`` -> field of the batch, a mapping.
        where: what messages begin with.
    """

    def __init__(self, metric: Any, fields: Mapping[str, str], where: str) -> None:
        self.metric, self.fields, self.where = metric, fields, where

    def __getattr__(self, name: str) -> Any:
        if name == "metric":
            # A copy in the making has none yet.
            raise AttributeError(name)
        return getattr(self.metric, name)

    def update(self, predictions: Any, target: Any, batch: Any) -> None:
        """Take in one batch."""
        if not isinstance(batch, Mapping):
            raise DataError(f"{self.where}.batch: the batch is {shape_of(batch)}; only a mapping has fields with names")
        for argument, field in self.fields.items():
            if field not in batch:
                what = f"{self.where}.batch.{argument}: the batch has no '{field}'"
                raise DataError(f"{what}{one_of(field, [str(key) for key in batch])}")
        try:
            values = {name: batch[field] for name, field in self.fields.items()}
            fields = {name: value.ids if isinstance(value, SparseSlot) else value for name, value in values.items()}
            self.metric.update(predictions, target, **fields)
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from error


def judge(metric: Any, predictions: Any, target: Any, batch: Any) -> None:
    """Have a metric take in one batch, with the fields that it asks for."""
    if isinstance(metric, FromBatch):
        metric.update(predictions, target, batch)
    else:
        metric.update(predictions, target)


def needs_target(metric: Any) -> bool:
    """Whether ``update`` of a metric has no default for the target."""
    own = metric.metric if isinstance(metric, FromBatch) else metric
    _, *others = inspect.signature(own.update).parameters.values() or (None,)
    return not others or others[0].default is inspect.Parameter.empty


def class_name(metric: Any) -> str:
    """The name of the class of a metric."""
    return type(metric.metric if isinstance(metric, FromBatch) else metric).__name__


# Name -> ``{class, args, batch}``.
Settings: TypeAlias = Mapping[str, Mapping[str, Any]]


def build_metrics(settings: Settings, workspace: Path | None, where: str = "metrics") -> dict[str, Any]:
    """The metrics of a phase: name -> ``{class, args, batch}`` to name -> metric. A bare class name is one of ours."""
    metrics = {}
    for name, metric in settings.items():
        path = metric["class"]
        if isinstance(path, str):
            path = class_path.parse(path, name="Metric", workspace=workspace, module=class_path.METRICS)
        made = class_path.load_class(path, object)(**metric.get("args", {}))
        fields = metric.get("batch") or {}
        address = f"{where}.{name}"
        require_call(made, "update", address, "predictions", "target", fields=fields)
        require_call(made, "compute", address)
        require_call(made, "reset", address)
        metrics[name] = FromBatch(made, fields, address) if fields else made
    return metrics


def require_call(
    metric: Any, method: str, address: str, *arguments: str, fields: Mapping[str, str] | None = None
) -> None:
    """Raise if a method of a metric does not take the arguments that it is called with.

    Args:
        metric: the metric.
        method: the name of the method.
        address: where the config names the metric.
        arguments: names of the arguments that are passed by position, for the message.
        fields: arguments that are passed by name -> field of the batch.

    Raises:
        ConfigError: it does not take them.
    """
    function = getattr(metric, method, None)
    try:
        signature = inspect.signature(function) if callable(function) else None
    except ValueError:
        # A function written in C may not tell what it takes.
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


def build_train_metrics(phase: str, settings: Settings, workspace: Path | None) -> dict[str, Any]:
    """The ``train_metrics`` of a phase by name: beside what a metric has, each has a state.

    Raises:
        ConfigError: one has none, without which no run could go on within an epoch, or those of ranks cannot be merged.
    """
    metrics = build_metrics(settings, workspace, f"phase.{phase}.train_metrics")
    for name, metric in metrics.items():
        if not (hasattr(metric, "state_dict") and hasattr(metric, "load_state_dict")):
            what = f"phase.{phase}.train_metrics.{name}: {class_name(metric)} lacks state_dict or load_state_dict"
            raise ConfigError(f"{what}, without which no run could go on within an epoch; add both")
        own = metric.metric if isinstance(metric, FromBatch) else metric
        address = f"phase.{phase}.train_metrics.{name}"
        require_call(own, "state_dict", address)
        require_call(own, "load_state_dict", address, "state")
        if current_world().size > 1 and not hasattr(metric, "merge"):
            what = f"phase.{phase}.train_metrics.{name}: {class_name(metric)} lacks merge(states)"
            raise ConfigError(f"{what}, without which several processes have no number together; add it")
        # torchmetrics keeps nothing in a state_dict unless it is asked to.
        if hasattr(metric, "persistent"):
            metric.persistent(True)
    return metrics


def wide(device: torch.device) -> torch.dtype:
    """The type in which a device sums up: float64, which MPS doesn't have."""
    return torch.float32 if device.type == "mps" else torch.float64


LABELS = "labels are neither 0 nor 1; make them so, e.g. (rating > 3).float()"

_WEIGHTS = "weights are negative or not finite; a weight says as how many samples one counts"

CLASSES = "numbers in the target are of no score; count from 0, and leave out what is to be ignored"


class SumMetric:
    """Sums by name, kept on the device of the predictions until they are read.

    A batch is added out of place: a state that was handed out stays as it is.

    Attributes:
        mistakes: sums that count what a metric cannot take, with the message that tells them.
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
        """How much each of the values counts, flat and in the type in which a device sums up.

        Raises:
            DataError: there is not one weight per value.
        """
        flat = tensor(self, weights).flatten().to(wide(values.device))
        if flat.numel() != values.numel():
            what = f"{type(self).__name__} weighs {values.numel()} numbers, and got {flat.numel()} weights"
            raise DataError(f"{what}; give one weight per sample")
        self.add(unweighable=(~((flat >= 0) & flat.isfinite())).sum())
        return flat

    def read(self) -> dict[str, Tensor]:
        """The sums, brought to the CPU.

        Raises:
            DataError: there were mistakes among the values.
        """
        sums = {name: total.cpu() for name, total in self.sums.items()}
        for name, message in {**self.mistakes, "unweighable": _WEIGHTS}.items():
            if name in sums and (count := int(sums[name])):
                raise DataError(f"{type(self).__name__}: {count} {message}")
        return sums

    def reset(self) -> None:
        """Start again."""
        self.sums = {}

    def state_dict(self) -> dict[str, Any]:
        """The sums since the last reset: name -> tensor."""
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
    """The mean of a number per sample."""

    def add_values(self, values: Tensor, weights: Any = None) -> None:
        """Add one number per sample, [samples], and how much each counts, alike if there are no weights."""
        if weights is None:
            samples = torch.full((), values.numel(), device=values.device)
            self.add(total=values.sum(dtype=wide(values.device)), samples=samples)
        else:
            weights = self.weights_of(weights, values)
            self.add(total=(values * weights).sum(), samples=weights.sum())

    def compute(self) -> float:
        """The mean over samples; nan if there were none."""
        sums = self.read()
        return float(sums["total"] / sums["samples"]) if sums else math.nan


def outside(values: Tensor, low: float, high: float) -> Tensor:
    """How many values are below ``low`` or above ``high``; a nan is neither."""
    return ((values < low) | (values > high)).sum()


def no_labels(labels: Tensor) -> Tensor:
    """How many labels are neither 0 nor 1."""
    return ((labels != 0) & (labels != 1)).sum()


class Mean(MeanMetric):
    """The mean of the predictions, such as the click rate that a model expects."""

    def update(self, predictions: Tensor, target: Any = None, weights: Tensor | None = None) -> None:
        """Predictions [batch] of any unit, in whatever shape; there is no target. Without weights all count alike."""
        self.add_values(tensor(self, predictions).flatten(), weights)

    def add_mean(self, value: Tensor, samples: int) -> None:
        """Take in a scalar, detached, that is a mean over so many samples."""
        self.add(total=(value * samples).to(wide(value.device)), samples=torch.tensor(samples))


LEAST_LOG = -100.0


class Accuracy(MeanMetric):
    """The share of samples whose class has the greatest score, from 0 to 1; nan where a score is nan."""

    mistakes: ClassVar[Mapping[str, str]] = {"strangers": CLASSES}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Scores [batch, classes] of any scale and classes [batch], from 0; or both with more dimensions of samples.

        Weights are of the shape of the classes; without them all samples count alike.
        """
        scores, classes = flat_classes(self, predictions, target, "classes", "use another metric")
        hits = (scores.argmax(-1) == classes).to(wide(scores.device))
        self.add_values(hits.masked_fill(scores.isnan().any(-1), math.nan), weights)
        self.add(strangers=outside(classes, 0, scores.shape[-1] - 1))


class LogLoss(MeanMetric):
    """Mean binary cross entropy in nats: the mean of -(y log p + (1 - y) log(1 - p)).

    As in torch.nn.BCELoss, a logarithm is at least -100, so that a certain and wrong prediction is not infinite.

    Args:
        from_logits: whether predictions are logits instead of probabilities.
    """

    mistakes: ClassVar[Mapping[str, str]] = {
        "improbable": "predictions outside [0, 1] are no probabilities; for logits write args: {from_logits: true}",
        "unlabelled": "labels are outside [0, 1]; make them 0 and 1, or probabilities",
    }

    def __init__(self, from_logits: bool = False) -> None:
        super().__init__()
        self.from_logits = from_logits

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Predictions and labels in [0, 1], and weights, of one shape, such as [batch]; without weights all count alike."""
        p, y = numbers(self, predictions, target, "labels")
        if self.from_logits:
            self.add_values(torch.nn.functional.binary_cross_entropy_with_logits(p, y, reduction="none"), weights)
        else:
            # torch's own looks at the probabilities first, and so waits for the device.
            self.add_values(-y * p.log().clamp(min=LEAST_LOG) - (1 - y) * (-p).log1p().clamp(min=LEAST_LOG), weights)
            self.add(improbable=outside(p, 0, 1))
        self.add(unlabelled=outside(y, 0, 1))


class MAE(MeanMetric):
    """Mean absolute error, in the unit of the target: the mean of |prediction - target|."""

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Predictions, targets and weights of one shape, such as [batch]; without weights all count alike."""
        predictions, target = numbers(self, predictions, target, "targets")
        self.add_values((predictions - target).abs(), weights)


class RMSE(MeanMetric):
    """Root mean square error, in the unit of the target: the root of the mean of (prediction - target)² over the whole pass."""

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Predictions, targets and weights of one shape, such as [batch]; without weights all count alike."""
        predictions, target = numbers(self, predictions, target, "targets")
        self.add_values((predictions - target).square(), weights)

    def compute(self) -> float:
        """The root; nan if there was nothing."""
        return math.sqrt(super().compute())


def numbers(metric: object, predictions: Tensor, target: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Predictions and target as flat tensors, of the type in which they are summed.

    Raises:
        DataError: they are not of one shape.
    """
    pairs = f"predictions [batch] with {what} [batch]"
    predictions, target = flat_pairs(metric, predictions, target, pairs, "return one prediction per sample")
    dtype = wide(predictions.device)
    return predictions.to(dtype), target.to(dtype)
