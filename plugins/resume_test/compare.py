"""Whether the run that was killed and resumed is the straight one, bit for bit, and where it first is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pipeline.checkpoint import layout, reader
from pipeline.checkpoint.comparison import Difference
from pipeline.checkpoint.reader import LoadedCheckpoint

from ..shared.differences import checkpoint_differences
from .files import NOTHING, OURS, Finding, compare_files, file_difference, volatile_files
from .recorder import Recording
from .runs import FinishedRun

BEFORE = "before the kill"
"""The part of a run that nobody has interrupted yet: if it differs, resuming is not to blame."""
_CLOCK = "training: recoverables.plugin:metric_log.timing"
"""The length of timing.jsonl, which depends on the clock."""
_PARTS = {
    "weights": ("weights ",),
    "optimizers": ("training: optim", "training: experiment.state.optim", "training: gradients"),
    "random state": ("training: random",),
    "all else": ("counters", "metrics", "training"),
}
"""What is compared of the last checkpoint, and how its places begin; a place belongs to the first part that fits."""


def compare(straight: FinishedRun, interrupted: FinishedRun, runner: str) -> list[Finding]:
    """Everything that is compared of one runner, what comes first in time before the rest.

    Raises:
        CheckpointError: the last checkpoint of one of them is damaged.
    """
    folders = (straight.directory / runner, interrupted.directory / runner)
    recording, processes = _recordings(straight, runner)[0], _recordings(interrupted, runner)
    volatile = [volatile_files(folder, recording.volatile) for folder in folders]
    return [
        *_of_batches(recording, processes),
        _of_metrics(folders[0] / "metrics.jsonl", folders[1] / "metrics.jsonl"),
        *_of_checkpoints(folders[0] / "checkpoints", folders[1] / "checkpoints"),
        *compare_files(*folders, volatile, apart=("metrics.jsonl", "checkpoints")),
    ]


def compare_directories(straight: FinishedRun, interrupted: FinishedRun, runners: Sequence[str]) -> list[Finding]:
    """The files that are in no runner's folder."""
    folders = (straight.directory, interrupted.directory)
    volatile = [volatile_files(folder, OURS) for folder in folders]
    for runner in runners:
        # A plugin may write beside the folder of its runner, and name that ``../plot.png``.
        patterns = _recordings(straight, runner)[0].volatile
        for paths, folder in zip(volatile, folders, strict=True):
            paths.update(volatile_files(folder / runner, patterns))
    return list(compare_files(*folders, volatile, apart=runners, where="../"))


def _recordings(run: FinishedRun, runner: str) -> list[Recording]:
    return [Recording.read(recording, runner) for recording in run.recordings]


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
        yield Finding("batches and losses", f"{NOTHING}: the runner stage calls no hook before_batch")
        return
    first = processes[0]
    if before := first_difference(straight.cut_to(first), first):
        yield Finding(BEFORE, before, differs=True)
    difference = first_difference(straight, whole)
    losses = len(straight.losses)
    same = f"the same in {len(straight.batches)} iterations"
    if losses < len(straight.batches):
        same += f", of which {losses or 'none'} {'has' if losses < 2 else 'have'} a loss"
    yield Finding("batches and losses", difference or same, differs=bool(difference))


def _of_metrics(straight: Path, interrupted: Path) -> Finding:
    if not any(path.is_file() and path.stat().st_size for path in (straight, interrupted)):
        return Finding("metrics.jsonl", NOTHING)
    difference = file_difference(straight, interrupted)
    same = difference or f"the same {len(straight.read_bytes().splitlines())} lines"
    return Finding("metrics.jsonl", same, differs=bool(difference))


def _of_checkpoints(straight: Path, interrupted: Path) -> Iterator[Finding]:
    paths = [_by_step(folder) for folder in (straight, interrupted)]
    newest = [max(steps, default=None) for steps in paths]
    if newest == [None, None]:
        yield Finding("last checkpoint", NOTHING)
        return
    if newest[0] != newest[1]:
        yield Finding("last checkpoint", f"that of iteration {newest[0]} and {newest[1]}", differs=True)
        return
    common = sorted(paths[0].keys() & paths[1].keys())
    for step in common[:-1]:
        _, differences = _read_both(paths[0][step], paths[1][step])
        if differences:
            yield _of_part(f"checkpoint {step}", differences)
    held, rest = _read_both(paths[0][common[-1]], paths[1][common[-1]])
    for part, prefixes in _PARTS.items():
        of_part = [difference for difference in rest if difference.place.startswith(prefixes)]
        rest = [difference for difference in rest if difference not in of_part]
        yield _of_part(part, of_part) if any(name.startswith(prefixes) for name in held) else Finding(part, NOTHING)
    if single := sorted(paths[0].keys() ^ paths[1].keys()):
        yield Finding("not compared", f"checkpoints of iteration {', '.join(map(str, single))}, which only one run has")


def _by_step(folder: Path) -> dict[int, Path]:
    """Iteration -> checkpoint."""
    paths = layout.committed_checkpoints(folder)
    return {step: path for path in paths if (step := layout.step_of(path)) is not None}


def _read_both(straight: Path, interrupted: Path) -> tuple[list[str], list[Difference]]:
    """What either of two checkpoints holds, by its place, and where they differ."""
    one, other = reader.read_checkpoint(straight), reader.read_checkpoint(interrupted)
    found = [difference for difference in checkpoint_differences(one, other) if difference.place != _CLOCK]
    return [*_held(one), *_held(other)], found


def _held(checkpoint: LoadedCheckpoint) -> list[str]:
    """The places of a checkpoint that are not empty."""
    parts: dict[str, Any] = {"counters": checkpoint.train_state, "metrics": checkpoint.metrics}
    parts |= {f"weights {phase}": weights for phase, weights in checkpoint.weights.items()}
    training = checkpoint.training or {}
    experiment = (training.get("experiment") or {}).get("state", {})
    parts |= {f"training: {name}": value for name, value in training.items()}
    parts |= {f"training: experiment.state.{name}": value for name, value in experiment.items()}
    return [place for place, value in parts.items() if not _is_empty(value)]


def _is_empty(value: Any) -> bool:
    """Whether a nested state has no value in it."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(_is_empty, value)))


def _of_part(part: str, differences: Sequence[Difference]) -> Finding:
    if not differences:
        return Finding(part, "the same")
    # What else differs mostly follows from the first.
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return Finding(part, f"{differences[0]}{more}", differs=True)
