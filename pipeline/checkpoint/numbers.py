"""The numbers that checkpoints know, such as a validation loss."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.checkpoint import regular
from pipeline.checkpoint.layout import MAX_STATE, STATE
from pipeline.errors import CheckpointError, one_of


def best(paths: Iterable[Path], metric: str, mode: str) -> Path | None:
    """The checkpoint with the highest (``mode`` max) or lowest (min) number of a name; the newest of equals.

    Raises:
        CheckpointError: there are checkpoints, and none knows the number.
    """
    numbers = {path: _of(path) for path in paths}
    known = {path: each[metric] for path, each in numbers.items() if isinstance(each.get(metric), int | float)}
    if numbers and not known:
        found = one_of(metric, {name for each in numbers.values() for name in each})
        raise CheckpointError(f"{next(iter(numbers)).parent}: no checkpoint knows '{metric}'{found}")
    sign = 1 if mode == "max" else -1
    return max(known, key=lambda path: (sign * known[path], path.name), default=None)


def _of(path: Path) -> dict[str, Any]:
    """The numbers of one, of whichever phase."""
    try:
        metrics = json.loads(regular.content_of(path / STATE, MAX_STATE))["metrics"]
        return {name: value for phase in metrics.values() for name, value in phase.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE}: cannot be read ({error}); remove this checkpoint") from error
