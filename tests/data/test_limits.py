"""A few batches of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from pipeline.data.loader import LimitedLoader, make_loader, overfit_batches, set_epoch
from pipeline.errors import DataError

TEN = TensorDataset(torch.arange(10))


class Stream(IterableDataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(range(10 * self.epoch, 10 * self.epoch + 5))


def numbers(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def test_the_first_batches_are_those_of_the_loader_in_each_epoch() -> None:
    loader = make_loader(TEN, seed=0, shuffle=True, batch_size=3)
    few = LimitedLoader(loader, 2)
    for epoch in range(2):
        set_epoch(few, epoch)
        assert numbers(few) == numbers(loader)[:2]
    assert loader.epoch == 1


@pytest.mark.parametrize(("count", "length"), [(2, 2), (4, 4), (5, 4)])
def test_as_many_batches_come_as_there_are_and_as_it_says(count: int, length: int) -> None:
    few = LimitedLoader(make_loader(TEN, seed=0, batch_size=3), count)
    assert len(few) == len(list(few)) == length


def test_no_batch_after_the_last_is_asked_for() -> None:
    asked = iter(range(5))
    assert list(LimitedLoader(asked, 2)) == [0, 1]
    assert next(asked) == 2


def test_a_loader_without_length_has_none_with_a_limit() -> None:
    few = LimitedLoader(make_loader(Stream(), seed=0, batch_size=None), 2)
    assert list(few) == [0, 1]
    with pytest.raises(TypeError, match="has no len"):
        len(few)


def test_in_all_else_it_is_the_loader() -> None:
    loader = make_loader(TEN, seed=0, batch_size=3)
    few = LimitedLoader(loader, 2)
    assert few.dataset is TEN
    assert few.sampler is loader.sampler
    assert few.batch_size == 3


@pytest.mark.parametrize("seed", [0, None])
def test_overfitting_has_the_same_batches_in_the_order_of_the_dataset_in_every_epoch(seed: int | None) -> None:
    few = overfit_batches(make_loader(TEN, seed=seed, shuffle=True, batch_size=4, drop_last=True), 3)
    for epoch in range(2):
        set_epoch(few, epoch)
        assert numbers(few) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(few) == 2


@pytest.mark.parametrize(("limit", "count"), [(1, 2), (2, 1)])
def test_overfitting_of_a_limited_loader_keeps_to_the_lower_number(limit: int, count: int) -> None:
    loader = make_loader(TEN, seed=0, shuffle=True, batch_size=4)
    assert numbers(overfit_batches(LimitedLoader(loader, limit), count)) == [[0, 1, 2, 3]]


def test_overfitting_augments_alike_in_every_epoch(noisy: ModuleType) -> None:
    loader = make_loader(noisy.Noisy(6), seed=0, shuffle=True, batch_size=2, collate_fn=noisy.noisy_collate)
    loader.set_epoch(3)
    few = overfit_batches(loader, 2)
    first = list(few)
    set_epoch(few, 1)
    assert list(few) == first
    assert first == list(make_loader(noisy.Noisy(6), seed=0, batch_size=2, collate_fn=noisy.noisy_collate))[:2]


def test_overfitting_leaves_the_loader_as_it_is() -> None:
    loader = make_loader(TEN, seed=0, shuffle=True, batch_size=4)
    before = numbers(loader)
    set_epoch(overfit_batches(loader, 1), 1)
    assert numbers(loader) == before != numbers(make_loader(TEN, seed=0, batch_size=4))


@pytest.mark.parametrize(
    "loader",
    [
        make_loader(TEN, seed=0, shuffle=True, batch_size=None),
        make_loader(TEN, seed=0, generator=torch.Generator(), batch_size=None),
        DataLoader(TEN, batch_size=None),
    ],
)
def test_overfitting_of_loaders_without_batches_takes_samples(loader: Any) -> None:
    assert [int(sample[0]) for sample in overfit_batches(loader, 2)] == [0, 1]


def test_overfitting_takes_other_loaders_whose_order_is_that_of_the_data() -> None:
    assert numbers(overfit_batches(DataLoader(TEN, batch_size=3), 1)) == [[0, 1, 2]]
    assert list(overfit_batches(["one", "two"], 1)) == ["one"]


def test_overfitting_a_stream_keeps_it_in_its_first_epoch() -> None:
    few = overfit_batches(make_loader(Stream(), seed=0, batch_size=None), 2)
    set_epoch(few, 3)
    assert list(few) == [0, 1]


OWN = BatchSampler(RandomSampler(TEN), 3, drop_last=False)


@pytest.mark.parametrize(
    ("loader", "kinds"),
    [
        (DataLoader(TEN, shuffle=True), "DataLoader whose order a RandomSampler"),
        (DataLoader(TEN, batch_sampler=OWN), "DataLoader whose order a RandomSampler"),
        (make_loader(TEN, seed=0, sampler=RandomSampler(TEN)), "SeededLoader whose order a RandomSampler"),
        (make_loader(TEN, seed=0, batch_sampler=[[3, 1]]), "SeededLoader whose order a list"),
        (range(3), "range whose order a range"),
    ],
)
def test_overfitting_is_refused_where_the_order_cannot_be_turned_off(loader: Any, kinds: str) -> None:
    with pytest.raises(DataError, match=f"overfit_batches: 2 cannot be had of a {kinds} decides; make it without a"):
        overfit_batches(loader, 2)
