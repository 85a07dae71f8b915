"""Function calls per step on each of two ranks, above a DDP script written by hand: ``python tests/benchmarks/ddp_step_calls.py``.

Counted as ``step_calls.py`` counts. We hold ourselves to 40 with the defaults and 25 with everything off; ``--by WAY`` shows
which functions they are of.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from side_by_side import Clock, Way, calls_per_step, undisturbed
from small_job import ALL_OFF, CLIP, NO_PLUGINS, Batches, by_run, cross_entropy, in_memory, model
from step_calls import difference
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed import agreement
from pipeline.distributed.world import joined

RANKS = 2


class Share(Batches):
    """The batches of one rank, which have been shared out."""

    num_replicas = RANKS
    has_exact_length = True


def batches(steps: int) -> Batches:
    """Batches in memory, as many for each rank."""
    return Share(in_memory(steps).batches)


def by_hand(clip: float | None, steps: int, clock: Clock) -> None:
    """What a person would write for torchrun."""
    network = DistributedDataParallel(model())
    parameters, data = list(network.parameters()), batches(steps)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    clock.start()
    for step, (inputs, target) in enumerate(data, 1):
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(network(inputs), target)
        torch.autograd.backward(loss)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        if step % 50 == 0:
            mean = loss.detach()
            distributed.all_reduce(mean)
            mean.item()
    clock.stop()


WAYS: dict[str, Way] = {
    "DDP by hand": Way(partial(by_hand, None)),
    "DDP by hand, clipping": Way(partial(by_hand, CLIP)),
    "pipeline run, defaults": Way(partial(by_run, batches, {}, NO_PLUGINS), "DDP by hand"),
    "pipeline run, defaults and clipping": Way(
        partial(by_run, batches, {"grad_clip": CLIP}, NO_PLUGINS), "DDP by hand, clipping"
    ),
    "pipeline run, everything off": Way(partial(by_run, batches, ALL_OFF, NO_PLUGINS), "DDP by hand"),
}


def counted(steps: int) -> list[dict[str, Mapping[str, float]]]:
    """Of each rank and way, the calls a step by function."""
    # A look comes about every 0.1 seconds, and every 50 steps at most, as of steps so short. Counted steps take far longer.
    with undisturbed(), joined() as world, patch.object(agreement, "INTERVAL", 60.0):
        return world.all_gather({name: calls_per_step(way, steps) for name, way in WAYS.items()})


def of_ranks(steps: int) -> list[dict[str, Mapping[str, float]]]:
    """The same, counted by processes that are started for it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [__file__, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: list[dict[str, Mapping[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table, or what one rank has counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="a multiple of 100, for a report comes every 50")
    parser.add_argument("--json", action="store_true", help="print data")
    parser.add_argument("--by", choices=[name for name, way in WAYS.items() if way.beside], help="print its functions")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        found = counted(arguments.steps)
        if os.environ["RANK"] == "0":
            print(json.dumps(found))
        return
    rows = []
    for rank, counts in enumerate(of_ranks(arguments.steps)):
        for name, way in WAYS.items():
            calls = sum(counts[name].values())
            above: dict[str, Any] = difference(counts[name], counts[way.beside]) if way.beside else {}
            rows.append({"rank": rank, "way": name, "above": sum(above.values())})
            if arguments.json:
                continue
            print(f"rank {rank}  {name:40} {calls:6.1f} calls a step  {sum(above.values()):+6.1f}")
            if name == arguments.by:
                for function, count in sorted(above.items(), key=lambda each: -each[1]):
                    if abs(count) > 0.01:
                        print(f"{count:+8.2f}  {function}")
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
