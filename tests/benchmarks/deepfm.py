"""A job as people have it: DeepFM with 26 fields of 10,000 ids and 13 numbers at batch 512 with Adam."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from side_by_side import Clock, Way
from small_job import Network, SimpleBrain, clocked
from torch import Tensor, nn

from pipeline import GeneralTrainer, Stage
from pipeline.distributed.world import current_world

FIELDS, IDS, DIM, NUMBERS, BATCH_SIZE = 26, 10_000, 9, 13, 512
WIDTHS = (FIELDS * DIM + NUMBERS, 400, 400, 400)
binary_cross_entropy = nn.functional.binary_cross_entropy_with_logits
Batch = tuple[tuple[Tensor, Tensor], Tensor]


class DeepFM(nn.Module):
    """A factorization machine and an MLP that share their embeddings (Guo et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(FIELDS * IDS, 1)
        self.vectors = nn.Embedding(FIELDS * IDS, DIM)
        self.numbers = nn.Linear(NUMBERS, 1)
        nn.init.normal_(self.vectors.weight, std=0.01)
        hidden = [layer for inputs, outputs in pairwise(WIDTHS) for layer in (nn.Linear(inputs, outputs), nn.ReLU())]
        self.mlp = nn.Sequential(*hidden, nn.Linear(WIDTHS[-1], 1))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Logits [batch], of ids [batch, fields], each field's among its own, and numbers [batch, 13]."""
        vectors = self.vectors(ids)
        first = self.weights(ids).sum(dim=(1, 2)) + self.numbers(numbers).squeeze(1)
        pairs = 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
        deep: Tensor = self.mlp(torch.cat([vectors.flatten(1), numbers], dim=1)).squeeze(1)
        return first + pairs + deep


@cache
def drawn(count: int = 20) -> list[Batch]:
    """Random batches."""
    random = torch.Generator().manual_seed(0)
    offsets = torch.arange(FIELDS) * IDS
    return [
        (
            (
                torch.randint(IDS, (BATCH_SIZE, FIELDS), generator=random) + offsets,
                torch.randn(BATCH_SIZE, NUMBERS, generator=random),
            ),
            torch.randint(2, (BATCH_SIZE,), generator=random).float(),
        )
        for _ in range(count)
    ]


class Repeated:
    """The random batches again and again."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Batch]:
        batches = drawn()
        return (batches[step % len(batches)] for step in range(self.steps))

    def __len__(self) -> int:
        return self.steps


def by_hand(steps: int, clock: Clock) -> None:
    """The raw loop."""
    network = DeepFM()
    optimizer = torch.optim.Adam(network.parameters())
    clock.start()
    for step, (inputs, target) in enumerate(Repeated(steps), 1):
        optimizer.zero_grad(set_to_none=True)
        loss = binary_cross_entropy(network(*inputs), target)
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 50 == 0:
            loss.item()
    clock.stop()


class DeepFMBrain(SimpleBrain):
    """What a user of ``Brain.fit`` writes."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        """The logits."""
        logits: Tensor = self.modules.model(*batch[0])
        return logits

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        """The loss."""
        return binary_cross_entropy(predictions, batch[1])


def by_fit(steps: int, clock: Clock) -> None:
    """The Brain by itself, without clipping, which the raw loop does not do either."""
    brain = DeepFMBrain({"model": DeepFM()}, torch.optim.Adam, run_opts={"device": "cpu", "max_grad_norm": None})
    brain.clock = clock
    brain.fit(range(1), Repeated(steps), progressbar=True)


class DeepFMNetwork(Network):
    """The default, but for batches that are there already."""


def by_run(steps: int, clock: Clock) -> None:
    """A whole run, with the defaults."""
    DeepFMNetwork.batches = Repeated(steps)
    with tempfile.TemporaryDirectory() as folder:
        runner = {"name": "train", "class": "train", "device": "cpu", "epochs": 1, "save_interval": None}
        config = {
            "output_dir": current_world().broadcast(folder),
            "plugins": [clocked(clock)],
            "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.001}},
            "dataset": [{"name": "data", "class_path": "builtins.list"}],
            "runner": [{**runner, "network_class_path": DeepFMNetwork}],
            "phase": [{"name": "ctr", "model": DeepFM, "loss": binary_cross_entropy, "dataset_name": "data"}],
        }
        GeneralTrainer(config).run()


WAYS = {
    "raw loop": Way(by_hand),
    "raw loop again": Way(by_hand, "raw loop"),
    "Brain.fit": Way(by_fit, "raw loop"),
    "pipeline run": Way(by_run, "raw loop"),
}
"""Name -> way."""
