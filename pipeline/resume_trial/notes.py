"""What the witness of a run has noted, read again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Notes:
    """What one runner did in one process, or in several that followed each other.

    Attributes:
        batches: iteration -> the digest of its batch.
        losses: iteration -> name -> loss, as ``float.hex`` writes it.
    """

    batches: dict[int, str] = field(default_factory=dict)
    losses: dict[int, dict[str, str]] = field(default_factory=dict)

    def then(self, later: Notes) -> Notes:
        """Those of a process and of the one that went on after it: what it repeated counts as it did it."""
        return Notes(self.batches | later.batches, self.losses | later.losses)

    def before(self, other: Notes) -> Notes:
        """Those of another, up to the last of each that there is here: the kill comes between a batch and its losses."""
        return Notes(
            _up_to(max(self.batches, default=0), other.batches), _up_to(max(self.losses, default=0), other.losses)
        )


def read(path: Path, runner: str) -> Notes:
    """The notes on a runner in a file, which is not there if the process never came so far."""
    notes = Notes()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        noted: dict[str, Any] = json.loads(line)
        if noted["runner"] != runner:
            continue
        if "batch" in noted:
            notes.batches[noted["iteration"]] = noted["batch"]
        else:
            notes.losses[noted["iteration"]] = noted["losses"]
    return notes


def first_difference(straight: Notes, other: Notes) -> str | None:
    """The first batch or loss that is not the same, in words; None where all are."""
    for iteration in sorted({*straight.batches, *other.batches}):
        batch, its = straight.batches.get(iteration), other.batches.get(iteration)
        if batch is None or its is None:
            return f"iteration {iteration}, which only the {'interrupted' if batch is None else 'straight'} run has"
        if batch != its:
            return f"the batch of iteration {iteration}{_elsewhere(straight, iteration, its)}"
        losses, theirs = straight.losses.get(iteration, {}), other.losses.get(iteration, {})
        for name in losses | theirs:
            if losses.get(name) != theirs.get(name):
                values = f"{_number(losses.get(name))} straight, {_number(theirs.get(name))} interrupted"
                return f"the {name} of iteration {iteration}: {values}"
    return None


def _elsewhere(straight: Notes, iteration: int, batch: str) -> str:
    """Where the straight run had the same batch: then it is the order that is lost."""
    same = [each for each, its in straight.batches.items() if its == batch]
    nearest = min(same, key=lambda each: abs(each - iteration), default=None)
    return f", which is the one of iteration {nearest} in the straight run" if nearest else ""


def _number(value: str | None) -> str:
    return "none" if value is None else f"{float.fromhex(value):.9g}"


def _up_to(last: int, noted: dict[int, Any]) -> dict[int, Any]:
    return {iteration: each for iteration, each in noted.items() if iteration <= last}
