"""Datasets -> loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from pipeline.config.schema import DatasetSchema
from pipeline.data.batch import to_device
from pipeline.data.loader import EpochSampler, build_loader, mix, set_epoch
from pipeline.errors import DataError

CPU = torch.device("cpu")
TEN = TensorDataset(torch.arange(10))


def settings(**keys: Any) -> DatasetSchema:
    return DatasetSchema(name="train_data", class_path="x.y", **keys)


def batches(seed: int | None = 0, epoch: int = 0, dataset: Any = TEN, **keys: Any) -> list[list[int]]:
    """What a loader gives in an epoch."""
    loader = build_loader(dataset, settings(**keys), seed, CPU, None)
    set_epoch(loader, epoch)
    return [batch[0].tolist() for batch in loader]


# The order.


def test_without_shuffle_the_samples_come_in_order_with_a_short_last_batch() -> None:
    assert batches(batch_size=4, epoch=3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_drop_last_leaves_out_the_short_last_batch() -> None:
    assert batches(batch_size=4, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def order(seed: int, epoch: int, length: int = 50) -> list[int]:
    sampler = EpochSampler(length, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_shuffled_epoch_has_every_sample_once() -> None:
    assert sorted(order(seed=3, epoch=5)) == list(range(50))
    assert order(seed=3, epoch=5) != list(range(50))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = order(seed=3, epoch=5)
    torch.manual_seed(99)
    order(seed=3, epoch=4)
    assert order(seed=3, epoch=5) == first
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_an_order_can_be_asked_for_again_and_draws_nothing_from_torch() -> None:
    sampler, state = EpochSampler(50, shuffle=True, seed=0), torch.get_rng_state()
    assert list(sampler) == list(sampler)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_the_order_is_drawn_from_torch() -> None:
    torch.manual_seed(1)
    first, second = EpochSampler(50, shuffle=True, seed=None), EpochSampler(50, shuffle=True, seed=None)
    torch.manual_seed(1)
    assert list(first) != list(second)
    assert list(EpochSampler(50, shuffle=True, seed=None)) == list(first)


def test_a_sampler_is_as_long_as_its_data() -> None:
    assert len(EpochSampler(7, shuffle=True, seed=0)) == 7


def test_mixed_seeds_of_neighbours_differ_and_fit_in_63_bits() -> None:
    seeds = {mix(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_number_of_workers_does_not_change_the_batches() -> None:
    alone = batches(batch_size=4, shuffle=True, epoch=2)
    assert batches(batch_size=4, shuffle=True, epoch=2, num_workers=2, multiprocessing_context="fork") == alone


# Datasets.


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor(self.epoch * 10 + index),) for index in range(3))


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


def test_an_iterable_dataset_is_read_in_its_order_and_told_the_epoch() -> None:
    assert batches(dataset=Stream(), batch_size=2, epoch=4) == [[40, 41], [42]]


@pytest.mark.parametrize(
    ("dataset", "keys", "message"),
    [
        (TensorDataset(torch.empty(0)), {"args": {"split": "x"}}, r"TensorDataset has no samples; check .*\{'split'"),
        (Stream(), {"num_workers": 2}, r"Stream is an .*: 2 each worker would give every sample; set it to 0 or 1"),
        (Stream(), {"shuffle": True}, r"shuffle: true needs indices, and Stream is an IterableDataset; shuffle in"),
        (Endless(), {}, r"Endless has no length; give it __len__, or make it an IterableDataset"),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_refused_with_its_name_and_what_to_do(
    dataset: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"dataset.train_data: {message}"):
        build_loader(dataset, settings(**keys), 0, CPU, None)


def test_batches_are_made_by_collate_fn_where_there_is_one() -> None:
    loader = build_loader(TEN, settings(batch_size=5), 0, CPU, lambda samples: sum(int(each[0]) for each in samples))
    assert list(loader) == [10, 35]


def test_set_epoch_leaves_alone_what_does_not_want_to_know() -> None:
    plain = [1, 2]
    set_epoch(plain, 3)
    assert plain == [1, 2]


# Devices.


class Pair(NamedTuple):
    left: Tensor
    right: Any


def test_every_tensor_in_a_batch_is_moved_and_everything_else_stays_as_it_is() -> None:
    one = torch.ones(2)
    batch = {"a": [one, "text", None], "b": (one, {"c": one}), "d": Pair(one, 5)}
    moved = to_device(batch, torch.device("meta"))
    assert [moved["a"][0].device.type, moved["b"][0].device.type, moved["b"][1]["c"].device.type] == ["meta"] * 3
    assert moved["a"][1:] == ["text", None]
    assert isinstance(moved["b"], tuple)
    assert isinstance(moved["d"], Pair)
    assert (moved["d"].left.device.type, moved["d"].right) == ("meta", 5)
