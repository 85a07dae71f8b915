"""The time of a DeepFM step on two ranks, beside a DDP script by hand: ``python tests/benchmarks/ddp_steps.py``.

Efficiency is the time of the script as a share of ours, in each round; the script beside itself shows what the machine
does anyway. CPU time is that of rank 0, which leaves out how long it waits. Reported, no gate.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys

import deepfm
import torch
from side_by_side import Clock, Way, ratio, undisturbed
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.world import joined

RANKS = 2


def by_hand(steps: int, clock: Clock) -> None:
    """What a person would write for torchrun."""
    network = DistributedDataParallel(deepfm.DeepFM())
    optimizer = torch.optim.Adam(network.parameters())
    clock.start()
    for step, (inputs, target) in enumerate(deepfm.Repeated(steps), 1):
        optimizer.zero_grad(set_to_none=True)
        loss = deepfm.binary_cross_entropy(network(*inputs), target)
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 50 == 0:
            mean = loss.detach()
            distributed.all_reduce(mean)
            mean.item()
    clock.stop()


WAYS = {
    "DDP by hand": Way(by_hand),
    "DDP by hand, again": Way(by_hand, "DDP by hand"),
    "Brain.fit": Way(deepfm.by_fit, "DDP by hand"),
    "pipeline run": Way(deepfm.by_run, "DDP by hand"),
}


def seconds_per_step(steps: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds a step of each way in each round; what a training does once drops out in the difference.

    Args:
        steps: how many more the longer of two trainings has.
        rounds: how many.
    """
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in WAYS} for kind in ("wall", "cpu")}
    order, draw = list(WAYS), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            few, many = Clock(), Clock()
            WAYS[name].train(10, few)
            WAYS[name].train(10 + steps, many)
            for kind, each in found.items():
                each[name].append((getattr(many, kind) - getattr(few, kind)) / steps)
    return found


def main() -> None:
    """Start the ranks; on rank 0, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        subprocess.run([*command, *sys.argv], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return
    # Each rank has batches of its own.
    deepfm.Repeated.num_replicas = RANKS  # type: ignore[attr-defined]
    with undisturbed(), joined() as world:
        seconds = seconds_per_step(arguments.steps, arguments.rounds)
    for name, way in WAYS.items() if world.is_main else ():
        print(f"{name:20} {statistics.median(seconds['wall'][name]) * 1e3:6.1f} ms a step")
        for kind, each in seconds.items() if way.beside else ():
            print(f"  efficiency in {kind} time: {ratio(each[way.beside], each[name])}")


if __name__ == "__main__":
    main()
