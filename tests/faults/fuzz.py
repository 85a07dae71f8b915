"""Mutated configs go through ``check``: it answers with faults, and never fails, imports or runs anything.

``python tests/faults/fuzz.py 100000`` checks that many, ``--seed 7`` others than last time. Each case is checked under
an audit hook, which cannot be taken off again: so this is a program of its own, which ``tests/test_fuzz.py`` starts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
from mutations import BASES, Case, cases, write_workspaces

from pipeline.check.checker import check
from pipeline.errors import Fault

FORBIDDEN = (
    "exec",
    "import",
    "subprocess.",
    "os.",
    "pty.",
    "socket.",
    "shutil.",
    "ctypes.",
    "urllib.",
    "ftplib.",
    "signal.",
)
HARMLESS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.listxattr", "os.getxattr"}


class Watch:
    """What happens in this process while it is armed, and must not."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self.note)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """The audit hook."""
        if not self.armed:
            return
        writes = event == "open" and ((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        if writes or (event.startswith(FORBIDDEN) and event not in HARMLESS):
            self.seen.append(f"{event} {args[:2]!r}"[:300])

    def check(self, config: Path, overrides: list[str]) -> list[Fault]:
        """The faults, with what happens meanwhile in ``seen``."""
        self.seen, self.armed = [], True
        try:
            return check(config, overrides)
        finally:
            self.armed = False


def hold(case: Case, folder: Path, watch: Watch) -> list[Fault]:
    """Check one case, and what must hold of every case."""
    config = folder / case.workspace / "config.yaml"
    config.write_bytes(case.text.encode("utf-8", "surrogatepass"))
    faults = watch.check(config, case.overrides)
    assert not watch.seen, f"check did what it must not: {watch.seen}"
    imported = [name for name in sys.modules if name.startswith(("pipeline.workspaces.", "torch"))]
    assert not imported, f"check imported {imported}"
    for fault in faults:
        assert isinstance(fault, Fault), fault
        assert fault.where, fault
        assert fault.message.strip(), fault
        assert "; " in fault.message or ": write " in fault.message, f"no remedy: {fault}"
    return faults


def main() -> None:
    """Check as many cases as the command line says; the first that fails is made small and shown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    watch, start, clean, faulty, slowest = Watch(), time.perf_counter(), 0, 0, (0.0, "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_workspaces(folder)
        for base, text in BASES.items():
            (folder / base / "config.yaml").write_text(text, encoding="utf-8")
            assert check(folder / base / "config.yaml") == [], base  # also imports what check imports late

        @hypothesis.seed(arguments.seed)
        @hypothesis.settings(
            max_examples=arguments.count,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(cases())
        def answers_with_faults(case: Case) -> None:
            nonlocal clean, faulty, slowest
            begin = time.perf_counter()
            found = hold(case, folder, watch)
            slowest = max(slowest, (time.perf_counter() - begin, case.text))
            clean, faulty = clean + (not found), faulty + bool(found)

        try:
            answers_with_faults()
        except BaseException as error:
            error.add_note(
                f"seed {arguments.seed}; again with: python tests/faults/fuzz.py {arguments.count} --seed {arguments.seed}"
            )
            raise
    print(
        f"{clean + faulty} configs: {faulty} with faults, {clean} without; {time.perf_counter() - start:.0f} s, slowest {slowest[0]:.2f} s"
    )


if __name__ == "__main__":
    main()
