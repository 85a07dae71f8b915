"""What it costs that a batch is a function of seed, epoch and place: ``python tests/benchmarks/seeding.py``.

The first table has the CPU time of a batch of a user's own map-style dataset, above that of the same loader without a
seed. The batches are tiny, one sample of one number, so that little else is measured. The second table has the CPU time
of a training step in a run, as multiples of that of a loop by hand over the same DataLoader.

Each number is of the least of all rounds, which a busy machine changes least. ``seed: null, again`` shows how far it is
chance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from side_by_side import Clock, Way, seconds_per_step, undisturbed
from small_job import WAYS, DeclaredTable, Table
from torch.utils.data import TensorDataset

from pipeline.data.loader import make_loader

NO_SEED = "seed: null"
RUNS = "pipeline run, DataLoader, a dataset of one's own"


def go_through(make: Callable[[int], Any], steps: int, clock: Clock) -> None:
    """So many batches after a first one, which imports and compiles what it needs."""
    batches = iter(make(steps + 1))
    next(batches)
    clock.start()
    for _ in range(steps):
        next(batches)
    clock.stop()


def loader_of(kind: type[TensorDataset], seed: int | None, samples: int) -> Any:
    """A loader of batches of one number."""
    return make_loader(kind(torch.zeros(samples)), seed=seed)


def without_numpy(way: Callable[[int, Clock], None], steps: int, clock: Clock) -> None:
    """The same as in a process that has not imported numpy."""
    with patch.dict(sys.modules, {"numpy": None}):
        way(steps, clock)


def ways() -> dict[str, Way]:
    """Each way to fetch the same samples."""
    seeded = partial(go_through, partial(loader_of, Table, 0))
    found = {
        NO_SEED: Way(partial(go_through, partial(loader_of, Table, None))),
        f"{NO_SEED}, again": Way(partial(go_through, partial(loader_of, Table, None))),
        "seeded": Way(partial(without_numpy, seeded)),
        "seeded, numpy imported": Way(seeded),
        "uses_random_numbers = False": Way(partial(go_through, partial(loader_of, DeclaredTable, 0))),
    }
    if not find_spec("numpy"):
        del found["seeded, numpy imported"]
    return found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200, help="batches of each way in each round")
    arguments = parser.parse_args()
    with undisturbed():
        batches = seconds_per_step(ways(), arguments.steps, arguments.rounds)["cpu"]
        runs = {name: way for name, way in WAYS.items() if name.startswith(RUNS) or way.beside.startswith(RUNS)}
        reference = next(iter(runs.values())).beside
        steps = seconds_per_step({reference: WAYS[reference], **runs}, arguments.steps, arguments.rounds)["cpu"]
    least = min(batches[NO_SEED])
    print(f"{NO_SEED}: {least * 1e6:.1f} µs a batch")
    for name, each in batches.items():
        print(f"  {name:30} {(min(each) - least) * 1e6:+6.1f} µs a batch")
    least = min(steps[reference])
    print(f"{reference}: {least * 1e6:.1f} µs a step")
    for name in runs:
        print(f"  {name:79} {min(steps[name]) / least:.2f}")


if __name__ == "__main__":
    main()
