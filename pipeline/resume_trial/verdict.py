"""Whether the run that was killed and resumed is the straight one, bit for bit, and where it first is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from pipeline.checkpoint import names, saved
from pipeline.checkpoint.comparison import Difference, of_checkpoints
from pipeline.resume_trial import notes
from pipeline.resume_trial.notes import Notes
from pipeline.resume_trial.trial import Ended

_CLOCK = "training: recoverables.plugin:metric_log.timing"
"""The length of timing.jsonl, which depends on the clock."""
_PARTS = {
    "weights": ("weights ",),
    "optimizers": ("training: optim", "training: gradients"),
    "random state": ("training: random",),
    "all else": ("counters", "metrics", "training"),
}
"""What is compared of the last checkpoint, and how its places begin; each belongs to the first that fits."""


class Finding(NamedTuple):
    """What came of comparing one part of the two runs.

    Attributes:
        part: what was compared.
        what: how it is, or the first thing in it that differs.
        differs: whether anything does.
    """

    part: str
    what: str
    differs: bool = False


BEFORE = "before the kill"
"""The part of a run that nobody has interrupted yet: if it differs, resuming is not to blame."""


def findings(straight: Ended, interrupted: Ended, runner: str) -> list[Finding]:
    """Everything that is compared of one runner, what comes first in time before the rest.

    Raises:
        CheckpointError: the last checkpoint of one of them is damaged.
    """
    folders = [each.directory / runner for each in (straight, interrupted)]
    return [
        *_of_batches(notes.read(straight.notes[0], runner), [notes.read(each, runner) for each in interrupted.notes]),
        _of_metrics(*(folder / "metrics.jsonl" for folder in folders)),
        *_of_checkpoints(*(folder / "checkpoints" for folder in folders)),
    ]


def _of_batches(straight: Notes, parts: Sequence[Notes]) -> Iterator[Finding]:
    whole = reduce(Notes.then, parts)
    if not straight.batches and not whole.batches:
        yield Finding("batches", "not looked at: this runner stage tells no plugin of them, as an experiment does not")
        return
    before = notes.first_difference(parts[0].before(straight), parts[0])
    if before:
        yield Finding(BEFORE, before, differs=True)
    found = notes.first_difference(straight, whole)
    yield Finding("batches and losses", found or f"the same in {len(straight.batches)} iterations", differs=bool(found))


def _of_metrics(straight: Path, interrupted: Path) -> Finding:
    lines = [each.read_bytes().splitlines() if each.is_file() else [] for each in (straight, interrupted)]
    if not any(lines):
        return Finding("metrics.jsonl", "not looked at: there is none")
    for number, (one, other) in enumerate(zip_longest(*lines, fillvalue=b""), 1):
        if one != other:
            return Finding("metrics.jsonl", f"line {number}: {_apart(one, other)}", differs=True)
    return Finding("metrics.jsonl", f"the same {len(lines[0])} lines")


def _apart(one: bytes, other: bytes) -> str:
    """What is not the same in two lines."""
    if not one or not other:
        return f"only the {'straight' if one else 'interrupted'} run has it"
    first, second = json.loads(one), json.loads(other)
    apart = [name for name in first | second if first.get(name) != second.get(name)]
    values = ", ".join(f"{name} {first.get(name)} and {second.get(name)}" for name in apart)
    return f"{values}, at iteration {first.get('iteration')}"


def _of_checkpoints(straight: Path, interrupted: Path) -> Iterator[Finding]:
    last = [names.committed(folder)[-1:] for folder in (straight, interrupted)]
    if not any(last):
        yield Finding("weights", "not looked at: this runner stage has saved no checkpoint")
        return
    steps = [names.step_of(each[0]) if each else None for each in last]
    if steps[0] != steps[1]:
        yield Finding("last checkpoint", f"that of iteration {steps[0]} and {steps[1]}", differs=True)
        return
    found = [each for each in of_checkpoints(*(saved.read(path) for [path] in last)) if each.place != _CLOCK]
    for part, prefixes in _PARTS.items():
        mine = [each for each in found if each.place.startswith(prefixes)]
        found = [each for each in found if each not in mine]
        yield _of_part(part, mine)


def _of_part(part: str, found: Sequence[Difference]) -> Finding:
    if not found:
        return Finding(part, "the same")
    # What else differs mostly follows from the first.
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return Finding(part, f"{found[0]}{more}", differs=True)
