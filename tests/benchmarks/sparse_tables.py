"""A step with large embedding tables: ``lazy_mode``, beside torch's SparseAdam and dense Adam by hand.

    python tests/benchmarks/sparse_tables.py

The model is that of PaddleRec's DNN: 26 slots in one table of dimension 9, 13 numbers, and 512-256-128-32; its batch is 512,
its table has 10,000 rows or 1,000,001. Ids are drawn evenly, or so that few are frequent (Zipf's law, exponent 1.1). All
take turns within one run, on one thread; each number is a multiple of a time in the same round.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from side_by_side import Clock, Way, ratio, seconds_per_step, undisturbed
from torch import Tensor, nn

from pipeline.optim.optim_scheduler import optimize
from pipeline.optim.schedules import Constant

SLOTS, NUMBERS, DIMENSION, SAMPLES = 26, 13, 9, 512
SMALL, LARGE = 10_000, 1_000_001


class DNN(nn.Module):
    """A table, and layers over its rows and the numbers."""

    def __init__(self, rows: int, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, DIMENSION, sparse=sparse)
        widths = [SLOTS * DIMENSION + NUMBERS, 512, 256, 128, 32, 1]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        scores: Tensor = self.layers(torch.cat([self.table(ids).flatten(1), numbers], 1))
        return scores


def evenly(rows: int, random: torch.Generator) -> Tensor:
    """The ids of a batch; all are as frequent."""
    return torch.randint(rows, (SAMPLES, SLOTS), generator=random)


def by_zipf(rows: int, random: torch.Generator) -> Tensor:
    """The ids of a batch; few are frequent, spread over the table."""
    share = torch.rand(SAMPLES, SLOTS, generator=random, dtype=torch.float64)
    rank = ((rows**-0.1 - 1) * share + 1) ** -10
    return rank.long().clamp(1, rows) * 7919 % rows


def trainer(kind: str, rows: int, ids_of: Callable[[int, torch.Generator], Tensor]) -> Callable[[int, Clock], None]:
    """Trains so many steps, the clock running in the loop."""
    model = DNN(rows, sparse=kind != "dense Adam")
    numbers, target = torch.randn(SAMPLES, NUMBERS), torch.rand(SAMPLES, 1).round()
    random = torch.Generator().manual_seed(1)
    lazy = (
        Constant("Adam", {"lr": 0.001, "fused": True}, model, grad_clip=None, lazy_mode=True)
        if kind == "lazy"
        else None
    )
    by_hand: list[Any] = [torch.optim.Adam(model.parameters(), lr=0.001)] if kind == "dense Adam" else []
    if kind == "SparseAdam":
        by_hand = [
            torch.optim.SparseAdam([model.table.weight], lr=0.001),
            torch.optim.Adam(model.layers.parameters(), lr=0.001, fused=True),
        ]

    def train(steps: int, clock: Clock) -> None:
        batches = [ids_of(rows, random) for _ in range(steps)]
        clock.start()
        for ids in batches:
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), target)
            if lazy:
                optimize(loss, [lazy])
                continue
            for optimizer in by_hand:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in by_hand:
                optimizer.step()
        clock.stop()

    return train


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print(
        "| ids | lazy_mode, large beside small | SparseAdam, large beside small | SparseAdam beside lazy_mode | dense Adam |"
    )
    print("|---|---|---|---|---|")
    with undisturbed():
        for name, ids_of in {"evenly": evenly, "by Zipf's law": by_zipf}.items():
            ways = {
                f"{kind} {rows}": Way(trainer(kind, rows, ids_of))
                for kind in ("lazy", "SparseAdam")
                for rows in (SMALL, LARGE)
            }
            ways["dense"] = Way(trainer("dense Adam", LARGE, ids_of))
            cpu = seconds_per_step(ways, 10, rounds=15)["cpu"]
            large = f"lazy {LARGE}"
            pairs = [
                (large, f"lazy {SMALL}"), (f"SparseAdam {LARGE}", f"SparseAdam {SMALL}"),
                (f"SparseAdam {LARGE}", large), ("dense", large),
            ]  # fmt: skip
            print(f"| {name} |", " | ".join(str(ratio(cpu[one], cpu[other])) for one, other in pairs), "|", flush=True)


if __name__ == "__main__":
    main()
