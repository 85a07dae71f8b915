"""The batches of an epoch, taken one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from pipeline.data.batch import count_samples
from pipeline.data.loader import make_loader
from pipeline.errors import DataError
from pipeline.stages.experiment import Batches


class Stream(IterableDataset[int]):
    """The numbers below 5, and how many of them were read; it says that it has more."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        for self.read in range(1, 6):
            yield self.read - 1


def rest(batches: Batches) -> list[Any]:
    taken = []
    while not batches.over():
        taken.append(batches.take())
    return taken


@pytest.mark.parametrize("loader", [[0, 1, 2, 3, 4], DataLoader(list(range(5)), None), DataLoader(Stream(), None)])
@pytest.mark.parametrize("taken", range(6))
def test_those_taken_before_are_left_out(loader: Any, taken: int) -> None:
    batches = Batches(loader, 1, taken)
    assert rest(batches) == list(range(taken, 5))
    assert batches.count == 5


def test_of_a_loader_without_a_certain_length_one_batch_is_read_ahead_and_not_counted() -> None:
    stream = Stream()
    batches = Batches(DataLoader(stream, None), 1)
    assert (batches.length, stream.read) == (None, 0)
    assert not batches.over()
    assert not batches.over()
    assert (batches.count, stream.read) == (0, 1)
    assert batches.take() == 0


def test_of_a_loader_with_a_length_nothing_is_read_ahead() -> None:
    batches = Batches(make_loader(list(range(3)), seed=0), 1)
    assert not batches.over()
    assert batches._rest is None


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
    batches = Batches(make_loader(Resumable(), seed=0, batch_size=None), 1)
    assert [batches.take(), batches.take()] == [0, 1]
    assert not (looked and batches.over())
    others = Batches(make_loader(Resumable(), seed=0, batch_size=None), 1, 2)
    others.open(batches.position())
    assert rest(others) == [2, 3, 4]
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
    batches, others = Batches(Drawing(), 1), Batches(Drawing(), 1, 2)
    taken = [batches.take(), batches.take()]
    assert not (looked and batches.over())
    others.open(batches.position())
    assert rest(others) == rest(batches)
    assert (len(taken), log_lines) == (2, [])


def test_of_a_map_style_loader_what_was_taken_is_not_fetched_again() -> None:
    class Counting(list[int]):
        asked = 0

        def __getitem__(self, index: Any) -> Any:
            self.asked += 1
            return super().__getitem__(index)

    data = Counting(range(5))
    assert rest(Batches(make_loader(data, seed=0, batch_size=None), 1, 3)) == [3, 4]
    assert data.asked == 2


def test_the_sampler_is_told_the_epoch_from_0() -> None:
    loader = make_loader(list(range(20)), seed=0, shuffle=True, batch_size=None)
    loader.set_epoch(1)
    expected = list(loader)
    loader.set_epoch(0)
    assert rest(Batches(loader, 2)) == expected


def test_more_taken_than_there_are_is_refused() -> None:
    message = "the epoch has 5 batches, and 7 of them were trained on before; go on with the data"
    with pytest.raises(DataError, match=message):
        Batches(DataLoader(Stream(), None), 3, 7).over()


def test_a_length_that_is_too_large_is_told() -> None:
    class Few(torch.utils.data.Sampler[list[int]]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0], [1]])

    batches = Batches(DataLoader(list(range(5)), batch_sampler=Few()), 1)
    with pytest.raises(DataError, match="gave 2 batches in epoch 1, and its length is 3; correct its __len__"):
        rest(batches)


def test_a_batch_sampler_without_a_length_is_no_obstacle() -> None:
    class Pairs(torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3]])

    batches = Batches(DataLoader(list(range(5)), batch_sampler=Pairs()), 1)
    assert [each.tolist() for each in rest(batches)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(5)), SubsetRandomSampler(range(5)), WeightedRandomSampler([1.0] * 5, 5)]
)
def test_an_order_that_cannot_be_drawn_again_is_warned_of(sampler: Any, log_lines: list[str]) -> None:
    rest(Batches(DataLoader(list(range(5)), None, sampler=sampler), 1))
    assert log_lines == []
    rest(Batches(DataLoader(list(range(5)), None, sampler=sampler), 1, 2))
    assert f"its {type(sampler).__name__} draws another order than the one that was left; make it with" in log_lines[0]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 0),
        ([torch.zeros(()), torch.zeros(4)], 4),
        ({"a": "text", "b": (torch.zeros(5),)}, 5),
        ("text", 0),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples
