"""Function calls per training step above a hand-written loop: ``python tests/benchmarks/step_calls.py``.

Calls are Python's and C's, as cProfile counts them over 500 steps less those of 250. Nothing is timed, so this is what
the tests hold us to: 20 with the defaults, 40 more where generators are seeded, 12 with everything off. ``--by WAY``
shows which functions they are of.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from side_by_side import Way, calls_per_step, undisturbed
from small_job import WAYS

MODULE_LOOKUP = "Module.__getattr__"


def rows(ways: Mapping[str, Way], steps: int = 500) -> list[dict[str, Any]]:
    """Of each way: calls a step, those above what it is compared with, and how many of these nn.Module's lookup makes."""
    counts = {name: calls_per_step(way, steps) for name, way in ways.items()}
    found = []
    for name, way in ways.items():
        above = difference(counts[name], counts[way.beside]) if way.beside else {}
        lookups = sum(count for function, count in above.items() if function.endswith(MODULE_LOOKUP))
        calls = sum(counts[name].values())
        found.append({
            "way": name, "beside": way.beside, "calls": calls, "above": sum(above.values()), "lookups": lookups,
        })  # fmt: skip
    return found


def difference(counts: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """By how much the calls of each function differ."""
    return {name: counts.get(name, 0) - others.get(name, 0) for name in {*counts, *others}}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--steps", type=int, default=500, help="a multiple of 100, for a report comes every 50")
    parser.add_argument("--by", choices=[name for name, way in WAYS.items() if way.beside], help="print its functions")
    arguments = parser.parse_args()
    if arguments.by:
        show_functions(WAYS[arguments.by])
        return
    with undisturbed():
        table = rows(WAYS, arguments.steps)
    if arguments.json:
        print(json.dumps(table))
        return
    for row in table:
        above = f"{row['above']:+6.1f} above {row['beside']}" if row["beside"] else ""
        lookups = f", {row['lookups']:.0f} of them nn.Module's lookup" if row["lookups"] > 0.5 else ""
        print(f"{row['way']:50} {row['calls']:6.1f} calls a step {above}{lookups}")


def show_functions(way: Way) -> None:
    """Print each function that the way calls more often, or less, than what it is compared with."""
    with undisturbed():
        above = difference(calls_per_step(way), calls_per_step(WAYS[way.beside]))
    for function, count in sorted(above.items(), key=lambda each: -each[1]):
        if count:
            print(f"{count:+8.2f}  {function}")


if __name__ == "__main__":
    main()
