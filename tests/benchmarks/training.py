"""What training costs beside a loop written by hand: ``python tests/benchmarks/training.py``.

Function calls and CPU time a step of a small job, in which every call shows; wall time a step of a DeepFM; seconds to
the first step; growth of memory over 100,000 steps. All is measured side by side, in turn, on one thread; ratios are
medians over rounds (half of the rounds lie between the numbers in brackets). ``--peers`` measures Lightning, ignite and accelerate too, where they are
installed. The counts are what the tests hold us to (``step_calls.py``); times are only reported.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import deepfm
import small_job
from first_step import seconds_to_first_step
from memory import growths
from side_by_side import Way, ratio, seconds_per_step, undisturbed
from step_calls import rows

PEERS = {"lightning": "peers.lightning_peer", "ignite": "peers.ignite_peer", "accelerate": "peers.accelerate_peer"}


def peers() -> dict[str, Way]:
    """The small job in other trainers, as far as they are installed."""
    modules = [import_module(home) for package, home in PEERS.items() if find_spec(package)]
    return {module.NAME: Way(module.train, "raw loop") for module in modules}


def small(arguments: argparse.Namespace) -> Iterator[str]:
    """The table of tests/README.md: calls a step above what each way is compared with, and CPU time as multiples of its."""
    ways = {**small_job.WAYS, **(peers() if arguments.peers else {})}
    with undisturbed():
        calls = {row["way"]: row for row in rows(ways)}
        raw = {f"{name}, again": way._replace(beside=name) for name, way in ways.items() if not way.beside}
        seconds = seconds_per_step({**ways, **raw}, 500, arguments.rounds)["cpu"]
    yield "| what | beside | calls a step above it | CPU time, as multiples of it |"
    yield "|---|---|---|---|"
    for name, way in {**raw, **ways}.items():
        if way.beside:
            above = f"{calls[name]['above']:+.1f}" if name in calls else ""
            yield f"| {name} | {way.beside} | {above} | {ratio(seconds[name], seconds[way.beside])} |"
    micro = statistics.median(seconds["raw loop"]) * 1e6
    yield f"raw loop: {calls['raw loop']['calls']:.0f} calls and {micro:.0f} µs of CPU time a step"


def large(arguments: argparse.Namespace) -> Iterator[str]:
    """Wall and CPU time of a step of the DeepFM."""
    with undisturbed():
        seconds = seconds_per_step(deepfm.WAYS, 20, 2 * arguments.rounds)
    for name, way in deepfm.WAYS.items():
        yield f"DeepFM, {name}: {statistics.median(seconds['wall'][name]) * 1e3:.1f} ms a step"
        for kind, each in seconds.items() if way.beside else ():
            yield f"  {kind} time as multiples of the raw loop's: {ratio(each[name], each[way.beside])}"


def first(arguments: argparse.Namespace) -> Iterator[str]:
    """Seconds to the first step."""
    for name, each in seconds_to_first_step(arguments.rounds).items():
        wall, cpu = ([pair[kind] for pair in each] for kind in (0, 1))
        medians = f"{statistics.median(wall):.2f} s, CPU time {statistics.median(cpu):.2f} s"
        yield f"first step, {name}: {medians} (at least {min(wall):.2f} s, {min(cpu):.2f} s)"


def memory(arguments: argparse.Namespace) -> Iterator[str]:
    """Growth of memory."""
    for name, held in growths(arguments.steps).items():
        grown = f"{held['bytes']:,} bytes and {held['blocks']:,} of Python's blocks"
        yield f"memory, {name}: grows by {grown} from step {arguments.steps // 10:,} to {arguments.steps:,}"


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "small": small, "large": large, "first": first, "memory": memory,
}  # fmt: skip


def main() -> None:
    """Print what each part says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all, if none is named")
    parser.add_argument("--peers", action="store_true", help="measure other trainers too")
    parser.add_argument("--rounds", type=int, default=15, help="of each measurement of time")
    parser.add_argument("--steps", type=int, default=100_000, help="over which memory is watched")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; name some of {', '.join(PARTS)}")
    for part in arguments.parts or PARTS:
        for line in PARTS[part](arguments):
            print(line, flush=True)


if __name__ == "__main__":
    main()
