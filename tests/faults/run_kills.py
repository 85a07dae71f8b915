"""Whole runs killed at random moments and resumed to the end: ``python tests/faults/run_kills.py [KILLS [SEED [DATA]]]``.

Each run is killed by SIGKILL one to four times, anywhere between its first line and its last, alone or with its workers;
it has none or two. Where the disk is slow, many a kill falls inside a save, which is seen by what it leaves behind.
A run passes if all that it has come to is bit for bit what an unbroken one comes to, and nothing temporary is left.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forked_runs import Forked, Moments, Zygote, several, side_by_side
from whole_runs import RUN_DIR, arguments, last_line, own_cache, unbroken, write_job, wrong

INSIDE = 0.3
"""The part of many kills that has to fall inside a save."""


class Killed(NamedTuple):
    """A run that is over.

    Attributes:
        kills: how often it was killed.
        inside: how often inside a save.
        faults: what is otherwise than in the unbroken run.
    """

    kills: int
    inside: int
    faults: list[str]


class Job(NamedTuple):
    """What is run.

    Attributes:
        config: its path.
        folder: where the runs go.
        expected: workers -> what an unbroken run comes to.
        seconds: how long that takes.
    """

    config: Path
    folder: Path
    expected: dict[int, dict[str, Any]]
    seconds: float


def left_by_saves(folder: Path) -> set[str]:
    """What saves that were not finished have left."""
    names = {path.name for path in folder.glob("runs/job/*/train/checkpoints/*")}
    return {name for name in names if name.startswith((".tmp-", ".del-")) or name.endswith(".new")}


def wait(process: Forked, moments: Moments, seconds: float, chance: random.Random) -> None:
    """Wait for a random moment of a run: any at all, or one in a save; or for its end, if that comes first."""
    moments.told()
    if chance.random() < 0.5:
        process.wait(chance.uniform(0, 1.2 * seconds))
    else:
        moments.until("save", chance.randint(1, 150), process)
        process.wait(chance.uniform(0, 0.004))


def killed_run(zygote: Zygote, job: Job, kills: int, chance: random.Random) -> Killed:
    """One run, killed so often, or less often where it is quicker, and resumed to the end."""
    folder, workers = Path(tempfile.mkdtemp(dir=job.folder)), chance.choice((0, 2))
    slow = {"SLOW_DISK": str(chance.choice((0.001, 0.002, 0.004)))}
    environment = slow | own_cache(job.folder)
    done, inside, code = 0, 0, None
    with Moments(folder) as moments:
        while code in {None, -signal.SIGKILL}:
            before = left_by_saves(folder)
            process = zygote.start(
                folder, arguments(job.config, workers), folder / "printed", moments.environment | environment
            )
            if done < kills:
                wait(process, moments, job.seconds / kills, chance)
                process.send(signal.SIGKILL, to_group=chance.random() < 0.5)
            code = process.wait()
            done += code == -signal.SIGKILL
            inside += bool(left_by_saves(folder) - before)
    found = [f"left with {code}: {last_line(folder)}"] if code else wrong(folder / RUN_DIR, job.expected[workers])
    return Killed(done, inside, [f"{workers} workers, {done} kills: {each}" for each in found])


def experiment(
    folder: Path, zygotes: Sequence[Zygote], kills: int = 200, seed: int = 0, data: str = "noisy"
) -> tuple[Counter[str], list[str]]:
    """So many kills, one to four a run; what was counted, and the faults."""
    config, chance = write_job(folder / "job", data), random.Random(seed)
    before = time.monotonic()
    expected = unbroken(zygotes[0], folder, config)
    job = Job(config, folder, expected, (time.monotonic() - before) / len(expected))
    runs: list[Killed] = []
    while left := kills - sum(run.kills for run in runs):
        # All but the last are killed as often as planned, unless they are too quick.
        planned = [chance.randint(1, 4) for _ in range(left)]
        counts = [min(each, left - sum(planned[:index])) for index, each in enumerate(planned)]
        tasks = [(each, random.Random(chance.random())) for each in counts if each > 0]
        runs += side_by_side(lambda zygote, task: killed_run(zygote, job, *task), tasks, zygotes)
    faults = [fault for run in runs for fault in run.faults]
    inside, broken = sum(run.inside for run in runs), sum(bool(run.faults) for run in runs)
    return Counter({"kills": kills, "inside a save": inside, "runs": len(runs), "unlike": broken}), faults


if __name__ == "__main__":
    numbers, data = [int(each) for each in sys.argv[1:3]], sys.argv[3:]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, several() as zygotes:
        result, told = experiment(Path(scratch), zygotes, *numbers, *data)
    print(*told, sep="\n", end="\n" if told else "")
    print(json.dumps({**result, "seconds": round(time.monotonic() - began)}))
    few = result["kills"] >= 100 and result["inside a save"] < INSIDE * result["kills"]
    sys.exit(bool(told) or few)
