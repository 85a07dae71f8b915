"""Lines of slots read as batches, beside a bare read of the same file by pyarrow and a parser of a few lines.

    python tests/benchmarks/slot_reader.py [LINES]

The lines are made, in the shape of Criteo's (a click, 13 numbers, 26 ids below 1,000,000), all distinct; in one file all have
one layout, in the other each has its own order. Batches have 512 lines. CPU time on one thread, all in turns within one run;
each number is a multiple of the lines that the parser of a few lines reads in the same round. A table of the same lines
(``cache``) is read shuffled, beside bare memory maps of its files that are indexed by the same numbers; and the same values as
delimited text, beside a bare read of that by pyarrow.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch

from pipeline.slots.files import SlotFiles
from pipeline.slots.slot_lines import LineParser

BATCH, ROUNDS = 512, 7
SLOTS = {"sparse_slots": " ".join(["click", *map(str, range(1, 27))]), "dense_slots": "dense_feature:13"}


def write(path: Path, count: int, *, shuffled: bool) -> None:
    """Lines of one layout, or each in an order of its own."""
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            fields = [f"click:{chance.randrange(2)}"]
            fields += [f"dense_feature:{chance.random():.6g}" for _ in range(13)]
            fields += [f"{slot}:{chance.randrange(1_000_000)}" for slot in range(1, 27)]
            if shuffled:
                chance.shuffle(fields)
            file.write(" ".join(fields) + "\n")


def bare(path: Path) -> None:
    """Columns of strings, one for each field of a line."""
    columns = [str(number) for number in range(40)]
    pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=columns, use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(delimiter=" ", quote_char=False),
        convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string())),
    )


def by_hand(path: Path) -> None:
    """The values of each slot as lists, line by line, without a check."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            values: dict[str, list[float]] = {}
            for field in line.split():
                name, value = field.split(":")
                number = float(value) if name == "dense_feature" else int(value)
                values.setdefault(name, []).append(number)


def in_order(dataset: SlotFiles) -> None:
    """Every batch of an epoch that is not shuffled."""
    for first in range(0, len(dataset), BATCH):
        dataset.__getitems__(range(first, min(first + BATCH, len(dataset))))


def shuffled(dataset: SlotFiles) -> None:
    """Every batch of one that is."""
    numbers = torch.randperm(len(dataset)).tolist()
    for first in range(0, len(dataset), BATCH):
        dataset.__getitems__(numbers[first : first + BATCH])


def bare_maps(dataset: SlotFiles) -> None:
    """The rows of such batches, as numpy takes them out of the files of a table."""
    folder, lines = dataset._table.folder, len(dataset)  # type: ignore[union-attr]  # it has one
    maps = [
        np.memmap(folder / name, kind, "r").reshape(lines, -1)
        for name, kind in (("dense.f32", "f4"), ("ids.i64", "i8"))
    ]
    numbers = torch.randperm(lines).tolist()
    for first in range(0, lines, BATCH):
        for values in maps:
            values[numbers[first : first + BATCH]]


def one_by_one(dataset: SlotFiles) -> None:
    """What is done without numpy and pyarrow."""
    parser = LineParser(dataset.slots)
    for first in range(0, len(dataset), BATCH):
        parser(dataset.lines.read(range(first, min(first + BATCH, len(dataset)))))


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("one layout", "changing order"):
            path = Path(folder) / layout.replace(" ", "_")
            write(path, count, shuffled=layout != "one layout")
            dataset = SlotFiles(str(path), **SLOTS)
            ways: dict[str, Callable[[], None]] = {
                "a parser of a few lines": lambda path=path: by_hand(path),
                "bare pyarrow": lambda path=path: bare(path),
                "batches in order": lambda dataset=dataset: in_order(dataset),
                "batches, shuffled": lambda dataset=dataset: shuffled(dataset),
                "batches without the extra": lambda dataset=dataset: one_by_one(dataset),
            }
            if layout == "one layout":
                table = SlotFiles(str(path), cache=f"{folder}/tables", **SLOTS)
                delimited = Path(folder) / "delimited"
                delimited.write_bytes(re.sub(rb"[^ \n]*:", b"", path.read_bytes()))
                columns = {"delimiter": " ", "columns": "click dense_feature " + " ".join(map(str, range(1, 27)))}
                fields = SlotFiles(str(delimited), **SLOTS, **columns)
                ways |= {
                    "table, shuffled": lambda table=table: shuffled(table),
                    "bare maps, shuffled": lambda table=table: bare_maps(table),
                    "delimited, bare pyarrow": lambda delimited=delimited: bare(delimited),
                    "delimited, in order": lambda fields=fields: in_order(fields),
                }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, way in ways.items():
                    begin = time.process_time()
                    way()
                    seconds[name].append(time.process_time() - begin)
            first = seconds["a parser of a few lines"]
            print(f"{layout}:")
            for name, own in seconds.items():
                times = statistics.median(one / other for one, other in zip(first, own, strict=True))
                print(f"  {name:27} {times:6.2f} times as fast, {count / min(own):10,.0f} lines a second")


if __name__ == "__main__":
    main()
