"""Streams, shared out over workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeline.data.loader import make_loader
from pipeline.data.rng import sample_generator, seed_generators
from pipeline.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
any_workers = pytest.mark.parametrize(
    "workers", [0, 2, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 3))]
)


class Numbers(IterableDataset[int]):
    """The numbers below 11, and 100 for each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 11))


class Sized(Numbers):
    def __len__(self) -> int:
        return 11


class SharedByTorch(Numbers):
    """As torch's documentation has it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 11, info.num_workers) if info else range(11))


class Blocks(Numbers):
    """Shares itself out in halves or thirds, and not in turns."""

    part: tuple[int, int] = (0, 1)

    def shard(self, rank: int, count: int) -> Blocks:
        self.part = rank, count
        return self

    def __iter__(self) -> Iterator[int]:
        rank, count = self.part
        return iter(range(11 * rank // count, 11 * (rank + 1) // count))


class OtherShard(Numbers):
    """A method of the same name with another meaning, as that of Hugging Face's datasets."""

    def shard(self, num_shards: int, index: int) -> None:
        raise NotImplementedError


def given(dataset: Any, workers: int, **keywords: Any) -> list[list[Any]]:
    return list(
        make_loader(dataset, **{"seed": 0, "batch_size": 3, "collate_fn": list, **keywords}, num_workers=workers)
    )


def flat(batches: list[list[Any]]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


@any_workers
@pytest.mark.parametrize("cls", [Numbers, Sized, SharedByTorch, Blocks, OtherShard])
def test_each_sample_comes_once_in_an_epoch(workers: int, cls: type[Numbers]) -> None:
    assert sorted(flat(given(cls(), workers))) == list(range(11))


@pytest.mark.parametrize("seed", [0, None])
@any_workers
def test_each_sample_of_a_stream_that_shuffles_itself_comes_once(noisy: ModuleType, workers: int, seed: Any) -> None:
    batches = given(noisy.Shuffling(11), workers, seed=seed, collate_fn=noisy.noisy_collate)
    assert sorted(sample[0] for batch in batches for sample in batch[:-1]) == list(range(11))


def test_workers_take_turns_and_each_has_its_own_short_last_batch() -> None:
    assert given(Numbers(), 0) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert given(Numbers(), 2) == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9]]
    assert given(Numbers(), 2, drop_last=True) == [[0, 2, 4], [1, 3, 5], [6, 8, 10]]


def test_a_stream_with_shard_shares_itself_out() -> None:
    assert given(Blocks(), 2) == [[0, 1, 2], [5, 6, 7], [3, 4], [8, 9, 10]]


def test_a_shard_that_returns_nothing_is_refused_with_what_to_do() -> None:
    class Forgetful(Numbers):
        def shard(self, rank: int, count: int) -> None:
            self.rank = rank

    with pytest.raises(DataError, match=r"Forgetful.shard\(rank=0, count=2\) returned None; return the dataset to"):
        given(Forgetful(), 2)


@any_workers
@pytest.mark.parametrize("batch_size", [1, 3, 11, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_of_a_stream_with_a_length_has_as_many_batches_as_it_says(
    workers: int, batch_size: int, drop_last: bool
) -> None:
    loader = make_loader(Sized(), seed=0, batch_size=batch_size, drop_last=drop_last, num_workers=workers)
    assert len(loader) == len(list(loader))


@pytest.mark.parametrize(
    ("dataset", "message"), [(Numbers(), "has no len"), (Blocks(), "Blocks shares itself out, so")]
)
def test_a_loader_of_a_stream_has_no_length_where_nobody_knows_it(dataset: Any, message: str) -> None:
    loader = make_loader(dataset, seed=0, num_workers=2)
    with pytest.raises(TypeError, match=message):
        len(loader)
    assert len(list(loader)) == 11


@any_workers
def test_the_epoch_reaches_the_stream_in_its_workers(workers: int) -> None:
    loader = make_loader(Numbers(), seed=0, num_workers=workers, batch_size=None)
    loader.set_epoch(2)
    assert sorted(loader) == list(range(200, 211))


@pytest.mark.parametrize(
    ("workers", "method"), [(1, "fork"), (3, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
)
def test_random_samples_of_a_stream_are_the_same_with_any_workers(noisy: ModuleType, workers: int, method: str) -> None:
    expected = flat(given(noisy.Shuffling(11), 0))
    batches = given(noisy.Shuffling(11), workers, multiprocessing_context=method)
    assert sorted(flat(batches)) == sorted(expected)


def test_with_one_worker_batches_of_a_stream_are_those_of_this_process(noisy: ModuleType) -> None:
    batches = [given(noisy.Shuffling(11), workers, collate_fn=noisy.noisy_collate) for workers in (0, 1)]
    assert batches[0] == batches[1]


def test_a_stream_draws_otherwise_in_each_epoch_and_from_batch_to_batch(noisy: ModuleType) -> None:
    loader, drawn = make_loader(noisy.Shuffling(11), seed=0, batch_size=3, collate_fn=noisy.noisy_collate), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        drawn += [draws[-1] for batch in loader for draws in batch]
    assert len(set(drawn)) == 2 * (11 + 4)


def test_workers_of_a_stream_that_shares_itself_out_draw_otherwise() -> None:
    class Random(Blocks):
        def __iter__(self) -> Iterator[Any]:
            return ((number, random.random()) for number in super().__iter__())

    drawn = [draw for _, draw in flat(given(Random(), 2))]
    assert len(set(drawn)) == 11


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_and_this_process_draw_apart_from_each_other(noisy: ModuleType, workers: int) -> None:
    expected, drawn = given(noisy.Shuffling(11), workers), []
    seed_generators(1)
    loader = make_loader(noisy.Shuffling(11), seed=0, batch_size=3, collate_fn=list, num_workers=workers)
    for batch, right in zip(loader, expected, strict=True):
        assert batch == right
        drawn.append(noisy.draws())
    seed_generators(1)
    iter(DataLoader([0]))
    assert drawn == [noisy.draws() for _ in expected]


def test_without_a_seed_a_stream_in_this_process_is_that_of_torch(noisy: ModuleType) -> None:
    seed_generators(1)
    expected = list(DataLoader(noisy.Shuffling(11), batch_size=3, collate_fn=noisy.noisy_collate))
    seed_generators(1)
    assert given(noisy.Shuffling(11), 0, seed=None, collate_fn=noisy.noisy_collate) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_may_draw_for_each_sample_from_a_generator_of_its_own(workers: int) -> None:
    class Augmented(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return ((index, torch.rand((), generator=sample_generator(index)).item()) for index in range(11))

    assert sorted(flat(given(Augmented(), workers))) == flat(given(Augmented(), 0, batch_size=2))
