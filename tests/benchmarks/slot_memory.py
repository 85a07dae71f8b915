"""Whether the memory of a run grows with the file that it reads.

    python tests/benchmarks/slot_memory.py [--megabytes 100 1000] [--cache]

Lines of slots in Criteo's shape (a click, 13 numbers, 26 ids), one block of them again and again, so that the file alone
differs. ``pipeline run`` trains one whole shuffled epoch on it, a small model at batch 4,096 without workers, each file in a
process of its own. The JSON has the most memory that each was in, in MB, and their ratio. With ``--cache`` the same run first
makes the table and then reads that: ``own`` is its memory without the pages of files that are mapped, which the system takes
back when it needs them.

With 1 GB it is 455 MB, and with 100 MB 443 MB: 1.03 times as much. What grows are the index of the lines, a byte a line,
and the order of the epoch, 4 bytes a line; as a list of numbers that made it 519 MB and 452 MB, 1.15 times as much. With ``--cache`` it is 298 MB and 293 MB of its own,
1.02 times as much, and 915 MB and 476 MB with the mapped pages of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Neither torch nor pipeline is imported: the most memory of a process is at least that of the one that has started it.

BLOCK = 10_000
MODEL = """
import torch
from torch import nn

SLOTS = [str(slot) for slot in range(1, 27)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.numbers = nn.EmbeddingBag(1000, 1, mode="sum"), nn.Linear(13, 1)

    def forward(self, slots):
        scores = [self.table(slots[name].values % 1000, slots[name].offsets) for name in SLOTS]
        return (torch.cat(scores, 1).sum(1, keepdim=True) + self.numbers(slots["dense_feature"])).squeeze(1)
"""
CONFIG = """
hyper_parameters: {{optimizer: {{class: SGD, learning_rate: 0.01}}}}
dataset:
  - name: data
    data_path: "{{workspace}}/lines"
    sparse_slots: "click {slots}"
    dense_slots: "dense_feature:13"
    cache: {cache}
    batch_size: 4096
    shuffle: true
runner: [{{name: train, class: train, device: cpu, threads: 1, epochs: 1, seed: 0}}]
phase:
  - {{name: ctr, model: "{{workspace}}/model.py", dataset_name: data,
     loss: torch.nn.functional.binary_cross_entropy_with_logits}}
"""


def write(path: Path, size: int) -> None:
    """Lines of about so many bytes."""
    chance, lines = random.Random(0), []
    for _ in range(BLOCK):
        fields = [f"click:{chance.randrange(2)}"]
        fields += [f"dense_feature:{chance.random():.6g}" for _ in range(13)]
        fields += [f"{slot}:{chance.randrange(1_000_000)}" for slot in range(1, 27)]
        lines.append(" ".join(fields) + "\n")
    block = "".join(lines).encode()
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.write(b"".join(line.encode() for line in lines[: size % len(block) * BLOCK // len(block)]))


def most_memory(folder: Path, size: int, cache: bool) -> tuple[int, int]:
    """The most bytes that a run on a file of this size was in, and the most without the pages of files."""
    write(folder / "lines", size)
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    text = CONFIG.format(slots=" ".join(map(str, range(1, 27))), cache='"{workspace}/tables"' if cache else "false")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pipeline", "run", "config.yaml"]
    own = 0
    with (folder / "said").open("wb") as said:
        started = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=said)
        while True:
            pid, status, usage = os.wait4(started.pid, os.WNOHANG)
            if pid:
                break
            lines = Path(f"/proc/{started.pid}/status").read_text(encoding="utf-8").splitlines()
            own = max([own, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))])
            time.sleep(0.005)
    if status:
        raise SystemExit((folder / "said").read_text(encoding="utf-8"))
    return usage.ru_maxrss * 1024, own


def main() -> None:
    """Print the most memory of each, and how many times that of the first the last took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs=2, default=[100, 1000])
    parser.add_argument("--cache", action="store_true")
    given, most = parser.parse_args(), []
    for size in given.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            most.append(most_memory(Path(folder), size * 10**6, given.cache))
    sizes = {"megabytes": [size for size, _ in most], "own": [own for _, own in most]}
    found: dict[str, object] = {name: [round(each / 1e6, 1) for each in pair] for name, pair in sizes.items()}
    ratios = {"ratio": most[1][0] / most[0][0], "own_ratio": most[1][1] / most[0][1]}
    print(json.dumps(found | {name: round(ratio, 4) for name, ratio in ratios.items()}))


if __name__ == "__main__":
    main()
