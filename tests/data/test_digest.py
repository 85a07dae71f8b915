"""The digest of a dataset, by which processes find out that they have other data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, TensorDataset

from pipeline.data.buckets import LengthBuckets
from pipeline.data.loader import LimitedLoader, dataset_digest, make_loader
from pipeline.data.padded import pad
from pipeline.data.rng import sample_generator

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def table(count: int = 20, change: int | None = None) -> TensorDataset:
    """Numbers, one of them changed."""
    numbers = torch.arange(float(count))
    if change is not None:
        numbers[change] += 0.5
    return TensorDataset(numbers)


def digest(dataset: Any, **keywords: Any) -> str:
    return dataset_digest(make_loader(dataset, **{"seed": 0, "batch_size": 4, **keywords}))


class Drawing(torch.utils.data.Dataset[Any]):
    """Samples that are drawn, in one of three ways."""

    def __init__(self, way: str) -> None:
        self.way, self.own = way, random.SystemRandom()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if self.way == "index":
            return torch.rand(2, generator=sample_generator(index))
        return torch.rand(2) if self.way == "batch" else self.own.random()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_equal_data_have_equal_digests_on_all_ranks(workers: int, batch_size: int | None) -> None:
    keywords: dict[str, Any] = {"shuffle": True, "batch_size": batch_size, "num_workers": workers}
    digests = {digest(table(), **keywords, rank=rank, size=3) for rank in range(3)}
    assert len(digests) == 1
    assert digests != {""}


@pytest.mark.parametrize("change", [0, 19])
def test_another_sample_is_seen(change: int) -> None:
    assert digest(table()) != digest(table(change=change))


def test_another_length_is_seen() -> None:
    assert digest(table(20)) != digest(table(21))


@pytest.mark.parametrize("seed", [1, 2])
def test_another_order_is_seen(seed: int) -> None:
    assert digest(table(), shuffle=True) != digest(table(), shuffle=True, seed=seed)


@pytest.mark.parametrize("last", [3, 4])
def test_the_first_indices_of_a_sampler_are_compared(last: int) -> None:
    other = digest(table(), sampler=[0, 1, 2, last])
    assert (digest(table(), sampler=[0, 1, 2, 3]) == other) == (last == 3)


@pytest.mark.parametrize("way", ["index", "batch"])
def test_what_is_drawn_from_a_seed_is_compared(way: str) -> None:
    assert digest(Drawing(way)) == digest(Drawing(way)) != ""


def test_nothing_is_compared_where_a_sample_is_never_the_same() -> None:
    assert digest(Drawing("own")) == ""


def test_nothing_is_compared_without_a_seed() -> None:
    assert digest(table(), seed=None) == ""


def test_nothing_is_compared_of_a_stream_or_of_a_loader_of_ones_own() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    assert digest(Stream()) == dataset_digest([1, 2, 3]) == ""


def test_a_limit_changes_nothing() -> None:
    loader = make_loader(table(), seed=0)
    assert dataset_digest(LimitedLoader(loader, 2)) == dataset_digest(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_and_samplers_stay_as_they_are(workers: int) -> None:
    loader = make_loader(Drawing("index"), seed=0, sampler=RandomSampler(range(9)), num_workers=workers)
    torch.manual_seed(5)
    expected = torch.rand(1), [batch.tolist() for batch in loader]
    torch.manual_seed(5)
    dataset_digest(loader)
    assert (torch.rand(1), [batch.tolist() for batch in loader]) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"batch_sampler": BatchSampler(range(3, 9), 4, drop_last=False)},
        lambda: {"batch_sampler": LengthBuckets(WORDS, 40, lengths=[len(word) for word in WORDS], shuffle=True)},
        lambda: {"sampler": torch.arange(9)},
    ],
)
def test_samples_of_other_lengths_and_batches_of_ones_own_have_a_digest(make: Any) -> None:
    keywords = {"batch_size": 1} | make()
    assert digest(WORDS, collate_fn=pad, **keywords) == digest(WORDS, collate_fn=pad, **make(), batch_size=1) != ""


WORDS = [torch.ones(1 + place % 4) for place in range(9)]
