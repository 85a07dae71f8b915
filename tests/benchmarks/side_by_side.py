"""Several ways to do one job, measured in turn within one run, so that what the machine does meets all of them alike."""

from __future__ import annotations

import cProfile
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import NamedTuple

import torch

from pipeline.run import log


class Clock:
    """Wall and CPU seconds of one training pass; whoever trains starts and stops it around the loop."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        """The loop begins."""
        self.wall, self.cpu = -time.perf_counter(), -time.process_time()

    def stop(self) -> None:
        """The loop is over."""
        self.wall += time.perf_counter()
        self.cpu += time.process_time()


class Way(NamedTuple):
    """A way to do the job.

    Attributes:
        train: trains so many steps, the clock running in the loop.
        beside: the name of the way that it is compared with: the raw loop with the same features; "" for a raw loop.
    """

    train: Callable[[int, Clock], None]
    beside: str = ""


class Spread(NamedTuple):
    """A ratio over several rounds: its median, and between what half of the rounds lie."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


@contextmanager
def undisturbed() -> Iterator[None]:
    """On one thread, and with what ``pipeline run`` writes to a stderr that is no terminal going nowhere."""
    threads = torch.get_num_threads()
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        log.to_stderr("INFO")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(threads)


def profiled(way: Way, steps: int) -> dict[str, int]:
    """How often each function was called, Python's and C's, in so many steps."""
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()  # what it finalizes, and when, is no part of a step
    try:
        profile.runcall(way.train, steps, Clock())
    finally:
        gc.enable()
    counts: dict[str, int] = {}
    for row in profile.getstats():
        name = row.code if isinstance(row.code, str) else f"{row.code.co_filename}:{row.code.co_qualname}"
        counts[name] = counts.get(name, 0) + row.callcount
    return counts


def calls_per_step(way: Way, steps: int = 500) -> dict[str, float]:
    """Calls a step, by function; what a run costs once drops out in the difference between all steps and half of them."""
    half = steps // 2
    way.train(half, Clock())
    few, many = profiled(way, half), profiled(way, steps)
    return {name: (count - few.get(name, 0)) / (steps - half) for name, count in many.items()}


def seconds_per_step(ways: Mapping[str, Way], steps: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds a step of each way in each round, every round in an order of its own.

    Many short rounds tell more than few long ones: what else the machine does then meets all ways in one round alike.

    Args:
        ways: name -> way.
        steps: of each way in each round.
        rounds: how many.

    Returns:
        ``wall`` and ``cpu`` -> name -> one number per round.
    """
    order, draw = list(ways), random.Random(0)
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in ways} for kind in ("wall", "cpu")}
    for name in order:
        ways[name].train(min(steps, 50), Clock())
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            clock = Clock()
            gc.collect()
            ways[name].train(steps, clock)
            for kind, each in seconds.items():
                each[name].append(getattr(clock, kind) / steps)
    return seconds


def ratio(seconds: list[float], reference: list[float]) -> Spread:
    """The times as multiples of those that the reference took in the same rounds."""
    each = [own / other for own, other in zip(seconds, reference, strict=True)]
    least, median, most = statistics.quantiles(each, n=4)
    return Spread(median, least, most)
