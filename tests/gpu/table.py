"""The command ``tests/gpu/run``: measure each row in a process of its own, and print the table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from tests.gpu.findings import Findings, UnavailableError
from tests.gpu.rows import ROOT, ROWS, Row

RUN = ROOT / "tests" / "gpu" / "run"

NO_GPU = 77
"""The exit code if there is no GPU."""

LIMIT = 290.0
"""Seconds after which nothing is measured any more."""

LIMIT_OF_ROW = 120.0
"""Seconds after which a row is ended, so that one that hangs leaves time for the others."""


class Result(NamedTuple):
    """A row that was measured.

    Attributes:
        outcome: ``ok``, ``FAILED``, or what the row needs.
        measured: what was measured; the error, if one was raised.
        expected: what was expected.
        seconds: how long it took.
        details: the traceback of an error, or the last lines of the output.
    """

    outcome: str
    measured: str = ""
    expected: str = ""
    seconds: float = 0.0
    details: str = ""


def measure(row: Row, device: torch.device) -> Result:
    """Measure a row in this process."""
    if row.needs_cuda and device.type != "cuda":
        return Result("needs CUDA")
    found = Findings()
    details = ""
    began = time.perf_counter()
    try:
        row.measure(device, found)
        outcome = "ok" if found.is_ok else "FAILED"
    except UnavailableError as error:
        outcome = str(error)
    except Exception as error:
        outcome = "FAILED"
        details = traceback.format_exc()
        [first, *_] = str(error).splitlines() or [""]
        found.measured.append(f"{type(error).__name__}: {first}")
    seconds = time.perf_counter() - began
    return Result(outcome, "; ".join(found.measured), "; ".join(found.expected), seconds, details)


def measure_apart(row: Row, device: torch.device, seconds: float) -> Result:
    """Measure a row in another process, so that the others are measured even if that one crashes or hangs."""
    if row.needs_cuda and device.type != "cuda":
        return Result("needs CUDA")
    if seconds <= 0:
        return Result("FAILED", f"no time is left of {LIMIT:g} seconds")
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        log = Path(folder) / "log.txt"
        command = [sys.executable, str(RUN), "--device", str(device), "--only", row.what, "--to", str(file)]
        why = run_in_group(command, log, seconds)
        output = log.read_text(encoding="utf-8", errors="replace")
        result = Result(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else Result("FAILED", why)
    return result._replace(seconds=time.perf_counter() - began, details=result.details or output)


def run_in_group(command: Sequence[str], log: Path, seconds: float) -> str:
    """Run a command, end all processes that it has started, and say how it has ended.

    Args:
        command: the command.
        log: the file for its output. A pipe would stay open as long as any of its processes runs.
        seconds: how long it may take.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return f"its process has left with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            return f"not done within {seconds:.0f} seconds"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def line(*cells: str) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"


def versions(device: torch.device) -> str:
    """Return the versions that matter, and the name of the card. One that cannot be found does not stop the others."""
    git = ["git", "describe", "--always", "--dirty"]
    found: dict[str, Callable[[], object]] = {
        "commit": lambda: subprocess.check_output(git, cwd=ROOT, stderr=subprocess.DEVNULL, text=True).strip(),
        "Python": platform.python_version,
        "torch": lambda: torch.__version__,
    }
    if device.type == "cuda":
        found |= {
            "CUDA": lambda: torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version,
            "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
            "card": lambda: torch.cuda.get_device_name(device),
            "capability": lambda: ".".join(map(str, torch.cuda.get_device_capability(device))),
            "GiB": lambda: torch.cuda.get_device_properties(device).total_memory // 2**30,
        }
    else:
        found["processor"] = platform.machine
    named = []
    for name, find in found.items():
        try:
            named.append(f"{name} {find()}")
        except Exception as error:
            named.append(f"{name} unknown ({type(error).__name__})")
    return ", ".join(named)


def why_no_gpu() -> str:
    """Say in one sentence that there is no GPU."""
    built = "" if torch.version.cuda else " (built without CUDA)"
    return f"There is no GPU that torch {torch.__version__}{built} can use; `--device cpu` measures what needs none."


def main(arguments: Sequence[str], rows: Sequence[Row] = ROWS, *, apart: bool = True) -> int:
    """Print the table.

    Args:
        arguments: of the command line.
        rows: what may be measured.
        apart: whether each row is measured in a process of its own.

    Returns:
        The exit code: 0; 1 if a row failed; 77 if there is no GPU.
    """
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description="Measure on a GPU, and print a table.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the rows that need no GPU")
    parser.add_argument("--only", action="append", metavar="ROW", choices=[row.what for row in rows], help="these rows")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(why_no_gpu())
        return NO_GPU
    device = torch.device(chosen.device)
    rows = [row for row in rows if not chosen.only or row.what in chosen.only]
    if chosen.to:
        chosen.to.write_text(json.dumps(measure(rows[0], device)._asdict()), encoding="utf-8")
        return 0
    return print_table(rows, device, apart=apart)


def print_table(rows: Sequence[Row], device: torch.device, *, apart: bool) -> int:
    """Measure the rows, print each when it is done, and return the exit code."""
    began = time.monotonic()
    print(f"{versions(device)}\n", flush=True)
    print(line("what", "result", "measured", "expected", "seconds"))
    print("|---|---|---|---|---|", flush=True)
    failures = {}
    for row in rows:
        left = LIMIT - (time.monotonic() - began)
        result = measure_apart(row, device, min(left, LIMIT_OF_ROW)) if apart else measure(row, device)
        if result.outcome == "FAILED":
            failures[row.what] = result.details
        seconds = f"{result.seconds:.1f}" if result.seconds else ""
        print(line(row.what, result.outcome, result.measured, result.expected, seconds), flush=True)
    print(f"\n{len(failures)} of {len(rows)} rows failed, in {time.monotonic() - began:.0f} seconds", flush=True)
    for what, details in failures.items():
        print(f"\n{what}:\n{details[-4000:]}", file=sys.stderr)
    return 1 if failures else 0
