"""How long the command line takes before anything runs, beside a bare Python: ``python tests/benchmarks/start_up.py``.

Budgets: ``pipeline --help`` 85 ms, plain ``check`` of the main example 0.5 s. The times are medians of 15 runs, taken in
turn; those of ``python -c pass`` show what the machine does anyway.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "workspace_examples" / "movielens_deepfm" / "config.yaml"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import click'": [sys.executable, "-c", "import click"],
    "pipeline --help": [sys.executable, "-m", "pipeline", "--help"],
    "pipeline check movielens_deepfm": [sys.executable, "-m", "pipeline", "check", str(CONFIG)],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
}


def main() -> None:
    """Print the table."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(15):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        print(f"{name:34} median {statistics.median(values) * 1000:6.0f} ms   min {min(values) * 1000:6.0f} ms")


if __name__ == "__main__":
    main()
