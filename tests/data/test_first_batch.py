"""A batch that is taken from a loader is missing nowhere afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from pipeline.data.loader import LimitedLoader, first_batch, make_loader, overfit_batches
from pipeline.errors import DataError

DATA = TensorDataset(torch.arange(10.0))


class Drawing(Sampler[int]):
    """An order of a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(10), 10))


class Counting(IterableDataset[Tensor]):
    """Counts what it gives."""

    given = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(6):
            self.given += 1
            yield torch.tensor(float(self.given)) + torch.rand(())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], Any]] = {
    "seeded": lambda: make_loader(DATA, seed=1, shuffle=True, batch_size=4),
    "without a seed": lambda: make_loader(DATA, seed=None, shuffle=True, batch_size=4),
    "with workers": lambda: make_loader(DATA, seed=1, shuffle=True, batch_size=4, num_workers=2, persistent_workers=True),
    "limited": lambda: LimitedLoader(make_loader(DATA, seed=1, shuffle=True, batch_size=4), 2),
    "overfitted": lambda: overfit_batches(make_loader(DATA, seed=1, shuffle=True, batch_size=4), 2),
    "torch's": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "torch's with a generator": lambda: DataLoader(DATA, batch_size=4, shuffle=True, generator=seeded(2)),
    "torch's with workers": lambda: DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True),
    "a sampler with a generator": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=seeded(3))),
    "a sampler of its own": lambda: make_loader(DATA, seed=1, batch_size=4, sampler=Drawing()),
    "a batch sampler of its own": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Drawing(), 4, drop_last=False)),
    "a stream": lambda: make_loader(Counting(), seed=1, batch_size=4),
    "a stream without a seed": lambda: make_loader(Counting(), seed=None, batch_size=4),
    "torch's of a stream": lambda: DataLoader(Counting(), batch_size=4),
    "a stream with workers": lambda: make_loader(Counting(), seed=1, batch_size=4, num_workers=2),
    "a list": lambda: [torch.zeros(4), torch.ones(4)],
}  # fmt: skip


def tensors(batches: Any) -> list[Tensor]:
    return [batch[0] if isinstance(batch, list) else batch for batch in batches]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", LOADERS)
def test_two_epochs_are_as_if_nobody_had_asked(name: str) -> None:
    found = []
    for ask in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        loader = LOADERS[name]()
        if ask:
            first_batch(loader)
        batches = [*tensors(loader), *tensors(loader)]
        found.append([*batches, torch.get_rng_state(), torch.tensor(random.getstate()[1])])
        del loader
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["seeded", "with workers", "limited", "overfitted", "a list", "a stream"])
def test_it_is_the_first_of_the_epoch(name: str) -> None:
    asked = tensors([first_batch(LOADERS[name]())])[0]
    assert torch.equal(asked, tensors(LOADERS[name]())[0])


def test_an_epoch_that_was_begun_goes_on() -> None:
    loader = make_loader(DATA, seed=1, batch_size=4, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    first_batch(loader)
    assert [batch[0].tolist() for batch in batches] == [[4, 5, 6, 7], [8, 9]]


def test_what_can_be_iterated_only_once_is_left_alone() -> None:
    batches = iter([1, 2])
    with pytest.raises(DataError, match=r"a list_iterator can be iterated only once, and a batch .*; use a DataLoader"):
        first_batch(batches)
    assert list(batches) == [1, 2]


def test_a_loader_without_a_batch_is_told() -> None:
    with pytest.raises(DataError, match="the loader gave no batch; check the dataset, or drop_last"):
        first_batch(DataLoader(DATA, batch_size=11, drop_last=True))
