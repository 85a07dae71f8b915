"""The keys that generated workspaces lack are found, and no others; the counts are in tests/README.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

PROGRAM = Path(__file__).parents[1] / "faults" / "data_flow.py"


@pytest.mark.slow
def test_of_200_generated_workspaces_the_missing_keys_are_found_and_no_others() -> None:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "200"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(r"(\d+) false faults; (\d+) of (\d+) missing keys found", done.stdout)
    assert counts
    assert counts[0] in " ".join((REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8").split())
