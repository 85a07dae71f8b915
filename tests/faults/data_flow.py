"""Generated workspaces are run, to see which keys they really lack, and checked: ``python tests/faults/data_flow.py 200``.

A missing key is what a run ends with: a ContextError in a stage. The key is then put there, and the run goes on to the
next. ``check`` must find at least 80 % of these keys and no other; the program says how many it found, and leaves with 1
where that is not so. A key that an entry of ``context["model"]`` lacks ends the run for good: of the lines that did not
run then nothing is judged.

Some keys cannot be told to be missing from source alone: an earlier stage writes under a name that it computes, or
under a condition that does not hold in this run. They are counted apart, as untold.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

from generated_stages import STAGES, Generated, generate
from loguru import logger

from pipeline.check.checker import check
from pipeline.config.load import ConfigBuilder
from pipeline.errors import ContextError, Fault
from pipeline.trainer import GeneralTrainer

Missing = tuple[str, str]
"""Stage and key."""


@dataclass
class Truth:
    """What a workspace lacks.

    Attributes:
        missing: (stage, key) -> ``file.py:line`` of the read.
        inside: the key of an entry for lack of which the run ended, and its stage.
        ended_in: the stage in which the run ended for a reason that cannot be mended; "" if it went to its end.
        lines: the lines of the workspace that have run to their end, ``file.py:line``.
    """

    missing: dict[Missing, str] = field(default_factory=dict)
    inside: set[Missing] = field(default_factory=set)
    ended_in: str = ""
    lines: set[str] = field(default_factory=set)


class Mended(GeneralTrainer):
    """A trainer that puts the keys there whose lack has been seen, each for as long as the stage runs that lacked it."""

    missing: dict[Missing, str]
    stage = ""

    def enter(self, stage: str, runner: Any) -> bool:
        """Run a stage."""
        self.stage = stage
        context = runner.context
        put = {key: [1, 2, 3] for at, key in self.missing if at == stage and not dict.__contains__(context, key)}
        dict.update(context, put)
        wrote_status = super().enter(stage, runner)
        for key, value in put.items():
            if dict.get(context, key) is value:
                dict.pop(context, key)
        return wrote_status


def truth_of(config: Path) -> Truth:
    """Run a workspace until nothing is missing any more."""
    truth = Truth()
    while not truth.ended_in:
        draft = ConfigBuilder(config, [f"output_dir={config.parent}/runs"])
        assert draft.config, draft.faults
        trainer = Mended(draft.config)
        trainer.missing = truth.missing
        try:
            with _noting_lines(truth.lines, config.parent):
                trainer.run()
        except (KeyError, TypeError, AttributeError) as error:
            stage, key = trainer.stage, _key(error)
            at_top = bool(re.search(r"context\['\w+'\](,| was)", str(error)))
            if key and at_top and (stage, key) not in truth.missing:
                truth.missing[stage, key] = _where(error)
            else:
                truth.ended_in = stage
                truth.lines.discard(_where(error))
                truth.inside = {(stage, key)} if key else set()
        else:
            return truth
    return truth


@contextlib.contextmanager
def _noting_lines(lines: set[str], folder: Path) -> Iterator[None]:
    """Within, the lines of a folder's files that run are noted."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        file = Path(frame.f_code.co_filename)
        if file.parent != folder:
            return None
        lines.add(f"{file.name}:{frame.f_lineno}")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _key(error: BaseException) -> str | None:
    """The key whose lack ended a run: one of the context, or of an entry of ``context["model"]``."""
    if isinstance(error, ContextError):
        found = re.search(r"\] has no '(\w+)'", str(error)) or re.search(r"context\['(\w+)'\]", str(error))
        return found and found[1]
    return str(error.args[0]) if isinstance(error, KeyError) else None


def _where(error: BaseException) -> str:
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith("/context.py")
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def found_by_check(faults: list[Fault]) -> dict[Missing, Fault]:
    """(stage, key) -> fault, for faults about keys; one about anything else has neither."""
    found: dict[Missing, Fault] = {}
    for fault in faults:
        # The config line may be that of the stage that was to write the key; the message begins with the one that reads.
        reader = re.match(r"(\w+) \(", fault.message)
        keys = re.findall(r"\['(\w+)'\]", fault.message.partition(";")[0])
        found[reader[1] if reader else "?", keys[-1] if keys else fault.message] = fault
    return found


@dataclass
class Comparison:
    """What ``check`` said of a workspace, beside what it lacks.

    Attributes:
        found: missing keys that were named.
        missed: missing keys that were not named, though the source says that nothing writes them.
        untold: the others: a write under a name or condition that cannot be seen stands before them.
        false: keys that were named and are not missing, and faults about anything else.
        unjudged: keys that were named at a line to which the run did not come since it had ended before.
        misplaced: found keys whose message names another line than that of the read.
    """

    found: set[Missing]
    missed: set[Missing]
    untold: set[Missing]
    false: set[Missing]
    unjudged: set[Missing]
    misplaced: set[Missing]


def compare(made: Generated, truth: Truth, named: dict[Missing, Fault]) -> Comparison:
    """Hold the faults of a workspace against the truth."""
    missing = set(truth.missing)
    entered = STAGES[: STAGES.index(truth.ended_in) + 1] if truth.ended_in else STAGES
    found, others = missing & named.keys(), named.keys() - missing - truth.inside
    unjudged = {each for each in others if each[0] in STAGES and each[0] not in entered}
    unjudged |= {each for each in others if each[0] == truth.ended_in and _line(named[each]) not in truth.lines}
    untold = {each for each in missing - found if not made.can_be_told(*each)}
    misplaced = {each for each in found if f"({truth.missing[each]})" not in named[each].message}
    return Comparison(found, missing - found - untold, untold, others - unjudged, unjudged, misplaced)


def _line(fault: Fault) -> str:
    """``file.py:line`` of the read that a fault names."""
    found = re.match(r"\w+ \(([^)]+)\)", fault.message)
    return found[1] if found else ""


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first workspace")
    parser.add_argument("--verbose", action="store_true", help="show what was missed, and what is false")
    arguments = parser.parse_args()
    logger.remove()
    rows: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            made, home = generate(seed), Path(folder, f"workspace_{seed}")
            config = write(made, home)
            named = found_by_check(check(config))
            with contextlib.redirect_stdout(io.StringIO()):
                truth = truth_of(config)
            comparison = compare(made, truth, named)
            row = rows.setdefault(made.defect or "nothing", Counter())
            row.update({"workspaces": 1, "lacking": bool(truth.missing), "missing": len(truth.missing)})
            row.update({each.name: len(getattr(comparison, each.name)) for each in fields(comparison)})
            if arguments.verbose:
                tell(seed, made, truth, named, comparison)
    raise SystemExit(report(rows))


def write(made: Generated, folder: Path) -> Path:
    """Write a workspace; the path of its config."""
    folder.mkdir()
    for name, text in made.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "config.yaml"


def tell(seed: int, made: Generated, truth: Truth, named: dict[Missing, Fault], comparison: Comparison) -> None:
    """Show what was missed and what is false, with how the key is used."""
    for kind in ("missed", "false", "unjudged"):
        for each in sorted(getattr(comparison, kind)):
            what = named[each].message if each in named else f"{truth.missing[each]} lacks it"
            print(f"{seed}: {kind} {each}: {what}")
            for use in made.uses:
                if use.key in (each[1], "status", "is_exit") or use.kind == "hidden":
                    print(f"      {use.stage}: {use.kind} {use.key}, {use.idiom} ({use.place})")


def report(rows: dict[str, Counter[str]]) -> int:
    """Print the table, by what was done to the workspaces; 1 where the numbers are not good enough."""
    total = sum(rows.values(), Counter[str]())
    columns = ["workspaces", "lacking", "missing", *(each.name for each in fields(Comparison))]
    print(f"{'mistake made':18}" + "".join(f"{name:>11}" for name in columns))
    for name, row in [*sorted(rows.items()), ("all", total)]:
        print(f"{name:18}" + "".join(f"{row[column]:11}" for column in columns))
    told = total["found"] + total["missed"]
    print(f"{total['false']} false faults; {total['found']} of {told} missing keys found that the source tells")
    return int(total["false"] > 0 or total["found"] < 0.8 * told)


if __name__ == "__main__":
    main()
