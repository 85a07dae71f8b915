"""Seconds a batch of small samples, beside torch's DataLoader: ``python tests/benchmarks/small_samples.py``.

All ways of a row are measured in turn within each round. Of each, the table has how many times as fast as torch's DataLoader
it is, with what half of the rounds lie between; torch's against itself shows how far that is chance. What must hold is 5 times
at 512 samples a batch, and 3 times at 32.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from side_by_side import Clock, Way, ratio, seconds_per_step, undisturbed
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pipeline.data.loader import make_loader

TORCH = "torch's DataLoader"


class Whole(Dataset[Any]):
    """A dataset of a user's own that gives whole batches."""

    def __init__(self, table: TensorDataset) -> None:
        self.tensors = table.tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """The batch."""
        places = torch.tensor(indices)
        return [tensor[places] for tensor in self.tensors]


def rows(samples: int, fields: int) -> TensorDataset:
    """Samples of 64 numbers and a label, or of so many numbers each in a tensor of its own."""
    if fields == 2:
        return TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,)))
    return TensorDataset(*(torch.randn(samples) for _ in range(fields)))


def go_through(loader: Any, steps: int, clock: Clock) -> None:
    """So many batches, the first of which is not measured: where there are workers, they start."""
    batches = iter(loader)
    next(batches)
    clock.start()
    for _ in range(steps):
        next(batches)
    clock.stop()


def ways(batch_size: int, fields: int, workers: int, steps: int) -> dict[str, Way]:
    """Each way to go over the same samples, shuffled."""
    table = rows(batch_size * (max(steps, 50) + 1), fields)
    settings: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
    loaders = {
        TORCH: DataLoader(table, **settings),
        "the same again": DataLoader(table, **settings),
        "a table": make_loader(table, seed=0, **settings),
        "a Subset of a table": make_loader(Subset(table, range(len(table))), seed=0, **settings),
        "whole_batches": make_loader(Whole(table), seed=0, whole_batches=True, **settings),
        "the same, no seed": make_loader(Whole(table), seed=None, whole_batches=True, **settings),
    }
    return {name: Way(partial(go_through, loader), TORCH) for name, loader in loaders.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="batches of each way in each round")
    arguments = parser.parse_args()
    for batch_size, fields in ((32, 2), (512, 2), (512, 7)):
        table = ways(batch_size, fields, arguments.workers, arguments.steps)
        with undisturbed():
            # What workers compute is not of this process.
            kind = "wall" if arguments.workers else "cpu"
            seconds = seconds_per_step(table, arguments.steps, arguments.rounds)[kind]
        print(f"{batch_size} samples of {fields} fields, {arguments.workers} workers")
        for name, each in seconds.items():
            times = "" if name == TORCH else f"{ratio(seconds[TORCH], each)} times as fast"
            print(f"  {name:20} {statistics.median(each) * 1e6:8.1f} µs a batch  {times}")


if __name__ == "__main__":
    main()
