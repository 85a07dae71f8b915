"""A process that saves in a loop, killed at random moments: what it reported is there, whole, and nothing is left behind.

    python tests/faults/checkpoint_kills.py [KILLS]

prints how many there were, how many inside a save, and what was lost, wrong or left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from checkpoint_power import models, number_of
from loguru import logger

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint.reader import problems_of


def save_for_ever(folder: Path, first: int, asynchronous: bool, report: int) -> None:
    """Save number after number, each step twice, and write each that is committed to a pipe."""
    checkpointer = Checkpointer(folder, keep_last=2, asynchronous=asynchronous)
    number = first
    while True:
        number += 1
        checkpointer.save(models(number), {"iteration": number // 2}, {"main": {"number": number}}, {"number": number})
        # Asynchronously the one before has been committed by now, this one perhaps not.
        done = number if not asynchronous else number - 1
        if checkpointer.store.poll() and done > first:
            os.write(report, done.to_bytes(8, "little"))


def kill_once(folder: Path, first: int, asynchronous: bool, after: float) -> int:
    """Start such a process, kill it so many seconds after it first reported, and return what it reported last."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, first, asynchronous, writing)
        finally:
            os._exit(1)
    os.close(writing)
    reported = os.read(reading, 8)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 8):
        reported = more
    os.close(reading)
    return int.from_bytes(reported, "little")


def experiment(folder: Path, kills: int, seed: int = 0) -> Counter[str]:
    """Kill one process after the other, each of which goes on where the last one ended."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter(kills=kills)
    number = 0
    for index in range(kills):
        reported = kill_once(folder, number, asynchronous=bool(index % 2), after=chance.random() / 20)
        names = [path.name for path in folder.iterdir()]
        counts["inside a save"] += any(name.startswith((".tmp-", ".del-")) or name.endswith(".new") for name in names)
        checkpointer = Checkpointer(folder)
        found = number_of(checkpointer)
        counts["wrong"] += found == -1
        counts["lost"] += (found or -1) < reported
        counts["set aside"] += len(list(folder.glob(".bad-*")))
        counts["left"] += sum(not path.name.startswith("step-") or path.suffix == ".new" for path in folder.iterdir())
        counts["incomplete"] += any(problems_of(path) for path in checkpointer.all())
        number = max(found or 0, reported) // 2 * 2 + 2
    return counts


if __name__ == "__main__":
    logger.remove()
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        result = experiment(Path(scratch), int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    print(dict(result))
    sys.exit(any(result[what] for what in ("wrong", "lost", "set aside", "left", "incomplete")))
