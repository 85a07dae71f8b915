"""A whole step on a CPU with torch's default optimizer, and with its fused one: what ``fused: auto`` gains there.

    python tests/benchmarks/fused_optimizer.py

Both train the same MLP by hand, in turn within one run; each number is a multiple of the default's time in the same round.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from side_by_side import Clock, Way, ratio, seconds_per_step, undisturbed
from torch import Tensor, nn

KINDS = ("Adam", "AdamW", "SGD", "Adagrad")

# Name -> (widths, samples of a batch).
MODELS = {
    "64-64-10, batch 32": ([64, 64, 10], 32),
    "64-512-512-10, batch 64": ([64, 512, 512, 10], 64),
    "256-1024-1024-1024-10, batch 128": ([256, 1024, 1024, 1024, 10], 128),
}


def trainer(kind: str, widths: list[int], samples: int, **options: bool) -> Callable[[int, Clock], None]:
    """Trains so many steps, the clock running in the loop."""

    def train(steps: int, clock: Clock) -> None:
        torch.manual_seed(0)
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        model = nn.Sequential(*layers[:-1])
        x, y = torch.randn(samples, widths[0]), torch.randint(widths[-1], (samples,))
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.001, **options)
        loss: Tensor
        clock.start()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        clock.stop()

    return train


def main() -> None:
    """Print a table in Markdown."""
    print("| model |", " | ".join(KINDS), "| default again |\n|---|" + "---|" * (len(KINDS) + 1))
    with undisturbed():
        for name, (widths, samples) in MODELS.items():
            ways = {"again": Way(trainer("Adam", widths, samples))}
            for kind in KINDS:
                ways[kind] = Way(trainer(kind, widths, samples))
                ways[f"fused {kind}"] = Way(trainer(kind, widths, samples, fused=True))
            steps = 300 if len(widths) == 3 else 40 if len(widths) == 4 else 6
            cpu = seconds_per_step(ways, steps, rounds=15)["cpu"]
            row = [ratio(cpu[f"fused {kind}"], cpu[kind]) for kind in KINDS]
            print(f"| {name} |", " | ".join(map(str, row)), f"| {ratio(cpu['again'], cpu['Adam'])} |")


if __name__ == "__main__":
    main()
