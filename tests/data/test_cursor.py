"""DataCursor: the batches that are left of an epoch, also after a resume in the middle of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from pipeline.checkpoint.pytree import flatten, unflatten
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.data.cursor import DataCursor
from pipeline.data.generators import own_generators
from pipeline.data.loader import end_workers, make_loader
from pipeline.errors import DataError


class Stream(IterableDataset[int]):
    """The numbers below 5, and how many of them were read; it says that it has more."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        for self.read in range(1, 6):
            yield self.read - 1


def cursor_of(loader: Any, taken: int = 0, epoch: int = 0) -> DataCursor:
    """A cursor after so many batches, of which only the number is known."""
    return DataCursor(loader, epoch, dict, taken=taken)


@pytest.mark.parametrize("loader", [[0, 1, 2, 3, 4], DataLoader(list(range(5)), None), DataLoader(Stream(), None)])
@pytest.mark.parametrize("taken", range(6))
def test_those_taken_before_are_left_out(loader: Any, taken: int) -> None:
    cursor = cursor_of(loader, taken)
    assert list(cursor) == list(range(taken, 5))
    assert cursor.taken == 5


def test_of_a_loader_without_a_certain_length_one_batch_is_read_ahead_and_not_counted() -> None:
    stream = Stream()
    cursor = cursor_of(DataLoader(stream, None))
    assert (cursor.length, stream.read) == (None, 0)
    assert not cursor.over()
    assert not cursor.over()
    assert (cursor.taken, stream.read) == (0, 1)
    assert cursor.take() == 0


def test_of_a_loader_with_a_length_nothing_is_read_ahead() -> None:
    cursor = cursor_of(make_loader(list(range(3)), seed=0))
    assert not cursor.over()
    assert cursor.reading is None


class Resumable(Stream):
    """Goes on from how many were read."""

    def __len__(self) -> int:
        raise TypeError

    def __iter__(self) -> Iterator[int]:
        while self.read < 5:
            self.read += 1
            yield self.read - 1

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


@pytest.mark.parametrize("looked", [False, True])
def test_a_stream_with_a_state_goes_on_from_the_place_of_what_was_taken(looked: bool, log_lines: list[str]) -> None:
    cursor = cursor_of(make_loader(Resumable(), seed=0, batch_size=None))
    assert [cursor.take(), cursor.take()] == [0, 1]
    assert not (looked and cursor.over())
    resumed = cursor_of(make_loader(Resumable(), seed=0, batch_size=None))
    resumed.load_state_dict(cursor.state_dict())
    resumed.reopen()
    assert list(resumed) == [2, 3, 4]
    assert log_lines == []


class Drawing:
    """A loader, not of ours, of an order that it draws; its state is that after the batch that it gave last."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.order = self.order or torch.randperm(20).tolist()
        while self.order:
            yield self.order.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


@pytest.mark.parametrize("looked", [False, True])
def test_a_loader_of_the_users_own_with_a_state_goes_on_from_it(looked: bool, log_lines: list[str]) -> None:
    cursor, resumed = cursor_of(Drawing()), cursor_of(Drawing())
    taken = [cursor.take(), cursor.take()]
    assert not (looked and cursor.over())
    resumed.load_state_dict(cursor.state_dict())
    resumed.reopen()
    assert list(resumed) == list(cursor)
    assert (len(taken), log_lines) == (2, [])


def test_of_a_map_style_loader_what_was_taken_is_not_fetched_again() -> None:
    class Counting(list[int]):
        asked = 0

        def __getitem__(self, index: Any) -> Any:
            self.asked += 1
            return super().__getitem__(index)

    data = Counting(range(5))
    assert list(cursor_of(make_loader(data, seed=0, batch_size=None), 3)) == [3, 4]
    assert data.asked == 2


def test_the_sampler_is_told_the_epoch_from_0() -> None:
    loader = make_loader(list(range(20)), seed=0, shuffle=True, batch_size=None)
    loader.set_epoch(1)
    expected = list(loader)
    loader.set_epoch(0)
    assert list(cursor_of(loader, epoch=1)) == expected


def test_more_taken_than_there_are_is_refused() -> None:
    message = "the epoch has 5 batches, and 7 of them were trained on before; resume with the data"
    with pytest.raises(DataError, match=message):
        cursor_of(DataLoader(Stream(), None), 7).over()


def test_a_length_that_is_too_large_is_told() -> None:
    class Few(torch.utils.data.Sampler[list[int]]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0], [1]])

    cursor = cursor_of(DataLoader(list(range(5)), batch_sampler=Few()))
    with pytest.raises(DataError, match="an epoch had 2 batches, and its length is 3; correct its __len__"):
        list(cursor)


def test_a_batch_sampler_without_a_length_is_no_obstacle() -> None:
    class Pairs(torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3]])

    cursor = cursor_of(DataLoader(list(range(5)), batch_sampler=Pairs()))
    assert [batch.tolist() for batch in cursor] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(5)), SubsetRandomSampler(range(5)), WeightedRandomSampler([1.0] * 5, 5)]
)
def test_a_number_of_batches_alone_does_not_give_the_same_order_again(sampler: Any, log_lines: list[str]) -> None:
    list(cursor_of(DataLoader(list(range(5)), None, sampler=sampler)))
    assert log_lines == []
    list(cursor_of(DataLoader(list(range(5)), None, sampler=sampler), 2))
    assert f"{type(sampler).__name__} draws another order than the one of the batches that were taken" in log_lines[0]


class AtOnce(torch.utils.data.Sampler[int]):
    """A sampler of the user's that draws the order of an epoch before its first index."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12).tolist())


class OneByOne(AtOnce):
    """A sampler of the user's that draws each index when it is requested."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            yield int(torch.randint(12, ()))


class Noisy(IterableDataset[float]):
    """A stream without a state whose samples are random."""

    def __iter__(self) -> Iterator[float]:
        for number in range(12):
            yield number + torch.rand(()).item()


def with_generator() -> DataLoader[Any]:
    return DataLoader(list(range(12)), 2, shuffle=True, generator=torch.Generator().manual_seed(3))


def kept_workers() -> DataLoader[Any]:
    return DataLoader(list(range(12)), 2, shuffle=True, num_workers=1, persistent_workers=True)


LOADERS = {
    "ours": lambda: make_loader(list(range(12)), seed=0, shuffle=True, batch_size=2),
    "ours, with torch's sampler": lambda: make_loader(
        list(range(12)), seed=None, batch_size=2, sampler=RandomSampler(range(12))
    ),
    "torch's": lambda: DataLoader(list(range(12)), 2, shuffle=True),
    "torch's, with a generator": with_generator,
    "torch's, with replacement": lambda: DataLoader(
        list(range(12)), 2, sampler=RandomSampler(range(12), replacement=True)
    ),
    "torch's, with a worker": lambda: DataLoader(list(range(12)), 2, shuffle=True, num_workers=1),
    "torch's, with a worker that stays": kept_workers,
    "the user's sampler": lambda: DataLoader(list(range(12)), 2, sampler=AtOnce()),
    "a noisy stream": lambda: DataLoader(Noisy(), 2),
}


def train(cursor: DataCursor, count: int) -> list[list[float]]:
    """Take so many batches, as a training that draws random numbers between them."""
    batches = []
    for _ in range(count):
        batches.append(cursor.take().tolist())
        torch.rand(3)
    return batches


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", LOADERS)
def test_a_cursor_that_continues_gives_the_batches_of_one_that_never_stopped(name: str, ahead: bool) -> None:
    make: Any = LOADERS[name]
    for taken in (1, 4):
        first_loader = make()
        first = DataCursor(first_loader, 0, partial(own_generators, {}, {"data": first_loader}))
        torch.manual_seed(5)
        train(first, taken)
        if ahead:
            first.over()
        saved = unflatten(*flatten([first.state_dict(), random_state(own_generators({}, {"data": first_loader}))]))
        expected = train(first, 6 - taken), first.over(), torch.rand(1)
        torch.manual_seed(6)
        loader = make()
        generators = partial(own_generators, {}, {"data": loader})
        restore_random_state(saved[1], generators())
        resumed = DataCursor(loader, 0, generators)
        resumed.load_state_dict(saved[0])
        resumed.reopen()
        restore_random_state(saved[1], generators())
        assert (train(resumed, 6 - taken), resumed.over(), torch.rand(1)) == expected
        for each in (first_loader, loader):
            end_workers(each)


def test_a_sampler_that_draws_while_the_training_draws_is_found_out(log_lines: list[str]) -> None:
    cursor = DataCursor(DataLoader(list(range(12)), 2, sampler=OneByOne()), 0, dict)
    train(cursor, 4)
    resumed = DataCursor(DataLoader(list(range(12)), 2, sampler=OneByOne()), 0, dict)
    resumed.load_state_dict(cursor.state_dict())
    with pytest.raises(DataError, match="OneByOne has drawn another order than before the resume"):
        resumed.open()


def test_what_reading_again_costs_is_logged(log_lines: list[str]) -> None:
    cursor = DataCursor(DataLoader(list(range(12)), 2, shuffle=True), 0, dict)
    train(cursor, 4)
    resumed = DataCursor(DataLoader(list(range(12)), 2, shuffle=True), 0, dict)
    resumed.load_state_dict(cursor.state_dict())
    resumed.open()
    assert "INFO reading 4 batches of the epoch again, to continue after them" in log_lines[0]
    assert re.search(r"INFO read 4 batches again in \d+\.\d s", log_lines[1])
