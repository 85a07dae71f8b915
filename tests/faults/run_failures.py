"""Whatever a user's code does wrong, at any point of a run: ``python tests/faults/run_failures.py [NAME…]``.

Stages, plugins, datasets, collate functions, models, Brains, losses, metrics, updaters, optimizers and schedules raise,
return what they must not, or hang, in Python and in C, until SIGTERM. Each time: the first line of the message names stage, class and line of
the config, and what else it is known to be; under it stands the user's own traceback and no frame of ours; the exit code
is right; terminal or abort ran once; what was opened is closed; status.json tells it; the checkpoints are valid, and the
run, with the fault mended, goes on from them to the end of one that never failed. NAME confines it to points that contain
it. Prints what does not hold, and a line of counts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import failing_workspace
from failure_points import HARMLESS, IN_C, POINTS, VALUES, Point
from forked_run import ForkedRun, end, unlike, until

from pipeline.checkpoint import layout, reader

GRACE = 0.5
ACTS = ("raise", "hang", "hang in C")
NONE = "none|none|0"
OURS = re.compile(r'File "[^"]*/(pipeline|plugins)/(?!workspaces)[^"]*", line')
FRAME = re.compile(r'^ +File "([^"]+)", line \d+, in (\S+)', re.MULTILINE)


class Case(NamedTuple):
    """One fault: where, and what is done there."""

    name: str
    point: Point
    act: str

    @property
    def code(self) -> str:
        """What a worker does is in the same code."""
        return self.name.removesuffix(" in a worker")

    @property
    def fault(self) -> str:
        return f"{self.code}|{self.act}|{self.point.after}"


def cases() -> Iterator[Case]:
    """All of them."""
    for name, point in POINTS.items():
        acts = ["raise", "hang"] if not name.partition(" writes ")[1] else []
        acts += ["hang in C"] if name in IN_C else []
        for act in [*acts, *VALUES.get(name, ())]:
            yield Case(name, point, act)


class Workspace:
    """Where the runs are, and what is expected of them.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = failing_workspace.write(folder)
        self.ends = folder / "ends"
        lines = self.config.read_text(encoding="utf-8").splitlines()
        self.lines = {
            line.split("_")[0].strip(): number for number, line in enumerate(lines, 1) if "_class_path:" in line
        }
        self.whole: dict[tuple[str, ...], Any] = {}

    @property
    def run_dir(self) -> Path:
        return (self.folder / "runs" / self.folder.name / "latest").resolve()

    def run(self, fault: str, *overrides: str, resume: str = "never") -> ForkedRun:
        for path in (self.ends, self.folder / "hangs"):
            path.unlink(missing_ok=True)
        return ForkedRun(self.folder, self.config, overrides, resume, environment={"FAULT": fault}, grace=GRACE)

    def expected(self, *overrides: str) -> dict[str, Any]:
        """The end of a run that never failed."""
        if overrides not in self.whole:
            ended = self.run(NONE, *overrides)
            assert ended.wait() == 0, ended.told()
            self.whole[overrides] = end(self.run_dir / "train")
            shutil.rmtree(self.folder / "runs")
        return self.whole[overrides]


def tried(case: Case, at: Workspace) -> Iterator[str]:
    """What does not hold of one fault."""
    point = case.point
    expected = at.expected(*point.overrides)
    resume = "never"
    if point.resumed:
        at.run("loss|raise|5", *point.overrides).wait()
        resume = "auto"
    run = at.run(case.fault, *point.overrides, resume=resume)
    if case.act.startswith("hang"):
        yield from hung(case, run, at)
    else:
        run.wait()
        yield from failed(case, run, at)
    yield from kept(case, run, at, expected)


def hung(case: Case, run: ForkedRun, at: Workspace) -> Iterator[str]:
    """What does not hold of a run that hangs and is asked to end."""
    if not until(lambda: (at.folder / "hangs").exists() or run.over(), 20) or run.over():
        yield f"did not hang: {run.code}: {run.told()[-500:]}"
        return
    run.send(signal.SIGTERM)
    since = time.monotonic()
    code = run.wait(GRACE + 20)
    if code not in case.point.stopped:
        yield f"left with {code} after {time.monotonic() - since:.1f} s: {run.told()[-500:]}"
    if "Traceback" in run.told():
        yield f"a traceback: {run.told()[-1500:]}"
    if ended(at).count("abort") + ended(at).count("terminal") > 1:
        yield f"ended more than once: {ended(at)}"


def failed(case: Case, run: ForkedRun, at: Workspace) -> Iterator[str]:
    """What does not hold of a run that raises, or gets what it cannot use."""
    told, point = run.told(), case.point
    if case.act != "raise" and run.code == 0:
        if (case.name, case.act) not in HARMLESS and (case.name, "*") not in HARMLESS:
            yield "was not noticed"
        return
    if run.code != point.code:
        yield f"left with {run.code}"
    yield from said(case, told, at)
    if case.act == "raise":
        frames = [name for _, name in FRAME.findall(told)]
        if ("at" in frames) != point.shown or f"fault in {case.code}" not in told:
            yield "the user's traceback is not shown"
    if found := OURS.search(told):
        yield f"a frame of ours is shown: {found[0]}"
    if case.act != "raise" and "Traceback" not in told and "; " not in told.split(" ERROR ")[-1]:
        yield "no remedy is told"
    if told.count(" ERROR ") != (point.code == 1):
        yield "more than one error is told"
    yield from closed(case, run, at)


def said(case: Case, told: str, at: Workspace) -> Iterator[str]:
    """What is missing in the first line, and in the message."""
    point = case.point
    if point.code == 2:
        first = told
    else:
        headline = re.search(r"^\S+ ERROR   (.*)", told, re.MULTILINE)
        first = headline[1] if headline else ""
    stage = point.stage
    if stage in at.lines and f"{stage} (stages.{stage.capitalize()}, {at.config}:{at.lines[stage]})" not in first:
        yield f"the first line does not name the {stage}: {first}"
    for pattern in point.first:
        if not re.search(pattern, first):
            yield f"the first line does not name {pattern}: {first}"
    for pattern in point.says if case.act == "raise" else ():
        if not re.search(pattern, told):
            yield f"the message does not name {pattern}"
    if (
        case.act != "raise"
        and " writes " not in case.name
        and not re.search(r"phase\.net|'net'|dataset\.|plugin[ :]'?plugin'", told)
    ):
        yield "the message names no phase, dataset or plugin"


def ended(at: Workspace) -> list[str]:
    return at.ends.read_text(encoding="utf-8").split() if at.ends.exists() else []


def closed(case: Case, run: ForkedRun, at: Workspace) -> Iterator[str]:
    """What does not hold of the end of a run that failed: terminal or abort, resources, status.json."""
    ends = Counter(ended(at))
    if ends["open"] != ends["close"]:
        yield "the resources are not closed"
    over = case.point.ends or ("terminal" if case.point.stage == "terminal" else "abort")
    if run.code == 1 and (ends["terminal"] + ends["abort"], ends[over]) != ((0, 0) if over == "none" else (1, 1)):
        yield f"terminal and abort: {dict(ends)}, not {over} once"
    if run.code != 1:
        return
    status = json.loads((at.run_dir / "status.json").read_text(encoding="utf-8"))
    there = bool(layout.committed_checkpoints(at.run_dir / "train/checkpoints"))
    if [status["state"], status["exit_code"], status["resumable"]] != ["failed", 1, there]:
        yield f"status.json: {status}"
    elif status["reason"].splitlines()[0] not in run.told() or not status["error"]:
        yield f"status.json tells of another error: {status}"


def kept(case: Case, run: ForkedRun, at: Workspace, expected: dict[str, Any]) -> Iterator[str]:
    """What does not hold of the checkpoints, and of the run that goes on from them with the fault mended."""
    if run.code in {0, 2} or not (at.folder / "runs").is_dir():
        return
    folder = at.run_dir / "train/checkpoints"
    for path in layout.committed_checkpoints(folder):
        try:
            reader.read_checkpoint(path)
        except Exception as error:  # whatever is wrong with it
            yield f"{path.name}: {error}"
    if left := layout.leftovers(folder) if run.code == 1 else []:
        yield f"left behind: {left}"
    if case.point.after and case.point.stage == "runner" and not layout.committed_checkpoints(folder):
        yield "no checkpoint was saved before"
    again = at.run(NONE, *case.point.overrides, resume="auto")
    if again.wait() != 0:
        yield f"mended, it left with {again.code}: {again.told()[-1000:]}"
        return
    for each in unlike(at.run_dir / "train", expected):
        yield f"mended, it came to another end: {each}"


def main(parts: list[str]) -> int:
    """Try all, or those that are named; 1 if anything does not hold."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        folder.mkdir()
        at = Workspace(folder)
        for case in cases():
            if parts and not any(part in f"{case.name} {case.act}" for part in parts):
                continue
            shutil.rmtree(folder / "runs", ignore_errors=True)
            counts["faults"] += 1
            counts[case.act if case.act in ACTS else "wrong values"] += 1
            for problem in tried(case, at):
                counts["do not hold"] += 1
                print(f"{case.name} | {case.act} | {problem}", flush=True)
    print(json.dumps({**counts, "do not hold": counts["do not hold"]}))
    return int(bool(counts["do not hold"]))


if __name__ == "__main__":
    os.environ["FAULT"] = NONE
    sys.exit(main(sys.argv[1:]))
