"""Whether memory grows with the number of steps: ``python tests/benchmarks/memory.py --steps 100000``.

The small job, by ``Brain.fit`` and by a run with their defaults, and by hand, each in a process of its own. What the
process holds after a tenth of the steps is compared with what it holds after all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from side_by_side import Clock, undisturbed
from small_job import Batch, by_fit, by_hand, by_run, in_memory


class Noted:
    """The same batches again and again; what memory the process holds is noted after a tenth and after all of them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.batches = list(in_memory(100))
        self.held: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            if step == self.steps // 10:
                self.held.append(held())
            yield self.batches[step % 100]
        self.held.append(held())

    def __len__(self) -> int:
        return self.steps


def held() -> tuple[int, int]:
    """Bytes of this process in memory, and blocks of Python's own, without what is garbage."""
    gc.collect()
    return resident(), sys.getallocatedblocks()


def resident() -> int:
    """Bytes of this process in memory; where the system does not say, the most that there ever were."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def growth(way: str, steps: int) -> dict[str, int]:
    """By how many bytes the process grew, and by how many blocks Python's own memory did.

    Args:
        way: ``hand``, ``fit`` or ``run``.
        steps: from a tenth of them to all.
    """
    noted = Noted(steps)

    def data(_: int) -> Iterable[Batch]:
        return noted

    with undisturbed():
        match way:
            case "hand":
                by_hand(data, None, steps, Clock())
            case "fit":
                by_fit(data, {}, steps, Clock())
            case _:
                by_run(data, {}, [], steps, Clock())
    (bytes_before, blocks_before), (bytes_after, blocks_after) = noted.held
    return {"bytes": bytes_after - bytes_before, "blocks": blocks_after - blocks_before}


def growths(steps: int) -> dict[str, dict[str, int]]:
    """The growth of each way, each in a process of its own."""
    found = {}
    for way in ("hand", "fit", "run"):
        command = [sys.executable, "-W", "ignore", __file__, "--steps", str(steps), "--way", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[way] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print the growth of each way, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--way", choices=("hand", "fit", "run"), help="only this one, in this process")
    arguments = parser.parse_args()
    found = growth(arguments.way, arguments.steps) if arguments.way else growths(arguments.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
