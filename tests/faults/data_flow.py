"""Generated workspaces are run, to see which keys they really lack, and checked: ``python tests/faults/data_flow.py 200``.

A missing key is what a run ends with: a ContextError or KeyError in a stage. The key is then put there, and the run
goes on to the next. ``check`` must find at least 95 % of these keys and no other; the program says how many it found,
and leaves with 1 where that is not so.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generated_stages import STAGES, Generated, generate
from loguru import logger

from pipeline.check import check
from pipeline.config.load import Draft
from pipeline.errors import ContextError, Fault
from pipeline.trainer import GeneralTrainer

Missing = tuple[str, str]
"""Stage and key."""


@dataclass
class Truth:
    """What a workspace lacks.

    Attributes:
        missing: (stage, key) -> ``file.py:line`` of the read.
        ended_in: the stage in which the run ended for a reason that cannot be mended; "" if it went to its end.
    """

    missing: dict[Missing, str] = field(default_factory=dict)
    ended_in: str = ""


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
        draft = Draft(config, [f"output_dir={config.parent}/runs"])
        assert draft.config, draft.faults
        trainer = Mended(draft.config)
        trainer.missing = truth.missing
        try:
            trainer.run()
        except (KeyError, TypeError, AttributeError) as error:
            stage, key, where = trainer.stage, _key(error), _where(error)
            if key is None or (stage, key) in truth.missing:
                truth.ended_in = stage
            else:
                truth.missing[stage, key] = where
                truth.ended_in = "" if isinstance(error, ContextError) else stage
        else:
            return truth
    return truth


def _key(error: BaseException) -> str | None:
    if isinstance(error, ContextError):
        found = re.search(r"context\['(.+?)'\]", str(error))
        return found[1] if found else None
    return str(error.args[0]) if isinstance(error, KeyError) else None


def _where(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.endswith("/context.py")]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def found_by_check(faults: list[Fault]) -> dict[Missing, Fault]:
    """(stage, key) -> fault, for faults about keys; one about anything else has neither."""
    found: dict[Missing, Fault] = {}
    for fault in faults:
        stage = re.search(r"runner\.train_runner\.(\w+)_class_path|", fault.address)[1] or fault.message.split(" ")[0]
        keys = re.findall(r"\['(\w+)'\]", fault.message.partition(";")[0])
        found[stage or "?", keys[-1] if keys else fault.message] = fault
    return found


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-v", "--verbose", action="store_true", help="show what was missed")
    arguments = parser.parse_args()
    logger.remove()
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            made = generate(seed)
            home = Path(folder, f"workspace_{seed}")
            home.mkdir()
            for name, text in made.files.items():
                (home / name).write_text(text, encoding="utf-8")
            found = found_by_check(check(home / "config.yaml"))
            with contextlib.redirect_stdout(io.StringIO()):
                truth = truth_of(home / "config.yaml")
            _count(counts, seed, made, truth, found, arguments.verbose)
    total = sum(counts.values(), Counter())
    for name, row in [*sorted(counts.items()), ("all", total)]:
        print(f"{name:18}" + "".join(f"{row[each]:5} {each}" for each in COLUMNS))


COLUMNS = ("workspaces", "lacking", "missing", "found", "missed", "hidden", "false", "unjudged", "other line")


def _count(counts: dict[str, Counter[str]], seed: int, made: Generated, truth: Truth, found: dict[Missing, Fault], verbose: bool) -> None:
    judged = STAGES[: STAGES.index(truth.ended_in) + 1] if truth.ended_in else STAGES
    row = counts.setdefault(made.defect or "none", Counter())
    right = truth.missing.keys() & found.keys()
    missed = truth.missing.keys() - found.keys()
    false = {each: fault for each, fault in found.items() if each not in truth.missing and each[0] in (*judged, "?")}
    row["workspaces"] += 1
    row["lacking"] += bool(truth.missing)
    row["missing"] += len(truth.missing)
    row["found"] += len(right)
    row["missed"] += len(missed)
    row["hidden"] += len(missed) * made.hidden
    row["false"] += len(false)
    row["unjudged"] += len(found.keys() - truth.missing.keys()) - len(false)
    row["other line"] += sum(f"({truth.missing[each]})" not in found[each].message for each in right)
    if verbose and (missed or false):
        print(seed, made.defect, "HIDDEN" if made.hidden else "", "ended in " + truth.ended_in if truth.ended_in else "")
        for each in missed:
            print("   missed", each, truth.missing[each], [idiom for idiom in made.idioms if idiom.endswith(each[1])])
        for each in false:
            print("   FALSE", each, found[each])


if __name__ == "__main__":
    main()
