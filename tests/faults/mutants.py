"""Faults in the code that the tests have to notice: ``python tests/faults/mutants.py --seed S -n N --minutes M``.

Each mutant is ``pipeline/`` with one small change (``code_changes.py`` says which) in a line that a test executes. Most
are in the folders of ``MOST``. The tests that execute the line run until one fails,
those that take least first, for at most 60 seconds. A mutant that no test notices is printed as a survivor: either its
line does nothing, or a test is missing.

Which test executes which line is measured once: the quick and the slow tests run under coverage, and the map is kept in
``.mutants/``, which git ignores. ``--new-map`` measures it again, after the tests or the code have changed.

``--replay FILE`` makes the mutants of an earlier report again, so that the tests of two versions can be compared. A mutant
that was noticed then and survives now is tried twice. ``--tree`` names another checkout, whose code and tests are used.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from code_changes import Change, changes

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
MOST = ("engine", "brain", "updater", "optim", "metrics", "checkpoint", "data", "slots", "distributed")
SHARE_OF_MOST = 0.8
SECONDS = 60
SECONDS_PER_TEST = 20
COVERAGE_OPTIONS = """\
[run]
branch = True
parallel = True
patch = _exit, fork
source_pkgs = pipeline, pipeline_plugins
context = ${{PYTEST_CURRENT_TEST-}}
data_file = {data_file}
disable_warnings = dynamic-conflict, no-data-collected, module-not-measured, already-imported, module-not-imported
"""


@dataclass
class Mutant:
    """A change, and what the tests say.

    Attributes:
        path: the file, as seen from the top of the tree.
        line: the changed line.
        change: what becomes of what.
        tests: how many tests execute the line.
        outcome: noticed, survived, or error if the tests could not run.
        by: the first test that failed, or why none did.
        seconds: how long that took.
    """

    path: str
    line: int
    change: str
    tests: int = 0
    outcome: str = ""
    by: str = ""
    seconds: float = 0.0


class TestMap:
    """Which tests execute which lines of a tree, and how long each takes.

    Args:
        folder: where the map is kept.
    """

    __test__ = False

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData  # noqa: PLC0415 - only here, since --help does without

        self._data = CoverageData(str(folder / "coverage"))
        self._data.read()
        lines = (folder / "costs.jsonl").read_text(encoding="utf-8").splitlines()
        self._costs: dict[str, float] = dict(json.loads(line)[:2] for line in lines)
        self._files = {path.rpartition("/pipeline/")[2]: path for path in self._data.measured_files()}
        self._contexts: dict[str, dict[int, list[str]]] = {}

    def tests(self, path: str, *lines: int) -> list[str]:
        """Return the tests that execute one of the lines of ``pipeline/…``, those that take least first."""
        measured = self._files.get(path.removeprefix("pipeline/"))
        if measured is None:
            return []
        if path not in self._contexts:
            self._contexts[path] = self._data.contexts_by_lineno(measured)
        names: set[str] = set()
        for line in lines:
            names |= {_test_of(context) for context in self._contexts[path].get(line, ())}
        known = names & self._costs.keys()
        return sorted(known, key=lambda name: (self._costs[name], name))


def _test_of(context: str) -> str:
    """Return the test of a context: ``static|tests/x.py::test_y[z] (call)`` is of ``tests/x.py::test_y[z]``."""
    name = context.rpartition("|")[2]
    for phase in (" (setup)", " (call)", " (teardown)"):
        name = name.removesuffix(phase)
    return name


def make_map(tree: Path, folder: Path) -> None:
    """Run the quick and the slow tests of a tree under coverage, and keep the map in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    parts = folder / "parts"
    parts.mkdir(parents=True)
    options = folder / "coveragerc"
    options.write_text(COVERAGE_OPTIONS.format(data_file=parts / "coverage"), encoding="utf-8")
    variables = {"COVERAGE_PROCESS_START": str(options), "TEST_COSTS": str(folder / "costs.jsonl")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "coverage_contexts", "-m", "not release"]
    subprocess.run(command, cwd=tree, env=_environment(tree) | variables, check=False)
    combine = [sys.executable, "-m", "coverage", "combine", f"--data-file={folder / 'coverage'}", "--quiet", str(parts)]
    subprocess.run(combine, check=True)


def _environment(tree: Path) -> dict[str, str]:
    """Return the variables with which Python imports the code of a tree."""
    path = os.pathsep.join([str(tree), str(HERE)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Workplace:
    """A copy of a tree, in which one mutant at a time is made and tested.

    Args:
        tree: the tree.
        folder: where the copy is made.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True)
        for name in names.stdout.split("\0"):
            if name and (tree / name).exists():
                copy = folder / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, copy)
        # Python compiles a file again if its time has changed, and looks at whole seconds only.
        self._time = int(time.time())
        # The tests that fail in this copy without a mutant.
        self._broken: set[str] = set()
        # What the copy has: a test of a file that git ignores is none of them.
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-m", "", "-p", "no:cacheprovider"]
        listed = subprocess.run(
            command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False
        )
        self._tests = {*listed.stdout.splitlines()}

    def test(self, mutant: Mutant, change: Change, tests: list[str]) -> None:
        """Make a mutant, run tests until one fails, and put the source back."""
        file = self.folder / mutant.path
        source = file.read_bytes()
        mutant.tests = len(tests)
        while True:
            usable = [name for name in tests if name in self._tests and name not in self._broken]
            self._write(file, change.apply(source))
            began = time.monotonic()
            try:
                mutant.outcome, mutant.by = self._run(usable)
                if mutant.outcome == "error":
                    mutant.outcome, mutant.by = self._run(usable)
            finally:
                self._write(file, source)
            mutant.seconds = round(time.monotonic() - began, 1)
            # A test that pytest names otherwise when it fails cannot be run by itself.
            alone = mutant.by in usable and mutant.outcome == "noticed"
            if not alone or self._run([mutant.by])[0] == "survived":
                return
            # It fails without the change too, so it says nothing about the mutant.
            self._broken.add(mutant.by)
            print(f"left out, it fails without a mutant: {mutant.by}", flush=True)

    def _write(self, file: Path, source: bytes) -> None:
        file.write_bytes(source)
        self._time += 1
        os.utime(file, (self._time, self._time))

    def _run(self, tests: list[str]) -> tuple[str, str]:
        """Run tests until one fails, and return the outcome and which one failed, or why none did."""
        names = self.folder / "tests-to-run"
        names.write_text("\n".join(tests), encoding="utf-8")
        options = ["-x", "-q", "-n0", "-m", "", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        options += [f"--timeout={SECONDS_PER_TEST}", f"--basetemp={self.folder / 'tmp'}"]
        command = [sys.executable, "-m", "pytest", *options, f"@{names}"]
        output = self.folder / "output"
        with output.open("wb") as file:
            streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            variables = _environment(self.folder)
            process = subprocess.Popen(command, cwd=self.folder, env=variables, start_new_session=True, **streams)
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill_session(process.pid)
                process.wait()
        text = output.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return "noticed", line.split(" ", 1)[1].partition(" - ")[0]
        if code is None:
            return "survived", f"not all of {len(tests)} tests have run in {SECONDS} s"
        if code == 0:
            return "survived", f"{len(tests)} tests pass"
        return "error", text.strip().rpartition("\n")[2]


def _kill_session(leader: int) -> None:
    """Kill all processes of a session, those in groups of their own too."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    os.kill(int(process.name), signal.SIGKILL)
            except (OSError, IndexError):
                continue


def choose(tree: Path, tests: TestMap, rng: random.Random) -> Iterator[tuple[Mutant, Change]]:
    """Yield mutants at random, each once, whose lines a test executes."""
    sites: dict[bool, list[tuple[str, Change]]] = {True: [], False: []}
    sources = {}
    for file in sorted((tree / "pipeline").rglob("*.py")):
        path = str(file.relative_to(tree))
        sources[path] = file.read_bytes()
        sites[file.relative_to(tree).parts[1] in MOST] += [(path, change) for change in changes(sources[path])]
    for each in sites.values():
        rng.shuffle(each)
    while any(sites.values()):
        preferred = rng.random() < SHARE_OF_MOST
        path, change = (sites[preferred] or sites[not preferred]).pop()
        if tests.tests(path, change.line, change.statement):
            yield Mutant(path, change.line, change.describe(sources[path])), change


def replayed(tree: Path, report: Path) -> Iterator[tuple[Mutant, Change]]:
    """Yield the mutants of an earlier report, with the outcome that they had; those whose code has changed are left out."""
    for line in report.read_text(encoding="utf-8").splitlines():
        earlier = Mutant(**json.loads(line))
        source = (tree / earlier.path).read_bytes()
        same = [change for change in changes(source) if change.describe(source) == earlier.change]
        if not same:
            print(f"left out, the code has changed: {earlier.path}:{earlier.line} {earlier.change}")
            continue
        nearest = min(same, key=lambda change: abs(change.line - earlier.line))
        yield Mutant(earlier.path, nearest.line, earlier.change, outcome=earlier.outcome), nearest


def run(
    tree: Path, tests: TestMap, mutants: Iterable[tuple[Mutant, Change]], jobs: int, until: float
) -> Iterator[tuple[Mutant, str]]:
    """Test mutants, several at a time, until the time is over; with the outcome of an earlier report."""
    free: SimpleQueue[Workplace] = SimpleQueue()

    def one(mutant: Mutant, change: Change) -> tuple[Mutant, str] | None:
        if time.monotonic() > until:
            return None
        earlier = mutant.outcome
        names = tests.tests(mutant.path, change.line, change.statement)
        workplace = free.get()
        try:
            workplace.test(mutant, change, names)
            if (earlier, mutant.outcome) == ("noticed", "survived"):
                workplace.test(mutant, change, names)
        finally:
            free.put(workplace)
        return mutant, earlier

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            free.put(Workplace(tree, Path(scratch) / str(number)))
        for result in pool.map(lambda pair: one(*pair), mutants):
            if result:
                yield result


def main() -> None:
    """Run from the command line; the exit code is 1 if a mutant that was noticed before survives."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=60, help="how many mutants")
    parser.add_argument("--minutes", type=float, default=60, help="no mutant is begun after so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many are tested at a time")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="whose code and tests; default: this one")
    parser.add_argument("--map", type=Path, help="the folder of the map; default: .mutants in the tree")
    parser.add_argument("--new-map", action="store_true", help="measure the map again")
    parser.add_argument("--replay", type=Path, help="make the mutants of this report again")
    parser.add_argument("--report", type=Path, help="a file for one JSON line for each mutant")
    chosen = parser.parse_args()
    until = time.monotonic() + 60 * chosen.minutes
    tree = chosen.tree.resolve()
    folder = (chosen.map or tree / ".mutants").resolve()
    if chosen.new_map or not (folder / "coverage").exists():
        make_map(tree, folder)
        until = time.monotonic() + 60 * chosen.minutes
    tests = TestMap(folder)
    if chosen.replay:
        mutants = list(replayed(tree, chosen.replay))
    else:
        chooser = choose(tree, tests, random.Random(chosen.seed))
        mutants = [mutant for mutant, _ in zip(chooser, range(chosen.n), strict=False)]
    outcomes: Counter[str] = Counter()
    lost = 0
    for mutant, earlier in run(tree, tests, mutants, chosen.jobs, until):
        outcomes[mutant.outcome] += 1
        is_lost = (earlier, mutant.outcome) == ("noticed", "survived")
        lost += is_lost
        note = "  WAS NOTICED BEFORE" if is_lost else ""
        print(
            f"{mutant.outcome:8} {mutant.seconds:5.1f} s {mutant.path}:{mutant.line} {mutant.change}{note}", flush=True
        )
        print(f"         {mutant.by}", flush=True)
        if chosen.report:
            with chosen.report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(mutant)) + "\n")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{sum(outcomes.values())} of {len(mutants)} mutants: {counts or 'none'}")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
