"""Gradients and numbers of a batch on several ranks are those of one process, by a plain torch loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, Stage
from pipeline.data.batch import EmptySlice
from pipeline.distributed.world import current_world
from pipeline.training.phase import begin_on_ranks
from tests.distributed.ranks import Ranks

Batch = tuple[Tensor, Tensor]


class Slices:
    """The slices of a rank of global batches of these sizes, the same on any number of ranks."""

    streams = False

    @property
    def num_replicas(self) -> int:
        return current_world().size

    def __init__(self, sizes: list[int], seed: int = 1) -> None:
        self.sizes, self.seed = sizes, seed

    def __len__(self) -> int:
        return len(self.sizes)

    def whole(self) -> Iterator[Batch]:
        random = torch.Generator().manual_seed(self.seed)
        for size in self.sizes:
            yield torch.randn(size, 6, generator=random), torch.randint(4, (size,), generator=random)

    def __iter__(self) -> Iterator[Any]:
        world = current_world()
        for inputs, target in self.whole():
            own = inputs.tensor_split(world.size)[world.rank], target.tensor_split(world.size)[world.rank]
            yield own if len(own[0]) else EmptySlice((inputs[:1], target[:1]))


def network() -> nn.Module:
    torch.manual_seed(current_world().rank)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


class Classifier(Brain):
    """A smooth model."""

    def compute_forward(self, batch: Batch, stage: Stage) -> Tensor:
        scores: Tensor = self.modules.net(batch[0])
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: Stage) -> Tensor:
        return nn.functional.cross_entropy(predictions, batch[1])


def fitted(sizes: list[int], **options: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The weights after a fit, on each rank."""
    brain = Classifier(
        {"net": network()}, lambda own: torch.optim.SGD(own, lr=0.5), run_opts={"device": "cpu", **options}
    )
    begin_on_ranks(brain, 0)
    brain.fit(range(2), Slices(sizes), progressbar=False)
    return brain.modules.state_dict(), dict(brain._train_state)


def by_hand(sizes: list[int], accum: int = 1, clip: float = 5.0) -> dict[str, Tensor]:
    """The weights after the same by a plain loop, of one process."""
    net = nn.ModuleDict({"net": network()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(2):
        samples = 0
        for number, (inputs, target) in enumerate(Slices(sizes).whole(), 1):
            (nn.functional.cross_entropy(net["net"](inputs), target) * len(target)).backward()
            samples += len(target)
            if number % accum == 0 or number == len(sizes):
                for parameter in net.parameters():
                    parameter.grad /= samples
                nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                samples = 0
    return net.state_dict()


def assert_same(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within 1e-6 of the largest of each tensor."""
    assert weights.keys() == expected.keys()
    for name, own in weights.items():
        assert (own - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max(), name


SIZES = [8, 8, 7, 8, 6, 5, 8, 2, 1, 3]


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("clip", [5.0, 0.05])
def test_weights_are_those_of_one_process(two_ranks: Ranks, three_ranks: Ranks, accum: int, clip: float) -> None:
    expected = by_hand(SIZES, accum, clip)
    for ranks in (two_ranks, three_ranks):
        results = ranks(fitted, SIZES, grad_accumulation_factor=accum, max_grad_norm=clip)
        for weights, counters in results:
            assert_same(weights, expected)
            assert counters["samples"] == 2 * sum(SIZES)
        again = ranks(fitted, SIZES, grad_accumulation_factor=accum, max_grad_norm=clip)
        for (first, _), (second, _) in zip(results, again, strict=True):
            assert all(torch.equal(first[name], results[0][0][name]) for name in first)
            assert all(torch.equal(first[name], second[name]) for name in first)
