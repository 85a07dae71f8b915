"""What a run has measured so far, read from its ``metrics.jsonl``, which may be being written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.checkpoint import storage
from pipeline.errors import CheckpointError, StorageError, one_of
from pipeline.run.directory import is_run_directory
from pipeline.run.runs import list_runs, parse_numbers


def read_values(run_dir: Path, metric: str) -> dict[int, float]:
    """Iteration -> the metric, in each validation, epoch or evaluation in which it is a number.

    Args:
        run_dir: the run directory.
        metric: a column of ``pipeline runs``. Without the name of a runner or phase it is that of the only one that has it.
    """
    series: dict[tuple[str, str], dict[int, float]] = {}
    for file in sorted(run_dir.glob("*/metrics.jsonl")):
        for event, iteration, phase, numbers in _lines(file):
            names = {f"{prefix}{name}": value for name, value in numbers.items() for prefix in _prefixes(file, phase)}
            if event != "train" and metric in names:
                own = series.setdefault((file.parent.name, phase), {})
                if isinstance(names[metric], int | float):
                    own[iteration] = names[metric]
    return next(iter(series.values())) if len(series) == 1 else {}


def _prefixes(file: Path, phase: str) -> tuple[str, ...]:
    runner = file.parent.name
    return "", f"{runner}.", f"{phase}.", f"{runner}.{phase}."


def _lines(file: Path) -> list[tuple[str, int, str, dict[str, Any]]]:
    """The lines that are complete; nothing where the file is damaged."""
    # A run that goes on has cut it back, so it is read from its beginning each time.
    with suppress(CheckpointError, StorageError, ValueError, KeyError, TypeError, AttributeError):
        with storage.open_regular(file) as lines:
            content = lines.readall() or b""
        return [parse_numbers(text) for text in content.split(b"\n")[:-1]]
    return []


def final_value(run_dir: Path, metric: str) -> float | None:
    """The metric, as ``pipeline runs`` shows it, of a run that keeps no ``metrics.jsonl``."""
    columns = list_runs(run_dir)[0].metrics if is_run_directory(run_dir) else {}
    found = {name: value for name, value in columns.items() if name == metric or name.endswith(f".{metric}")}
    return found.get(metric, next(iter(found.values())) if len(found) == 1 else None)


def missing(run_dir: Path, metric: str) -> str:
    """Why a run has no value of a metric, and which it has."""
    columns = list_runs(run_dir)[0].metrics if is_run_directory(run_dir) else {}
    several = [name for name in columns if name.endswith(f".{metric}")]
    if metric in columns or len(several) == 1:
        return f"{metric} was never a number"
    if several:
        return f"there are several '{metric}'; name one: {', '.join(several)}"
    return f"there is no '{metric}'{one_of(metric, columns)}"
