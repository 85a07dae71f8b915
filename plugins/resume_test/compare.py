"""Whether the run that was killed and resumed is the straight one, bit for bit, and where it first is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from pipeline.checkpoint import layout, reader
from pipeline.checkpoint.comparison import Difference
from pipeline.checkpoint.report import checkpoint_differences

from .recorder import Recording
from .runs import FinishedRun

BEFORE = "before the kill"
"""The part of a run that nobody has interrupted yet: if it differs, resuming is not to blame."""
_CLOCK = "training: recoverables.plugin:metric_log.timing"
"""The length of timing.jsonl, which depends on the clock."""
_PARTS = {
    "weights": ("weights ",),
    "optimizers": ("training: optim", "training: gradients"),
    "random state": ("training: random",),
    "all else": ("counters", "metrics", "training"),
}
"""What is compared of the last checkpoint, and how its places begin; a place belongs to the first part that fits."""


class Finding(NamedTuple):
    """What came of comparing one part of the two runs.

    Attributes:
        part: what was compared.
        text: that it is the same, or the first thing in it that differs.
        differs: whether anything does.
    """

    part: str
    text: str
    differs: bool = False


def compare(straight: FinishedRun, interrupted: FinishedRun, runner: str) -> list[Finding]:
    """Everything that is compared of one runner, what comes first in time before the rest.

    Raises:
        CheckpointError: the last checkpoint of one of them is damaged.
    """
    folders = [run.directory / runner for run in (straight, interrupted)]
    return [
        *_of_batches(
            Recording.read(straight.recordings[0], runner),
            [Recording.read(recording, runner) for recording in interrupted.recordings],
        ),
        _of_metrics(*(folder / "metrics.jsonl" for folder in folders)),
        *_of_checkpoints(*(folder / "checkpoints" for folder in folders)),
    ]


def first_difference(straight: Recording, other: Recording) -> str | None:
    """The first batch or loss that is not the same, in words; None where all are."""
    for iteration in sorted({*straight.batches, *other.batches}):
        one, two = straight.batches.get(iteration), other.batches.get(iteration)
        if one is None or two is None:
            return f"iteration {iteration}, which only the {'interrupted' if one is None else 'straight'} run has"
        if one != two:
            return f"the batch of iteration {iteration}{_same_batch(straight, iteration, two)}"
        losses, theirs = straight.losses.get(iteration, {}), other.losses.get(iteration, {})
        for name in losses | theirs:
            if losses.get(name) != theirs.get(name):
                values = f"{_number(losses.get(name))} straight, {_number(theirs.get(name))} interrupted"
                return f"the {name} of iteration {iteration}: {values}"
    return None


def _same_batch(straight: Recording, iteration: int, batch: str) -> str:
    """Where the straight run had the same batch: then it is the order that is lost."""
    same = [number for number, value in straight.batches.items() if value == batch]
    nearest = min(same, key=lambda number: abs(number - iteration), default=None)
    return f", which is the one of iteration {nearest} in the straight run" if nearest else ""


def _number(value: str | None) -> str:
    return "none" if value is None else f"{float.fromhex(value):.9g}"


def _of_batches(straight: Recording, processes: Sequence[Recording]) -> Iterator[Finding]:
    whole = reduce(Recording.merge, processes)
    if not straight.batches and not whole.batches:
        yield Finding("batches", "not looked at: this runner stage tells no plugin of them, as an experiment does not")
        return
    first = processes[0]
    if before := first_difference(straight.cut_to(first), first):
        yield Finding(BEFORE, before, differs=True)
    difference = first_difference(straight, whole)
    same = f"the same in {len(straight.batches)} iterations"
    yield Finding("batches and losses", difference or same, differs=bool(difference))


def _of_metrics(straight: Path, interrupted: Path) -> Finding:
    lines = [path.read_bytes().splitlines() if path.is_file() else [] for path in (straight, interrupted)]
    if not any(lines):
        return Finding("metrics.jsonl", "not looked at: there is none")
    for number, (one, other) in enumerate(zip_longest(*lines, fillvalue=b""), 1):
        if one != other:
            return Finding("metrics.jsonl", f"line {number}: {_line_difference(one, other)}", differs=True)
    return Finding("metrics.jsonl", f"the same {len(lines[0])} lines")


def _line_difference(one: bytes, other: bytes) -> str:
    """What is not the same in two lines."""
    if not one or not other:
        return f"only the {'straight' if one else 'interrupted'} run has it"
    first, second = json.loads(one), json.loads(other)
    differing = [name for name in first | second if first.get(name) != second.get(name)]
    values = ", ".join(f"{name} {first.get(name)} and {second.get(name)}" for name in differing)
    return f"{values}, at iteration {first.get('iteration')}"


def _of_checkpoints(straight: Path, interrupted: Path) -> Iterator[Finding]:
    newest = [layout.committed_checkpoints(folder)[-1:] for folder in (straight, interrupted)]
    if not any(newest):
        yield Finding("weights", "not looked at: this runner stage has saved no checkpoint")
        return
    steps = [layout.step_of(paths[0]) if paths else None for paths in newest]
    if steps[0] != steps[1]:
        yield Finding("last checkpoint", f"that of iteration {steps[0]} and {steps[1]}", differs=True)
        return
    differences = checkpoint_differences(*(reader.read_checkpoint(path) for [path] in newest))
    rest = [difference for difference in differences if difference.place != _CLOCK]
    for part, prefixes in _PARTS.items():
        of_part = [difference for difference in rest if difference.place.startswith(prefixes)]
        rest = [difference for difference in rest if difference not in of_part]
        yield _of_part(part, of_part)


def _of_part(part: str, differences: Sequence[Difference]) -> Finding:
    if not differences:
        return Finding(part, "the same")
    # What else differs mostly follows from the first.
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return Finding(part, f"{differences[0]}{more}", differs=True)
