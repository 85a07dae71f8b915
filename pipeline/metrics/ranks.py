"""Metrics in a world of multiple ranks.

A metric with ``merge`` is updated on each rank with that rank's slices of the batches, and merged
at the end of the pass. Any other metric is updated on rank 0 with whole batches, which are joined
from the slices of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.data.batch import EmptySlice, SparseSlot, count_targets, lengths, shape_of, to_device
from pipeline.distributed.world import World
from pipeline.errors import DataError
from pipeline.metrics.base import FromBatch, Metric, class_name, judge

# What torch and Python raise if values cannot be joined.
_JOIN_ERRORS = (RuntimeError, TypeError, ValueError, KeyError)

_CPU = torch.device("cpu")

# A function that is called with predictions, target and batch.
Observe = Callable[[Any, Any, Any], None]


class Judges:
    """The metrics and the observer of a pass.

    With multiple ranks, the results are the same as in a single process.

    Args:
        metrics: name -> metric. They are reset.
        observe: called on rank 0 with (what is written, target, batch) of each batch; None if there
            is nothing to observe.
        world: the ranks.
        device: where metrics judge whole batches.

    Attributes:
        sliced: the metrics that each rank updates with its slices.
        whole: the metrics that rank 0 updates with whole batches.
        gathers: whether whole batches are needed. Then all ranks must call ``judge`` equally often.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], observe: Observe | None, world: World, device: torch.device
    ) -> None:
        self.observe = observe
        self.world = world
        self.device = device
        self.sliced = {name: each for name, each in metrics.items() if world.size == 1 or hasattr(each, "merge")}
        self.whole = {name: each for name, each in metrics.items() if name not in self.sliced}
        self.gathers = world.size > 1 and bool(self.whole or observe)
        self._keeps_batch = bool(observe) or any(isinstance(each, FromBatch) for each in self.whole.values())
        for metric in metrics.values():
            metric.reset()

    def judge(self, *part: Any, has_samples: bool = True) -> None:
        """Update the metrics and call the observer with one batch, or with this rank's slice of it.

        Args:
            part: (predictions, target, batch, what is written); nothing if this rank's slice is
                empty.
            has_samples: False for a batch with rows to observe but without samples; no metric
                judges it.

        Raises:
            DataError: a metric refuses the batch, or the slices of the ranks cannot be joined.
        """
        if part and has_samples:
            for metric in self.sliced.values():
                judge(metric, *part[:3])
        if self.gathers:
            self._gather(self._part_to_gather(*part) if part else None, has_samples)
        elif self.observe and part:
            _, target, batch, written = part
            self.observe(written, target, batch)

    def _part_to_gather(self, predictions: Any, target: Any, batch: Any, written: Any) -> _Part:
        """Return what rank 0 needs of a slice, and nothing else."""
        judged = predictions if self.whole else None
        kept_batch = batch if self._keeps_batch else None
        # What is written is sent only if it is not sent as predictions.
        kept_written = (written,) if self.observe and written is not judged else ()
        return _Part(judged, target, kept_batch, kept_written, count_targets(batch))

    def _gather(self, own_part: _Part | None, has_samples: bool) -> None:
        """Gather the slices of a batch on rank 0, and judge and observe the whole batch there."""
        gathered = self.world.all_gather((to_device(own_part, _CPU), has_samples))
        if not self.world.is_main:
            return
        parts = [part for part, _ in gathered if part is not None]
        judged = [part for part, counts in gathered if part is not None and counts]
        if len(judged) == len(parts):
            self._use(parts, self.whole, self.observe)
        else:
            self._use(judged, self.whole, None)
            self._use(parts, {}, self.observe)

    def _use(
        self,
        parts: list[Any],
        metrics: Mapping[str, Metric],
        observe: Observe | None,
    ) -> None:
        """Join slices to a whole batch, update the metrics with it, and call ``observe``."""
        if not parts or not (metrics or observe):
            return
        counts = tuple(part.samples for part in parts)
        predictions, target = self._join_judged(parts, counts)
        written = self._join_written(parts, counts, predictions) if observe else None
        batch = self._join_batches([part.batch for part in parts], counts)
        with self.world.alone():
            for metric in metrics.values():
                judge(metric, predictions, target, to_device(batch, self.device))
            if observe:
                observe(written, target, batch)

    def _join_judged(self, parts: list[_Part], counts: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the joined predictions and targets, on the device of the metrics."""
        predictions = tuple(part.predictions for part in parts)
        targets = tuple(part.target for part in parts)
        try:
            whole = join(predictions, counts), join(targets, counts)
        except _JOIN_ERRORS as error:
            if not self.whole:
                raise _cannot_join("predictions: the target", targets, error) from error
            name, metric = list(self.whole.items())[-1]
            what = f"metric '{name}' ({class_name(metric)}) has no merge(states), and what it judges"
            raise _cannot_join(what, predictions, error, ", or add merge to the metric") from error
        joined: tuple[Any, Any] = to_device(whole, self.device)
        return joined

    def _join_written(
        self,
        parts: list[_Part],
        counts: tuple[int, ...],
        predictions: Any,
    ) -> Any:
        """Return what is written, joined; the joined predictions if these are what is written."""
        written = tuple(chain.from_iterable(part.written for part in parts))
        if not written:
            return predictions
        try:
            return to_device(join(written, counts), self.device)
        except _JOIN_ERRORS as error:
            raise _cannot_join("predictions: what is written", written, error) from error

    @staticmethod
    def _join_batches(batches: list[Any], counts: tuple[int, ...]) -> dict[str, Any]:
        """Join the fields of the batches, and leave out fields that cannot be joined.

        Metrics and observers look up fields, such as the ids of samples.
        """
        joined = {}
        for name in batches[0] if isinstance(batches[0], Mapping) else ():
            with suppress(*_JOIN_ERRORS):
                joined[name] = join(tuple(batch[name] for batch in batches), counts)
        return joined


class _Part(NamedTuple):
    """What one rank sends of its slice of a batch.

    Attributes:
        predictions: what metrics judge; None if no metric judges whole batches.
        target: the target.
        batch: the batch; None if it is not needed.
        written: a tuple with what is written; empty if that is the predictions, or if nothing is
            written.
        samples: how many samples the slice has.
    """

    predictions: Any
    target: Any
    batch: Any
    written: tuple[Any, ...]
    samples: int


def in_step(batches: Iterable[Any], world: World) -> Iterator[Any]:
    """Yield the batches of a rank, and then empty slices until all ranks have no more batches."""
    for batch in batches:
        world.all_gather(True)
        yield batch
    while any(world.all_gather(False)):
        yield EmptySlice(None)


def computed(metrics: Mapping[str, Metric], world: World) -> dict[str, float]:
    """Return the numbers of metrics by name. All ranks call it and get the numbers of rank 0.

    Metrics with ``merge`` are merged first.

    Raises:
        DataError: a metric has computed something other than one number.
    """
    mergeable: list[Any] = [metric for metric in metrics.values() if world.size > 1 and hasattr(metric, "merge")]
    for metric in mergeable:
        metric.merge(world.all_gather(to_device(metric.state_dict(), _CPU)))
    if not world.is_main:
        return world.broadcast({})
    numbers = {}
    with world.alone():
        for name, metric in metrics.items():
            value = metric.compute()
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                what = f"metric '{name}': {class_name(metric)}.compute returned {shape_of(value)}"
                raise DataError(f"{what}; return a number, or a tensor with one element") from error
    return world.broadcast(numbers)


def join(parts: tuple[Any, ...], counts: tuple[int, ...]) -> Any:
    """Join the slices of a batch to the whole batch.

    Tensors are joined along their first dimension, also inside of mappings, tuples and lists.

    Args:
        parts: one value per slice: a tensor, a ``SparseSlot``, a list with a value for each sample,
            or a mapping, tuple or list of these.
        counts: the number of samples in each slice.

    Returns:
        The joined value; None if all parts are None.

    Raises:
        ValueError, RuntimeError, TypeError, KeyError: the slices cannot be joined.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(parts)
    if isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
        return {name: join(tuple(part[name] for part in parts), counts) for name in first}
    if isinstance(first, SparseSlot):
        # The offsets of a slice count from its first value.
        shifts = accumulate((len(part.values) for part in parts[:-1]), initial=0)
        offsets = [part.offsets + shift for part, shift in zip(parts, shifts, strict=True)]
        return SparseSlot(torch.cat([part.values for part in parts]), torch.cat(offsets))
    if isinstance(first, list | tuple):
        if not _are_columns(parts, counts) and list(map(len, parts)) == list(counts):
            # One value for each sample.
            return type(first)(chain(*parts))
        columns = [join(column, counts) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if any(part is not None for part in parts):
        raise ValueError(f"{shape_of(first)} has no row per sample")
    return None


def _are_columns(parts: tuple[Any, ...], counts: tuple[int, ...]) -> bool:
    """Return whether lists hold tensors with one row for each sample of their slice."""
    has_tensors = False
    for part, count in zip(parts, counts, strict=True):
        for length in lengths(part):
            if length != count:
                return False
            has_tensors = True
    return has_tensors


def _cannot_join(what: str, slices: Sequence[Any], error: Exception, remedy: str = "") -> DataError:
    message = f"{what} cannot be joined to whole batches: slices are {shape_of(slices[0], 1)} ({error})"
    return DataError(f"{message}; return a row per sample along the first dimension{remedy}")
