"""Datasets, and the loaders made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pipeline.config.schema import DatasetSchema
from pipeline.data.loader import EpochSampler, build_loader, make_loader, set_epoch
from pipeline.errors import ConfigError, DataError

CPU = torch.device("cpu")
TEN = TensorDataset(torch.arange(10))


def settings(**keys: Any) -> DatasetSchema:
    return DatasetSchema(name="train_data", class_path="x.y", **keys)


def batches(seed: int | None = 0, epoch: int = 0, dataset: Any = TEN, **keys: Any) -> list[list[int]]:
    """What a loader gives in an epoch."""
    loader = build_loader(dataset, settings(**keys), seed, CPU, None)
    set_epoch(loader, epoch)
    return [batch[0].tolist() for batch in loader]


def test_without_shuffle_the_samples_come_in_order_with_a_short_last_batch() -> None:
    assert batches(batch_size=4, epoch=3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_drop_last_leaves_out_the_short_last_batch() -> None:
    assert batches(batch_size=4, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_with_shuffle_they_come_in_the_order_of_the_epoch(workers: dict[str, Any]) -> None:
    sampler = EpochSampler(10, shuffle=True, seed=7)
    sampler.set_epoch(2)
    expected = [each.tolist() for each in torch.tensor(list(sampler)).split(4)]
    assert batches(seed=7, batch_size=4, shuffle=True, epoch=2, **workers) == expected


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
        (TensorDataset(torch.empty(0)), {}, r"TensorDataset has no samples; check its arguments"),
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


# By hand, with the arguments of torch.


@pytest.mark.parametrize(
    "keywords", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}, {"sampler": [3, 1]}]
)
def test_a_loader_without_shuffle_gives_the_batches_of_torch(keywords: dict[str, Any]) -> None:
    given, expected = make_loader(range(10), seed=0, **keywords), DataLoader(range(10), **keywords)
    assert [torch.as_tensor(each).tolist() for each in given] == [torch.as_tensor(each).tolist() for each in expected]


def test_a_generator_decides_the_order_as_torch_has_it() -> None:
    shuffled = [
        torch.cat(list(make(range(10), shuffle=True, generator=torch.Generator().manual_seed(1), **seed)))
        for make, seed in [(DataLoader, {}), (make_loader, {"seed": 0})]
    ]
    assert torch.equal(*shuffled)


def test_a_dataset_without_length_will_do_with_a_sampler() -> None:
    assert torch.cat(list(make_loader(Endless(), seed=0, sampler=[7, 5]))).tolist() == [7, 5]


def test_a_misspelt_argument_is_told_with_the_right_one() -> None:
    message = r"Brain.make_dataloader: a DataLoader has no argument 'num_worker'; did you mean 'num_workers'\?"
    with pytest.raises(ConfigError, match=message):
        make_loader(TEN, seed=0, num_worker=2, where="Brain.make_dataloader")


# The epoch.


def test_set_epoch_leaves_alone_what_does_not_want_to_know() -> None:
    plain = [1, 2]
    set_epoch(plain, 3)
    assert plain == [1, 2]


class Told:
    """Notes what it is told."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches, self.epochs = batches, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@pytest.mark.parametrize("make", [DataLoader, lambda dataset, **keywords: make_loader(dataset, seed=0, **keywords)])
def test_a_batch_sampler_is_told_the_epoch_once(make: Any) -> None:
    told = Told([1, 0])
    set_epoch(make(TEN, batch_sampler=told), 3)
    assert told.epochs == [3]


def test_a_sampler_within_a_batch_sampler_is_told_the_epoch() -> None:
    sampler = DistributedSampler(range(10), num_replicas=1, rank=0)
    set_epoch(DataLoader(TEN, sampler=sampler, batch_size=2), 3)
    assert sampler.epoch == 3


def test_a_loader_that_wants_to_know_the_epoch_is_told() -> None:
    told = Told()
    set_epoch(told, 4)
    assert told.epochs == [4]
