"""What decides the order is a list of indices: a pass goes on only after those that were taken."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from pipeline.data.buckets import LengthBuckets
from pipeline.data.loader import make_loader, random_sampler_of
from pipeline.data.rng import seeding
from pipeline.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
OTHERS = (
    "x: hash of the indices: .* -> .*: has changed in the middle of an epoch, and .* a seed and the number in its set"
)


class Chunks:
    """Shuffled batches of a size, by seed and epoch."""

    def __init__(self, size: int, samples: int = 23) -> None:
        self.size, self.samples, self.epoch = size, samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.samples))
        random.Random(self.epoch).shuffle(order)
        return iter([order[start : start + self.size] for start in range(0, self.samples, self.size)])

    def __len__(self) -> int:
        return len(list(iter(self)))


class Shuffled(Sampler[int]):
    """Draws from python's generator, one index after the other, and knows nothing of epochs."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(23), 23))

    def __len__(self) -> int:
        return 23


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "batches": lambda: {"batch_sampler": Chunks(3)},
    "tensors": lambda: {"batch_sampler": [torch.tensor([4, 2]), torch.tensor([1]), torch.tensor([3, 0])]},
    "buckets": lambda: {"batch_sampler": LengthBuckets(range(23), 30, list(range(1, 24)), shuffle=True)},
    "random": lambda: {"batch_size": 4, "sampler": RandomSampler(range(23))},
    "subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(9, 23))},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0] * 11, 20)},
    "own": lambda: {"batch_size": None, "sampler": Shuffled()},
}


def passes(loader: Any, epoch: int = 1) -> list[str]:
    """The batches of an epoch and of the next."""
    batches = []
    for each in (epoch, epoch + 1):
        loader.set_epoch(each)
        batches += [str(batch) for batch in loader]
    return batches


# With workers, a batch sampler, a sampler of torch's, and one of the user's own.
MARKS = {name: pytest.mark.slow if name in ("batches", "random", "own") else pytest.mark.release for name in ORDERS}


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 0) for name in ORDERS), *(pytest.param(name, 2, marks=MARKS[name]) for name in ORDERS)],
)
def test_a_pass_goes_on_after_every_batch_whatever_decides_the_order(
    name: str, workers: int, noisy: ModuleType
) -> None:
    def make() -> Any:
        return make_loader(noisy.Noisy(23), seed=3, num_workers=workers, collate_fn=str, **ORDERS[name]())

    loader = make()
    assert random_sampler_of(loader) == ""
    whole = passes(loader)
    loader.set_epoch(1)
    for taken, _ in enumerate(loader, 1):
        if taken in (1, 2, 5) or not workers:
            other = make()
            other.load_state_dict(loader.state_dict())
            random.seed(taken)
            assert passes(other) == whole[taken:]


OTHER = [Chunks(2), Chunks(4), Chunks(23), Chunks(3, samples=22)]


@pytest.mark.parametrize(
    ("other", "taken", "workers"),
    [
        *((other, taken, 0) for other in OTHER for taken in (1, 8)),
        pytest.param(Chunks(4), 8, 2, marks=pytest.mark.slow),
    ],
)
def test_other_indices_than_those_that_were_taken_are_refused(other: Chunks, taken: int, workers: int) -> None:
    keywords = {"seed": 0, "num_workers": workers, "where": "x"}
    loader = make_loader(range(23), batch_sampler=Chunks(3), **keywords)
    next(islice(loader, taken - 1, None))
    changed = make_loader(range(23), batch_sampler=other, **keywords)
    changed.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match=OTHERS):
        list(changed)


def test_what_workers_were_asked_for_ahead_does_not_count() -> None:
    alone, ahead = (make_loader(range(23), seed=0, batch_sampler=Chunks(3), num_workers=more) for more in (0, 1))
    for _ in zip(alone, islice(ahead, 6), strict=False):
        assert alone.state_dict()["hash"] == ahead.state_dict()["hash"]


def test_a_change_behind_what_was_taken_leaves_out_no_sample() -> None:
    loader = make_loader(range(6), seed=0, batch_sampler=[[3, 0], [1, 5], [2, 4]])
    first = list(islice(loader, 1))
    other = make_loader(range(6), seed=0, batch_sampler=[[3, 0], [1], [2], [4, 5]])
    other.load_state_dict(loader.state_dict())
    assert sorted(torch.cat([*first, *other]).tolist()) == list(range(6))


def test_between_two_passes_other_indices_will_do() -> None:
    loader = make_loader(range(23), seed=0, batch_sampler=Chunks(3))
    list(loader)
    other = make_loader(range(23), seed=0, batch_sampler=Chunks(5))
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 5


def test_the_state_of_a_pass_that_goes_on_is_that_with_which_it_was_left() -> None:
    loader, other = (make_loader(range(23), seed=0, batch_sampler=Chunks(3)) for _ in range(2))
    next(islice(loader, 4, None))
    other.load_state_dict(loader.state_dict())
    iter(other)
    assert other.state_dict() == loader.state_dict()


def test_a_sampler_without_an_end_is_not_waited_for() -> None:
    class Endless(Shuffled):
        def __iter__(self) -> Iterator[int]:
            return iter(lambda: random.randrange(23), -1)

    loader = make_loader(range(23), seed=3, batch_size=None, sampler=Endless())
    with seeding(3, 0, "order"):
        assert list(islice(loader, 23)) == list(islice(Endless(), 23))
    assert len(list(islice(loader, 50))) == 50


def test_without_a_seed_an_order_that_is_drawn_is_not_gone_on_with() -> None:
    loader, other = (make_loader(range(23), seed=None, batch_size=4, sampler=Shuffled(), where="x") for _ in range(2))
    assert random_sampler_of(loader) == "Shuffled"
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match=OTHERS):
        list(other)


def test_without_a_seed_buckets_are_drawn_once_and_kept() -> None:
    loader, other = (
        make_loader(range(9), seed=None, batch_sampler=LengthBuckets(range(9), 8, [1] * 9, shuffle=True, seed=None))
        for _ in range(2)
    )
    first = list(islice(loader, 1))
    other.load_state_dict(loader.state_dict())
    assert sorted(torch.cat([*first, *other]).tolist()) == list(range(9))
