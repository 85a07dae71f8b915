"""How long a save of several ranks stops training, per 100 MB: ``python tests/benchmarks/rank_saves.py [RANKS [MEGABYTES]]``.

A model and its AdamW, a third weights, are saved as a run does, the same on one process and on several. Of each rank the
median of the saves after the first is printed, which makes the buffers, and how long the save took until it was on disk.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeline.brain.checkpointer import Checkpointer
from pipeline.distributed.world import current_world
from tests.distributed.ranks import Ranks

SAVES = 9


def measure(folder: Path, megabytes: int) -> tuple[float, float]:
    """Milliseconds for which training stops, and until all is on disk; medians."""
    torch.set_num_threads(1)
    width = int((megabytes * 1e6 / 12 / 32) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(32)))
    moments = {name: [torch.rand_like(own), torch.rand_like(own)] for name, own in model.named_parameters()}
    saver, stalls, totals = Checkpointer(folder, keep_last=2, asynchronous=True), list[float](), list[float]()
    for iteration in range(SAVES):
        current_world().all_gather(None)
        begin = time.perf_counter()
        saver.save(
            {"main": {"model": model}}, {"iteration": iteration}, {}, {"optim_schedulers": {}, "moments": moments}
        )
        stalls.append(1e3 * (time.perf_counter() - begin))
        saver.store.wait()
        totals.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(stalls[1:]), statistics.median(totals[1:])


def main(size: int, megabytes: int) -> None:
    """Measure on one process and on several."""
    for count in (1, size):
        ranks = Ranks(count)
        with tempfile.TemporaryDirectory() as folder:
            results = ranks(measure, Path(folder, "checkpoints"), megabytes)
        ranks.stop()
        for rank, (stall, total) in enumerate(results):
            per_100 = 100 / megabytes
            print(
                f"{count} processes, rank {rank}: stops for {stall * per_100:.1f} ms per 100 MB, on disk after {total:.0f} ms"
            )


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*(given + [2, 300][len(given) :]))
