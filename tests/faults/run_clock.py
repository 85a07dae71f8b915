"""The clock a year back or forward, between saves and between run and resumption: ``python tests/faults/run_clock.py [MOST]``.

A run sets the clock after 20 iterations and is killed after 62; the clock may be set again before it is resumed. It has to
go on from the checkpoint of the highest step, whatever the times of the files, to save what it would have saved, although
it also saves every 30 minutes, and to end bit for bit like a run whose clock was right. Of two runs, the second of which
began by a clock that had been set, ``--resume auto`` has to go on with the second.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from itertools import product
from pathlib import Path
from typing import Any

import shifted_clock
from whole_runs import RUN_DIR, arguments, differences, end, write_job, wrong

from pipeline.checkpoint import layout

YEAR = 366 * 24 * 3600.0
JUMPS = [jumps for jumps in product((-YEAR, 0.0, YEAR), repeat=2) if any(jumps)]
"""Between two saves, and before the run is resumed."""
PLUGIN = """
    import os, signal, sys
    from pipeline import hookimpl

    JUMP, KILL = float(os.environ.get("CLOCK_JUMP", "0")), int(os.environ.get("KILL_AT", "-1"))

    class Plugin:
        @hookimpl
        def before_batch(self, context):
            iteration = context["train_state"]["iteration"]
            if iteration in {20, KILL}:
                context["checkpointer"].all()
            if iteration == 20 and JUMP:
                sys.modules["__main__"].jump(JUMP, context["run_dir"])
            if iteration == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
"""
MORE = (
    'plugins=[{progress_bar: false}, "{workspace}/clock.py"]',
    "runner.train.save_interval=[5, 1 epoch, 30 minute]",
    "runner.train.keep_last=null",
)


def run(
    folder: Path, config: Path, workers: int, resume: str = "auto", **environment: Any
) -> subprocess.CompletedProcess[str]:
    """A run by the shifted clock, or the rest of one."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", shifted_clock.__file__, *arguments(config, workers), *MORE]
    command = [resume if word == "auto" else word for word in command if word != "-q"]
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.run(command, cwd=folder, env=os.environ | given, capture_output=True, text=True, check=False)


def ended_alike(
    folder: Path, config: Path, workers: int, jumps: tuple[float, float], expected: dict[str, Any]
) -> list[str]:
    """Kill and resume a run while the clock jumps; what is wrong with it."""
    killed = run(folder, config, workers, CLOCK_JUMP=jumps[0], KILL_AT=62)
    if killed.returncode != -signal.SIGKILL:
        return [f"was to be killed, and left with {killed.returncode}: {killed.stderr}"]
    run_dir = (folder / RUN_DIR).resolve()
    newest = layout.step_of(layout.committed_checkpoints(run_dir / "train" / "checkpoints")[-1])
    shifted_clock.age(run_dir, jumps[1])
    resumed = run(folder, config, workers, CLOCK_OFF=sum(jumps))
    if resumed.returncode:
        return [f"resumed, left with {resumed.returncode}: {resumed.stderr}"]
    found = [int(each) for each in re.findall(r"going on after iteration (\d+)", resumed.stderr)]
    return [f"went on after {found} instead of {newest}"] * (found != [newest]) + wrong(run_dir, expected)


def went_on_with_the_second(folder: Path, config: Path, jump: float, expected: dict[str, Any]) -> list[str]:
    """Begin a second run by another clock, kill it and resume the newest; what is wrong with that."""
    first = run(folder, config, 0, resume="never")
    before = end(folder / RUN_DIR) if not first.returncode else {}
    kept = (folder / RUN_DIR).resolve()
    killed = run(folder, config, 0, resume="never", CLOCK_OFF=jump, KILL_AT=62)
    resumed = run(folder, config, 0, CLOCK_OFF=jump / 2)
    codes = (first.returncode, killed.returncode, resumed.returncode)
    if codes != (0, -signal.SIGKILL, 0):
        return [f"left with {codes}: {resumed.stderr}"]
    second = [path for path in kept.parent.iterdir() if path not in {kept, kept.parent / "latest"}]
    found = ["latest is the first"] if (folder / RUN_DIR).resolve() != second[0] else []
    found += [f"the first: {place}" for place in differences(end(kept), before)]
    # They are beside each other now.
    return [place for place in found + wrong(second[0], expected) if not place.endswith(".beside")]


def right(folder: Path, config: Path, workers: int) -> dict[str, Any]:
    """What a run comes to whose clock is right."""
    done = run(folder, config, workers)
    assert done.returncode == 0, done.stderr
    return end(folder / RUN_DIR)


def experiment(folder: Path, most: int | None = None) -> tuple[int, list[str]]:
    """Every pair of jumps without workers and with two, and two runs; how many were tried, and the faults."""
    config = write_job(folder / "job")
    (config.parent / "clock.py").write_text(textwrap.dedent(PLUGIN), encoding="utf-8")
    pairs = [(workers, jumps) for workers in (0, 2) for jumps in JUMPS][:most]
    seconds = (-YEAR, YEAR)[: None if most is None else max(0, most - len(pairs))]
    expected = {workers: right(folder / f"right-{workers}", config, workers) for workers, _ in pairs}
    faults: list[str] = []
    for workers, jumps in pairs:
        name = f"{workers} workers, jumps of {jumps[0]:+.0f} and {jumps[1]:+.0f} seconds"
        faults += [f"{name}: {each}" for each in ended_alike(folder / name, config, workers, jumps, expected[workers])]
    for jump in seconds:
        found = went_on_with_the_second(folder / f"two {jump:+.0f}", config, jump, expected[0])
        faults += [f"two runs, the second {jump:+.0f} seconds off: {each}" for each in found]
    return len(pairs) + len(seconds), faults


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        count, told = experiment(Path(scratch), *map(int, sys.argv[1:]))
    print(*told, sep="\n", end="\n" if told else "")
    print(json.dumps({"runs": count, "unlike": len(told), "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(told))
