"""The numbers that checkpoints know, such as a validation loss, and the iterations that they are of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint import regular
from pipeline.checkpoint.layout import MAX_STATE, STATE
from pipeline.errors import CheckpointError, one_of

Iterations = Mapping[str, Mapping[str, int]]
"""Phase -> name -> the iteration that a number is of."""


def of_one(metrics: Mapping[str, Any], iteration: int) -> Iterations:
    """All numbers are of one iteration."""
    return {phase: dict.fromkeys(each, iteration) for phase, each in metrics.items() if isinstance(each, Mapping)}


def best(paths: Iterable[Path], metric: str, mode: str) -> Path | None:
    """The checkpoint with the highest (``mode`` max) or lowest (min) number of a name; the newest of equals.

    Only numbers of a checkpoint's own iteration count: those of an earlier one judge other weights. Where an earlier
    version did not keep the iterations, of neighbours with the same numbers the first has its own.

    Args:
        paths: the checkpoints, by step.
        metric: the name.
        mode: ``max`` or ``min``.

    Raises:
        CheckpointError: there are checkpoints, and none knows the number as its own.
    """
    known: dict[Path, float] = {}
    names: set[str] = set()
    before: Any = None
    path = None
    for path in paths:
        metrics, own = _of(path, before)
        names.update(name for each in metrics.values() for name in each)
        if isinstance(own.get(metric), int | float):
            known[path] = own[metric]
        before = metrics
    if path and not known:
        if metric in names:
            what = f"no checkpoint is of an iteration in which '{metric}' was reported"
            raise CheckpointError(f"{path.parent}: {what}; save where it is validated, as keep_best does")
        raise CheckpointError(f"{path.parent}: no checkpoint knows '{metric}'{one_of(metric, names)}")
    sign = 1 if mode == "max" else -1
    return max(known, key=lambda path: (sign * known[path], path.name), default=None)


def _of(path: Path, before: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers of one, and those of its own iteration by their names alone; ``before``: the numbers of its neighbour."""
    try:
        state = json.loads(regular.content_of(path / STATE, MAX_STATE))
        metrics, iteration = state["metrics"], state["train_state"]["iteration"]
        iterations = state.get("iterations", {} if metrics == before else of_one(metrics, iteration))
        own = {
            name: value
            for phase, each in metrics.items()
            for name, value in each.items()
            if iterations.get(phase, {}).get(name) == iteration
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE}: cannot be read ({error}); remove this checkpoint") from error
    return metrics, own
