"""Going on in the middle of an epoch, against the whole epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from pipeline.data.loader import LimitedLoader, make_loader, remaining_batches, set_epoch
from pipeline.errors import DataError


class Counting(Dataset[Tensor]):
    """Noisy samples; it remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        self.asked.append(index)
        return torch.tensor([float(index), random.random(), torch.rand(()).item()])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(11.0).unbind())


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("taken", range(5))
def test_the_batches_after_some_are_those_of_the_whole_epoch(taken: int, workers: int) -> None:
    loader = make_loader(Counting(), seed=0, shuffle=True, batch_size=3, num_workers=workers)
    set_epoch(loader, 2)
    whole = list(loader)
    assert equal(list(remaining_batches(loader, taken)), whole[taken:])
    assert equal(list(loader), whole)


def test_what_was_taken_is_not_fetched_again() -> None:
    data = Counting()
    list(remaining_batches(make_loader(data, seed=0, batch_size=3), 2))
    assert data.asked == [6, 7, 8, 9, 10]


def test_a_limited_pass_ends_where_it_would_have_ended() -> None:
    loader = LimitedLoader(make_loader(Counting(), seed=0, batch_size=2), 4)
    assert equal(list(remaining_batches(loader, 3)), list(loader)[3:])


@pytest.mark.parametrize("loader", [make_loader(Stream(), seed=0, batch_size=2), list(torch.arange(11.0).split(2))])
def test_a_stream_and_a_list_of_batches_are_read_up_to_the_place(loader: Any) -> None:
    assert equal(list(remaining_batches(loader, 4)), list(loader)[4:])


def test_an_epoch_that_has_become_shorter_is_refused() -> None:
    with pytest.raises(DataError, match="the epoch has 6 batches, and 7 of them were trained on before; resume with"):
        list(remaining_batches(make_loader(Stream(), seed=0, batch_size=2), 7))
