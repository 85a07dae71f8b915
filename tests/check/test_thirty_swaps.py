"""Thirty stages that strangers write, six of each kind: nothing is wrong with them, and they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from thirty_swaps import FOLDER, INSTALLED, SWAPS, write

from pipeline import GeneralTrainer
from pipeline.check.checker import check

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that one of them comes from."""
    monkeypatch.syspath_prepend(str(INSTALLED))


# Each is a run; one of each stage is quick.
SOME = [pytest.param(name, marks=() if number % 6 == 0 else pytest.mark.slow) for number, name in enumerate(SWAPS)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SOME)
def test_a_swap_has_no_fault_and_runs(name: str, tmp_path: Path) -> None:
    config = write(name, tmp_path / "workspace")
    assert check(config) == []
    context = GeneralTrainer(config).run()
    assert json.loads((context["run_dir"] / "status.json").read_text())["state"] == "done"


@pytest.mark.slow
def test_the_swaps_are_typed(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    write("by_hand", tmp_path / "workspace")
    # Its cache is kept, since torch takes it ten seconds.
    kept = getattr(pytestconfig, "cache", None)
    cache = kept.mkdir("mypy") if kept else "mypy"
    command = [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases", "--follow-imports=silent"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(INSTALLED)])
    done = subprocess.run(
        [*command, "--config-file=", f"--cache-dir={cache}", str(INSTALLED), "workspace"],
        env=os.environ | {"MYPYPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    count = len([*FOLDER.glob("*.py"), *INSTALLED.rglob("*.py")])
    assert done.stdout == f"Success: no issues found in {count} source files\n"
