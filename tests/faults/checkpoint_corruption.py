"""Every file of a checkpoint damaged in every way: each is detected, named and set aside, and the one before it is used.

    python tests/faults/checkpoint_corruption.py

prints how many there were, and how many each of these is true of.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoint_disks import Recorder
from checkpoint_power import models, number_of
from loguru import logger

from pipeline.brain.checkpointer import Checkpointer
from pipeline.checkpoint.reader import problems_of

FILES = ("main.safetensors", "training.safetensors", "state.json", "manifest.json")
Damage = Callable[[Path, Path], object]
"""What is done to a file, and to the same one of the checkpoint before."""


def damages(size: int, flips: int) -> Iterator[tuple[str, Damage]]:
    """The ways to damage a file of some bytes."""
    for length in {0, 1, 7, 8, 9, size // 3, size // 2, size - 1}:
        yield f"truncated to {length}", lambda file, _, length=length: file.write_bytes(file.read_bytes()[:length])
    yield "tail zeroed", lambda file, _: file.write_bytes(file.read_bytes()[: size // 2] + bytes(size - size // 2))
    for position in random.Random(size).sample(range(size), min(flips, size)):
        bit = random.Random(position).randrange(8)
        yield f"bit {bit} of byte {position} flipped", lambda file, _, at=position, bit=bit: flip(file, at, bit)
    yield "appended to", lambda file, _: file.write_bytes(file.read_bytes() + b"\0")
    yield "a line feed appended", lambda file, _: file.write_bytes(file.read_bytes() + b"\n")
    yield "deleted", lambda file, _: file.unlink()
    yield "made a folder", lambda file, _: (file.unlink(), file.mkdir())
    yield "swapped with that before", lambda file, sibling: file.write_bytes(sibling.read_bytes())
    yield "swapped with its neighbour", lambda file, _: swap(file, file.with_name(FILES[FILES.index(file.name) - 1]))


def flip(file: Path, position: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def two_checkpoints(folder: Path) -> None:
    checkpointer = Checkpointer(folder, disk=Recorder())
    for step in (1, 2):
        numbers = {"main": {"number": step}}
        checkpointer.save(models(step), {"iteration": step}, numbers, {"number": step, "list": [1.5, (2, None)]})


def sweep(scratch: Path, flips: int) -> Counter[str]:
    """How often what was true."""
    counts: Counter[str] = Counter()
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    two_checkpoints(scratch / "whole")
    for name in FILES:
        for what, damage in damages((scratch / "whole" / "step-000000000002" / name).stat().st_size, flips):
            folder = scratch / "damaged"
            shutil.copytree(scratch / "whole", folder)
            damage(folder / "step-000000000002" / name, folder / "step-000000000001" / name)
            lines.clear()
            counts["damaged"] += 1
            counts["detected by verify"] += bool(problems_of(folder / "step-000000000002"))
            counts["previous used"] += number_of(Checkpointer(folder, disk=Recorder())) == 1
            counts["set aside"] += [path.name[:22] for path in folder.glob(".*")] == [".bad-step-000000000002"]
            # Of two that were swapped either is named; with the manifest of another checkpoint every file is another.
            names = "|".join(FILES) if "swapped" in what else name
            counts["named"] += bool(re.search(rf"step-000000000002/({names})", "".join(lines)))
            shutil.rmtree(folder)
    logger.remove(sink)
    return counts


if __name__ == "__main__":
    logger.remove()
    with tempfile.TemporaryDirectory() as scratch:
        found = sweep(Path(scratch), 200)
    print(dict(found))
    sys.exit(len(set(found.values())) != 1)
