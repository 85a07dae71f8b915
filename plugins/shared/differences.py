"""Where two checkpoints differ, for the commands that compare them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from pipeline.checkpoint.comparison import Difference, differences
from pipeline.checkpoint.reader import LoadedCheckpoint


def checkpoint_differences(one: LoadedCheckpoint, other: LoadedCheckpoint) -> Iterator[Difference]:
    """Where two checkpoints differ."""
    parts = {"counters": (one.train_state, other.train_state), "metrics": (one.metrics, other.metrics)}
    for phase in one.weights | other.weights:
        parts[f"weights {phase}"] = one.weights.get(phase, {}), other.weights.get(phase, {})
    parts["training"] = one.training, other.training
    for rank, own in enumerate(zip_longest(one.own, other.own), 1):
        parts[f"training of rank {rank}"] = own
    for part, pair in parts.items():
        for difference in differences(*pair):
            yield replace(difference, place=f"{part}: {difference.place}" if difference.place else part)
