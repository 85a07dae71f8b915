"""Running means of numbers that stay on their device until the mean is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from pipeline.distributed.world import World, current_world
from pipeline.errors import DataError

# How many numbers may wait on their device until they are read.
MOST = 1000


class Meter:
    """The mean of one number per batch, weighted by samples.

    There is a mean over the pass, and a recent mean over the time since it was last returned.

    Adding a number never waits for the device, since many numbers are read at once. They are summed
    one by one in float64, so the result does not depend on when they are read. A number that is not
    finite is counted, but left out of the means.

    Attributes:
        waiting: (number, samples) of each number that was not read yet. A loop may append to it
            directly.
        batches: how many numbers of the pass were read, including those that are not finite.
        samples: the sum of their samples.
        nonfinite: how many of them were not finite.
        first: (position, value) of the first number that was not finite; the position in the pass
            counts from 1. None if all were finite.

    Example:
        >>> import torch
        >>> from pipeline.metrics.meters import Meter
        >>> meter = Meter()
        >>> meter.add(torch.tensor(1.0), samples=3)
        >>> meter.add(torch.tensor(5.0), samples=1)
        >>> meter.mean()
        2.0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset for a new pass."""
        self.waiting: list[tuple[Tensor, int]] = []
        self.batches = 0
        self.samples = 0
        self.nonfinite = 0
        self.first: tuple[int, float] | None = None
        self._total = 0.0
        self._count = 0
        self._recent_total = 0.0
        self._recent_count = 0

    def add(self, value: Tensor, samples: int) -> None:
        """Add a detached scalar that is a mean over ``samples``."""
        self.waiting.append((value, samples))

    def read(self) -> None:
        """Read the numbers that are still on the device. On a GPU this waits for the work so far.

        With multiple ranks it does nothing: only ``count_together`` counts the numbers, on all
            ranks.
        """
        if self.waiting and current_world().size == 1:
            self.count(self.taken())

    def taken(self) -> list[tuple[float, int]]:
        """Remove the numbers that wait, and return each with its samples."""
        if not self.waiting:
            return []
        numbers = [value for value, _ in self.waiting]
        if len({value.device for value in numbers}) > 1:
            numbers = [value.cpu() for value in numbers]
        samples = [samples for _, samples in self.waiting]
        self.waiting.clear()
        return list(zip(torch.stack(numbers).double().tolist(), samples, strict=True))

    def count(self, numbers: Iterable[tuple[float, int]]) -> None:
        """Count numbers, each with its samples."""
        for value, samples in numbers:
            self.batches += 1
            self.samples += samples
            # True if the value is not finite. math.isfinite would be one more call for each number.
            if value - value != 0:
                self.nonfinite += 1
                self.first = self.first or (self.batches, value)
                continue
            self._total += value * samples
            self._count += samples
            self._recent_total += value * samples
            self._recent_count += samples

    def recent(self) -> float:
        """Return the mean since the last call; nan if no number was finite."""
        self.read()
        mean = self._recent_total / self._recent_count if self._recent_count else math.nan
        self._recent_total = 0.0
        self._recent_count = 0
        return mean

    def mean(self) -> float:
        """Return the mean over the pass so far; nan if no number was finite."""
        self.read()
        return self._total / self._count if self._count else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue. On a GPU this waits for the work so far."""
        self.read()
        return {name: value for name, value in vars(self).items() if name != "waiting"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.waiting.clear()
        vars(self).update(state)


class Meters(dict[str, Meter]):
    """Means by name, which ``self.log(name, value)`` fills.

    Args:
        count_samples: returns the number of samples in the active batch. None counts one sample for
            each number.

    Example:
        >>> from pipeline.metrics.meters import Meters
        >>> meters = Meters()
        >>> meters.log("length", 2)
        >>> meters.log("length", 8, batch_size=2)
        >>> meters.means()
        {'length': 6.0}
    """

    def __init__(self, count_samples: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._count_samples = count_samples

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Add a number that is a mean over samples.

        A mean over 0 samples adds nothing, whatever its value.

        Args:
            name: the name of the mean.
            value: a number, or a tensor without dimensions.
            batch_size: the number of samples; None takes the number of samples in the batch.

        Raises:
            DataError: the value has dimensions.
        """
        if name not in self:
            self[name] = Meter()
        number = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        if number.ndim:
            raise DataError(f"log('{name}', …) was given a tensor of shape {tuple(number.shape)}; give it a scalar")
        samples = batch_size
        if samples is None:
            samples = self._count_samples() if self._count_samples else 1
        if not samples:
            return
        meter = self[name]
        meter.add(number, samples)
        if len(meter.waiting) >= MOST:
            meter.read()

    def recent(self) -> dict[str, float]:
        """Return each mean since the last call."""
        return {name: meter.recent() for name, meter in self.items()}

    def means(self) -> dict[str, float]:
        """Return each mean over the pass so far."""
        return {name: meter.mean() for name, meter in self.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each meter by name."""
        return {name: meter.state_dict() for name, meter in self.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name, meter_state in state.items():
            self[name] = Meter()
            self[name].load_state_dict(meter_state)


def count_together(loss: Meter, logged: Meters, samples: int, world: World) -> int:
    """Count the waiting numbers of all ranks on every rank. All ranks call it.

    Args:
        loss: has one number per batch. Each rank has the loss of its slice; the loss of the whole
            batch is the mean over the samples of all slices.
        logged: the numbers of each rank are counted as they are.
        samples: any number of this rank.
        world: the ranks.

    Returns:
        The sum of ``samples`` over all ranks.
    """
    own_losses = loss.taken()
    own_logged = {name: meter.taken() for name, meter in logged.items()}
    ranks = world.all_gather((own_losses, own_logged, samples))
    # A rank with fewer batches has an empty slice of the others.
    batches = zip_longest(*(losses for losses, _, _ in ranks), fillvalue=(0.0, 0))
    loss.count(map(mean_of_slices, batches))
    for _, numbers, _ in ranks:
        for name, each in numbers.items():
            logged.setdefault(name, Meter()).count(each)
    return sum(count for _, _, count in ranks)


def mean_of_slices(slices: tuple[tuple[float, int], ...]) -> tuple[float, int]:
    """Return the loss and the samples of a batch from the (loss, samples) of its slices."""
    total = 0.0
    samples = 0
    # A sum over a generator expression would make multiple calls per step.
    for loss, count in slices:
        if count:
            total += loss * count
            samples += count
    return total / (samples or 1), samples
