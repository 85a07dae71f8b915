"""Metrics of several ranks: those with ``merge`` judge slices of batches, any other whole batches on rank 0."""

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

# What torch and python raise where values do not fit each other.
_MISFITS = (RuntimeError, TypeError, ValueError, KeyError)

_CPU = torch.device("cpu")

# Called with predictions, target and batch.
Observe = Callable[[Any, Any, Any], None]


class _Part(NamedTuple):
    """What one rank has of a batch.

    Attributes:
        predictions: what metrics judge; None if each rank judges its own slices.
        target: the target.
        batch: the batch; None if nothing needs it.
        written: what is written, alone in a tuple; empty: the predictions, or nothing.
        samples: how many it has.
    """

    predictions: Any
    target: Any
    batch: Any
    written: tuple[Any, ...]
    samples: int


class Judges:
    """The metrics of a pass, and what observes it; of several ranks they judge as those of one process do.

    Args:
        metrics: name -> metric; reset.
        observe: called with (what is written, target, batch) of each batch, on rank 0; or None.
        world: the ranks.
        device: where whole batches are judged.

    Attributes:
        sliced: the metrics that each rank has judge its own slices.
        whole: those that judge whole batches, on rank 0.
        gathers: whether whole batches are needed.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], observe: Observe | None, world: World, device: torch.device
    ) -> None:
        self.observe, self.world, self.device = observe, world, device
        self.sliced = {name: own for name, own in metrics.items() if world.size == 1 or hasattr(own, "merge")}
        self.whole = {name: own for name, own in metrics.items() if name not in self.sliced}
        self.gathers = world.size > 1 and bool(self.whole or observe)
        self._keeps_batch = bool(observe) or any(isinstance(own, FromBatch) for own in self.whole.values())
        for metric in metrics.values():
            metric.reset()

    def judge(self, *part: Any, has_samples: bool = True) -> None:
        """Judge (predictions, target, batch, what is written), or nothing without a part of it.

        Without ``has_samples``, the batch has rows to observe, but no metric judges it.
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
        """Return what other ranks need of a part; without what nothing uses."""
        kept = batch if self._keeps_batch else None
        judged = predictions if self.whole else None
        observed = (written,) if self.observe and written is not judged else ()
        return _Part(judged, target, kept, observed, count_targets(batch))

    def _gather(self, own: Any, has_samples: bool) -> None:
        """Have a whole batch judged, of which this rank has a part, or None; and observed."""
        gathered = self.world.all_gather((to_device(own, _CPU), has_samples))
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
        """Join the parts of ranks to a whole batch, for metrics and for ``observe``."""
        if not parts or not (metrics or observe):
            return
        counts = tuple(part.samples for part in parts)
        batches = [part.batch for part in parts]
        predictions, target = self._join_judged(parts, counts)
        written = self._join_written(parts, counts, predictions) if observe else None
        # Ids of samples may be looked up in a batch; what cannot be joined is left out.
        batch = {}
        for name in batches[0] if isinstance(batches[0], Mapping) else ():
            with suppress(*_MISFITS):
                batch[name] = join(tuple(part[name] for part in batches), counts)
        with self.world.alone():
            for metric in metrics.values():
                judge(metric, predictions, target, to_device(batch, self.device))
            if observe:
                observe(written, target, batch)

    def _join_judged(self, parts: list[_Part], counts: tuple[int, ...]) -> tuple[Any, Any]:
        """Join predictions and targets for the metrics that judge whole batches."""
        predictions = tuple(part.predictions for part in parts)
        targets = tuple(part.target for part in parts)
        try:
            whole = join(predictions, counts), join(targets, counts)
        except _MISFITS as error:
            own = [f"metric '{name}' ({class_name(metric)})" for name, metric in self.whole.items()]
            who = "predictions: the target"
            if own:
                who = f"{own[-1]} has no merge(states), and what it judges"
            remedy = ", or add merge to the metric" if own else ""
            raise _misfit(who, predictions if own else targets, error, remedy) from error
        joined: tuple[Any, Any] = to_device(whole, self.device)
        return joined

    def _join_written(
        self,
        parts: list[_Part],
        counts: tuple[int, ...],
        predictions: Any,
    ) -> Any:
        """Join what is written: the predictions themselves, or what was made of them."""
        written = tuple(chain.from_iterable(part.written for part in parts))
        if not written:
            return predictions
        try:
            return to_device(join(written, counts), self.device)
        except _MISFITS as error:
            raise _misfit("predictions: what is written", written, error) from error


def _misfit(who: str, slices: Sequence[Any], error: Exception, remedy: str = "") -> DataError:
    what = f"{who} cannot be joined to whole batches: slices are {shape_of(slices[0], 1)} ({error})"
    return DataError(f"{what}; return a row per sample along the first dimension{remedy}")


def in_step(batches: Iterable[Any], world: World) -> Iterator[Any]:
    """The batches of a rank, of which others may have more: empty slices follow until all are at their end."""
    for batch in batches:
        world.all_gather(True)
        yield batch
    while any(world.all_gather(False)):
        yield EmptySlice(None)


def join(parts: tuple[Any, ...], counts: tuple[int, ...]) -> Any:
    """What ranks have of their slices of a batch, as the whole batch: tensors by their first dimension, however deep.

    Args:
        parts: that of each slice: tensors, arrays, mappings, tuples and lists of these, or lists with a value for each sample.
        counts: the samples of each slice.

    Raises:
        ValueError, RuntimeError, TypeError, KeyError: they do not fit.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(parts)
    if isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
        return {name: join(tuple(part[name] for part in parts), counts) for name in first}
    if isinstance(first, SparseSlot):
        before = accumulate((len(part.values) for part in parts[:-1]), initial=0)
        offsets = [part.offsets + count for part, count in zip(parts, before, strict=True)]
        return SparseSlot(torch.cat([part.values for part in parts]), torch.cat(offsets))
    if isinstance(first, list | tuple):
        # A value for each sample, rather than columns of all samples.
        sizes = [(length, count) for part, count in zip(parts, counts, strict=True) for length in lengths(part)]
        has_columns = bool(sizes) and all(length == count for length, count in sizes)
        if not has_columns and list(map(len, parts)) == list(counts):
            return type(first)(chain(*parts))
        columns = [join(column, counts) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if any(part is not None for part in parts):
        raise ValueError(f"{shape_of(first)} has no row per sample")
    return None


def computed(metrics: Mapping[str, Metric], world: World) -> dict[str, float]:
    """The numbers of metrics, on all ranks those of rank 0; metrics with ``merge`` are merged before.

    Raises:
        DataError: one has computed something else.
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
