"""Ranks of whole runs killed at random moments, and started again: ``python tests/faults/rank_kills.py [KILLS [SEED]]``.

``pipeline run --nproc N --max-restarts K`` on 2 to 4 processes, without workers and with two each. Any of the processes
gets SIGKILL, also rank 0, also inside a save; torch's launcher starts all of them again, and they go on in the run
directory. A run passes if all that it has come to is bit for bit what an unbroken one on as many processes comes to, and
nothing temporary and no process is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from run_kills import left_by_saves
from whole_runs import FILES, RUN_DIR, end, last_line, wrong

from pipeline.testing import write_files

PLUGIN = """
    import os, time
    from pipeline.checkpoint.storage import Disk

    def slowly(operation):
        def operate(self, *arguments):
            time.sleep(float(os.environ.get("SLOW_DISK", "0")))
            return operation(self, *arguments)
        return operate

    for name in ("mkdir", "write", "fsync", "rename", "fsync_folder", "remove"):
        setattr(Disk, name, slowly(getattr(Disk, name)))

    from pipeline import hookimpl

    class Plugin:
        every_rank = True

        @hookimpl
        def before_pipeline(self):
            pass
"""


def start(config: Path, folder: Path, ranks: int, workers: int, slow: float = 0.0) -> subprocess.Popen[bytes]:
    """Begin a run on so many processes."""
    loaders = [f"dataset.{name}.num_workers={workers}" for name in ("train", "valid")]
    command = [sys.executable, "-m", "pipeline", "run", "-q", str(config), *loaders]
    command += ["--nproc", str(ranks), "--max-restarts", "100"]
    environment = {**os.environ, "SLOW_DISK": str(slow), "OMP_NUM_THREADS": "1"}
    with (folder / "printed").open("wb") as printed:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=printed, stderr=printed)


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks that a launcher has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            command = (stat.parent / "cmdline").read_bytes()
            if int(parent) == launcher and state != "Z" and b"pipeline" in command:
                found.append(int(stat.parent.name))
    return found


def killed_run(
    config: Path, folder: Path, ranks: int, workers: int, kills: int, seconds: float, chance: random.Random
) -> tuple[int, int, int | None]:
    """One run whose ranks are killed so often; (kills, those inside a save, the exit code)."""
    process = start(config, folder, ranks, workers, chance.choice((0.001, 0.003)))
    done = inside = 0
    while done < kills and process.poll() is None:
        before, moment = left_by_saves(folder), time.monotonic() + chance.uniform(1.5, 1.5 + seconds)
        in_save = chance.random() < 0.5
        while time.monotonic() < moment and process.poll() is None:
            if in_save and time.monotonic() > moment - seconds and left_by_saves(folder) - before:
                break
            time.sleep(0.002)
        if victims := ranks_of(process.pid):
            inside += bool(left_by_saves(folder) - before)
            with suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
                done += 1
    try:
        code = process.wait(300)
    except subprocess.TimeoutExpired:
        process.kill()
        code = None
    return done, inside, code


def experiment(scratch: Path, kills: int = 100, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """So many kills, one to three a run; what was counted, and the faults."""
    changes = {"{workspace}/moments.py": "{workspace}/disk.py", "epochs: 3": "epochs: 9"}
    # Of all ranks, so that there are as many iterations on any number of them; and BatchNorm needs two samples on each.
    changes |= {" batch_size: 3": " global_batch_size: 9", " batch_size: 6": " global_batch_size: 6"}
    text = FILES["config.yaml"]
    for old, new in changes.items():
        text = text.replace(old, new)
    config = write_files(scratch / "job", {**FILES, "disk.py": PLUGIN, "config.yaml": text}) / "config.yaml"
    chance, counts, faults = random.Random(seed), Counter[str](), list[str]()
    expected: dict[tuple[int, int], tuple[dict[str, Any], float]] = {}
    while counts["kills"] < kills:
        case = ranks, workers = chance.choice((2, 2, 3, 4)), chance.choice((0, 2))
        if case not in expected:
            folder, began = Path(tempfile.mkdtemp(dir=scratch)), time.monotonic()
            process = start(config, folder, *case)
            assert process.wait() == 0, (folder / "printed").read_text()
            expected[case] = end(folder / RUN_DIR), time.monotonic() - began
        folder = Path(tempfile.mkdtemp(dir=scratch))
        planned = min(chance.randint(1, 3), kills - counts["kills"])
        done, inside, code = killed_run(config, folder, *case, planned, expected[case][1], chance)
        found = [f"left with {code}: {last_line(folder)}"] if code else wrong(folder / RUN_DIR, expected[case][0])
        faults += [f"{ranks} ranks, {workers} workers, {done} kills: {fault}" for fault in found]
        counts += Counter({"kills": done, "inside a save": inside, "runs": 1, "unlike": int(bool(found))})
        print(case, done, inside, found, folder if found else "", file=sys.stderr, flush=True)
    return counts, faults


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        result, told = experiment(Path(scratch), *given)
    print(*told, sep="\n", end="\n" if told else "")
    print(json.dumps({**result, "seconds": round(time.monotonic() - began)}))
    sys.exit(bool(told))
