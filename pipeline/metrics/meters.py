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

# Numbers that may wait on their device until they are read.
MOST = 1000


class Meter:
    """The mean of one number per batch, weighted by samples: over a pass, and since it was last read.

    Adding a number never waits for the device: many are read at once. They are summed one by one in float64, so the
    moment of reading changes nothing. What is not finite is counted, and left out of the means.

    Attributes:
        waiting: (number, samples) of each that is not read yet; a loop may append to it itself.
        batches, samples: how many there were in the pass, as far as read; those that are not finite included.
        nonfinite: how many numbers of the pass were not finite, as far as read.
        first: the first of them: its place in the pass, counted from 1, and its value; None: there is none.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset for a new pass."""
        self.waiting: list[tuple[Tensor, int]] = []
        self.batches = self.samples = self.nonfinite = 0
        self.first: tuple[int, float] | None = None
        self._total, self._count, self._recent_total, self._recent_count = 0.0, 0, 0.0, 0

    def add(self, value: Tensor, samples: int) -> None:
        """Add a detached scalar that is a mean over ``samples``."""
        self.waiting.append((value, samples))

    def read(self) -> None:
        """Read the numbers that are still on the device; on a GPU this waits for the work so far.

        Of several ranks, those of all are counted by ``count_together`` alone.
        """
        if self.waiting and current_world().size == 1:
            self.count(self.taken())

    def taken(self) -> list[tuple[float, int]]:
        """The numbers that waited, each with its samples; now none waits."""
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
            # What is not finite; a function that says so would be a call for each number.
            if value - value != 0:
                self.nonfinite += 1
                self.first = self.first or (self.batches, value)
                continue
            self._total += value * samples
            self._count += samples
            self._recent_total += value * samples
            self._recent_count += samples

    def recent(self) -> float:
        """The mean since the last call; nan if there was nothing finite."""
        self.read()
        mean = self._recent_total / self._recent_count if self._recent_count else math.nan
        self._recent_total, self._recent_count = 0.0, 0
        return mean

    def mean(self) -> float:
        """The mean over the pass so far; nan if there was nothing finite."""
        self.read()
        return self._total / self._count if self._count else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to continue; on a GPU this waits for the work so far."""
        self.read()
        return {name: value for name, value in vars(self).items() if name != "waiting"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that state."""
        self.waiting.clear()
        vars(self).update(state)


class Meters(dict[str, Meter]):
    """Means by name, as ``self.log(name, value)`` fills them.

    Args:
        count_samples: returns how many samples the active batch has; None counts one sample for each number.
    """

    def __init__(self, count_samples: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._count_samples = count_samples

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Add a number that is a mean over ``batch_size`` samples; None: the samples of the batch.

        A mean over no samples adds nothing, whatever it is.
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
        """The mean of each since the last call."""
        return {name: meter.recent() for name, meter in self.items()}

    def means(self) -> dict[str, float]:
        """The mean of each over the pass so far."""
        return {name: meter.mean() for name, meter in self.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each."""
        return {name: meter.state_dict() for name, meter in self.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that state."""
        for name, meter_state in state.items():
            self[name] = Meter()
            self[name].load_state_dict(meter_state)


def count_together(loss: Meter, logged: Meters, samples: int, world: World) -> int:
    """Count the numbers of all ranks that wait, on all of them; all call it.

    Args:
        loss: has one number per batch: that of the whole batch is the mean over the samples of its slices.
        logged: those of each rank count as they are.
        samples: any number of this rank.
        world: the ranks.

    Returns:
        The sum of ``samples`` of all ranks.
    """
    own = loss.taken(), {name: meter.taken() for name, meter in logged.items()}, samples
    ranks = world.all_gather(own)
    loss.count(map(mean_of_slices, zip_longest(*(losses for losses, _, _ in ranks), fillvalue=(0.0, 0))))
    for _, numbers, _ in ranks:
        for name, each in numbers.items():
            logged.setdefault(name, Meter()).count(each)
    return sum(count for _, _, count in ranks)


def mean_of_slices(slices: tuple[tuple[float, int], ...]) -> tuple[float, int]:
    """The loss of a batch, of those of its slices."""
    total, samples = 0.0, 0
    # A sum of a comprehension would be several calls a step.
    for value, own in slices:
        if own:
            total, samples = total + value * own, samples + own
    return total / (samples or 1), samples
