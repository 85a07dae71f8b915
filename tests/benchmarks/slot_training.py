"""Whole training from text: DeepFM on lines of slots by a run, beside loops by hand.

    python tests/benchmarks/slot_training.py

The lines are made, in the shape of Criteo's (a click, 13 numbers, 26 ids below 1,000,000). The model is DeepFM of PaddleRec's
size, 400-400-400 over embeddings of dimension 16 from one table of 1,000,001 rows; batches have 512 lines. One thread,
all in turns within one run. By hand is: pyarrow reads blocks of the text without a check, torch's SparseAdam steps the tables
and Adam the rest; and dense Adam on tensors that are read before the clock starts. The clock of a run is that of its epoch;
what it looks up in the file before, a line is 1/100 of that.

Measured, CPU time a sample (median of 7 rounds) and how many times as fast as by hand with sparse gradients, in CPU time:

    by hand, sparse              147 us    1
    by hand, sparse, again       151 us    1.00 (0.95 to 1.07)
    by hand, sparse, no text     142 us    1.05 (1.01 to 1.13)
    by hand, dense, no text      715 us    0.21 (0.18 to 0.23)
    pipeline run                 128 us    1.14 (1.07 to 1.16)
    pipeline run, shuffled       120 us    1.16 (1.03 to 1.35)

A run is 5.5 times (5.3 to 6.2) as fast as dense Adam.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from side_by_side import Clock, Way, ratio, seconds_per_step, undisturbed
from slot_reader import SLOTS, write
from small_job import clocked
from torch import Tensor, nn

from pipeline import GeneralTrainer
from pipeline.data.batch import SlotBatch

BATCH, STEPS, ROUNDS, BLOCK = 512, 40, 7, 16 * 512
ROWS, DIMENSION, NUMBERS, IDS = 1_000_001, 16, 13, [str(slot) for slot in range(1, 27)]
binary_cross_entropy = nn.functional.binary_cross_entropy_with_logits
Batch = tuple[Tensor, Tensor, Tensor]


class DeepFM(nn.Module):
    """A factorization machine and an MLP that share their embeddings (Guo et al., 2017)."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.weights = nn.Embedding(ROWS, 1, sparse=sparse)
        self.vectors = nn.Embedding(ROWS, DIMENSION, sparse=sparse)
        self.numbers = nn.Linear(NUMBERS, 1)
        nn.init.normal_(self.vectors.weight, std=0.01)
        widths = [len(IDS) * DIMENSION + NUMBERS, 400, 400, 400, 1]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Logits (batch,), of ids (batch, 26) and numbers (batch, 13)."""
        vectors = self.vectors(ids)
        first = self.weights(ids).sum(dim=(1, 2)) + self.numbers(numbers).squeeze(1)
        pairs = 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
        deep: Tensor = self.mlp(torch.cat([vectors.flatten(1), numbers], dim=1)).squeeze(1)
        return first + pairs + deep


class SlotDeepFM(DeepFM):
    """The same, of a batch of slots."""

    def forward(self, slots: SlotBatch) -> Tensor:
        """Logits (batch,)."""
        return super().forward(torch.stack([slots[name].ids for name in IDS], 1), slots["dense_feature"])


def parsed(path: Path) -> Iterator[Batch]:
    """The batches of a file, by pyarrow: names are columns of their own, which are left out."""
    values = [f"value {number}" for number in range(1 + NUMBERS + len(IDS))]
    names = [name for value in values for name in (f"name of {value}", value)]
    floats, ids = values[: 1 + NUMBERS], values[1 + NUMBERS :]
    types = dict.fromkeys(floats, pa.float32()) | dict.fromkeys(ids, pa.int64())
    options = {
        "read_options": pyarrow.csv.ReadOptions(column_names=names, use_threads=False),
        "parse_options": pyarrow.csv.ParseOptions(delimiter=" ", quote_char=False),
        "convert_options": pyarrow.csv.ConvertOptions(include_columns=values, column_types=types),
    }
    with path.open("rb") as file:
        while lines := list(islice(file, BLOCK)):
            text = b"".join(lines).replace(b":", b" ")
            table = pyarrow.csv.read_csv(io.BytesIO(text), **options)
            numbers = np.stack([table[name].to_numpy() for name in floats], 1)
            parts = torch.from_numpy(np.stack([table[name].to_numpy() for name in ids], 1)), torch.from_numpy(numbers)
            for own, floats_of in zip(*(part.split(BATCH) for part in parts), strict=True):
                yield own, floats_of[:, 1:], floats_of[:, 0]


def sparse_adam(model: DeepFM) -> list[torch.optim.Optimizer]:
    """SparseAdam for the tables, and Adam for the rest."""
    tables = [model.weights.weight, model.vectors.weight]
    others = [parameter for parameter in model.parameters() if not any(parameter is table for table in tables)]
    return [torch.optim.SparseAdam(tables, lr=0.001), torch.optim.Adam(others, lr=0.001)]


def dense_adam(model: DeepFM) -> list[torch.optim.Optimizer]:
    """Adam for all."""
    return [torch.optim.Adam(model.parameters(), lr=0.001)]


def by_hand(
    data: Callable[[], Iterable[Batch]],
    optimizers_of: Callable[[DeepFM], list[torch.optim.Optimizer]],
    _: int,
    clock: Clock,
) -> None:
    """The raw loop."""
    torch.manual_seed(0)
    model = DeepFM(sparse=optimizers_of is sparse_adam)
    optimizers = optimizers_of(model)
    clock.start()
    for step, (ids, numbers, target) in enumerate(data(), 1):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = binary_cross_entropy(model(ids, numbers), target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0:
            loss.item()
    clock.stop()


def by_run(path: Path, shuffle: bool, _: int, clock: Clock) -> None:
    """A whole run, with the defaults."""
    with tempfile.TemporaryDirectory() as folder:
        data: dict[str, Any] = {
            "name": "data",
            "data_path": str(path),
            "batch_size": BATCH,
            "shuffle": shuffle,
            **SLOTS,
        }
        runner = {"name": "train", "class": "train", "device": "cpu", "epochs": 1, "seed": 0, "save_interval": None}
        config = {
            "output_dir": folder,
            "plugins": [clocked(clock)],
            "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.001, "lazy_mode": True}},
            "dataset": [data],
            "runner": [runner],
            "phase": [{"name": "ctr", "model": SlotDeepFM, "loss": binary_cross_entropy, "dataset_name": "data"}],
        }
        GeneralTrainer(config).run()


def main() -> None:
    """Print a table in Markdown."""
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as folder, undisturbed():
        path = Path(folder) / "lines"
        write(path, STEPS * BATCH, shuffled=False)
        read = list(parsed(path))
        ways = {
            "by hand, sparse": Way(partial(by_hand, partial(parsed, path), sparse_adam)),
            "by hand, sparse, again": Way(partial(by_hand, partial(parsed, path), sparse_adam)),
            "by hand, sparse, no text": Way(partial(by_hand, lambda: read, sparse_adam)),
            "by hand, dense, no text": Way(partial(by_hand, lambda: read, dense_adam)),
            "pipeline run": Way(partial(by_run, path, False)),
            "pipeline run, shuffled": Way(partial(by_run, path, True)),
        }
        seconds = seconds_per_step(ways, STEPS, ROUNDS)
    first = {kind: seconds[kind]["by hand, sparse"] for kind in ("cpu", "wall")}
    print("| way | µs of CPU a sample, median | speed beside `by hand, sparse`: CPU | wall |\n|---|---|---|---|")
    for name in ways:
        own = sorted(seconds["cpu"][name])[ROUNDS // 2] / BATCH * 1e6
        speeds = (str(ratio(first[kind], seconds[kind][name])) for kind in first)
        print(f"| {name} | {own:.1f} |", " | ".join(speeds), "|")
    print(
        "pipeline run beside dense:", ratio(seconds["cpu"]["by hand, dense, no text"], seconds["cpu"]["pipeline run"])
    )


if __name__ == "__main__":
    main()
