"""The same batches with any number of workers."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from pipeline.data.loader import EpochSampler, make_loader
from pipeline.data.rng import sample_generator, seed_generators, seeded
from pipeline.errors import ConfigError, DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def epochs(loader: Any, *which: int) -> list[list[Any]]:
    """The batches of some epochs."""
    given = []
    for epoch in which or (0, 1):
        loader.set_epoch(epoch)
        given.append(list(loader))
    return given


def by_hand(noisy: ModuleType, epoch: int, *, size: int = 10, batch_size: int = 4) -> list[Any]:
    """The shuffled batches of an epoch, with seed 3."""
    order = EpochSampler(size, shuffle=True, seed=3)
    order.set_epoch(epoch)
    indices, batches, dataset = list(order), [], noisy.Noisy(size)
    for position in range(0, size, batch_size):
        with seeded(3, epoch, "batch", position):
            batches.append(noisy.noisy_collate([dataset[index] for index in indices[position : position + batch_size]]))
    return batches


def noisy_loader(noisy: ModuleType, **keywords: Any) -> Any:
    chosen = {"seed": 3, "shuffle": True, "batch_size": 4, "collate_fn": noisy.noisy_collate, **keywords}
    return make_loader(noisy.Noisy(10), **chosen)


@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 1, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    ],
)
def test_random_samples_and_batches_are_those_of_a_loop_by_hand_with_any_workers(
    noisy: ModuleType, workers: dict[str, Any]
) -> None:
    loader = noisy_loader(noisy, **workers)
    assert epochs(loader, 0, 1, 0) == [by_hand(noisy, 0), by_hand(noisy, 1), by_hand(noisy, 0)]


@pytest.mark.slow
def test_workers_that_are_spawned_make_the_same_batches(noisy: ModuleType) -> None:
    loader = noisy_loader(noisy, num_workers=2, multiprocessing_context="spawn")
    assert epochs(loader, 1) == [by_hand(noisy, 1)]


def test_the_draws_differ_from_epoch_to_epoch_and_from_batch_to_batch(noisy: ModuleType) -> None:
    drawn = [draws for batches in epochs(noisy_loader(noisy)) for batch in batches for draws in batch]
    assert len({each[-1] for each in drawn}) == len({each[-2] for each in drawn}) == 2 * (10 + 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_to_this_process_the_batches_cost_the_one_draw_that_torch_makes_for_each_epoch(
    noisy: ModuleType, workers: int
) -> None:
    seed_generators(1)
    list(DataLoader(TensorDataset(torch.zeros(1))))
    expected = random.random(), torch.rand(())
    seed_generators(1)
    list(noisy_loader(noisy, num_workers=workers))
    assert (random.random(), torch.rand(())) == expected


def test_a_dataset_that_raises_leaves_the_generators_as_they_were(noisy: ModuleType) -> None:
    def fails(samples: list[Any]) -> None:
        raise KeyError(noisy.draws())

    batches = iter(noisy_loader(noisy, collate_fn=fails))
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(KeyError):
        next(batches)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


class Watch(TorchFunctionMode):
    """Looks where Python's generator is whenever torch is called."""

    def __init__(self) -> None:
        super().__init__()
        self.states: set[Any] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.states.add(random.getstate())
        return function(*args, **kwargs or {})


class Own(TensorDataset):
    """May draw, for all that a loader knows."""


TABLE, OWN, LIST = TensorDataset(torch.arange(6), torch.ones(6)), Own(torch.arange(6)), list(torch.arange(6.0))


@pytest.mark.parametrize(
    "dataset",
    [TABLE, LIST, (*LIST,), Subset(TABLE, [4, 1]), Subset(LIST, range(3)), ConcatDataset([LIST, Subset(LIST, [0])])],
    ids=["table", "list", "tuple", "subset", "subset of a list", "concatenated"],
)
def test_slices_of_tensors_are_fetched_with_the_generators_as_they_are(dataset: Any) -> None:
    expected = list(DataLoader(dataset, batch_size=2))
    with Watch() as watch:
        given = list(make_loader(dataset, seed=0, batch_size=2))
    assert str(given) == str(expected)
    assert watch.states == {random.getstate()}


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": OWN},
        {"dataset": Subset(OWN, [0])},
        {"dataset": ConcatDataset([LIST, OWN])},
        {"dataset": [(each,) for each in LIST]},
        {"dataset": TABLE, "collate_fn": list},
    ],
    ids=["own", "subset", "concatenated", "tuples", "own collation"],
)
def test_what_may_draw_is_fetched_with_the_generators_seeded(arguments: dict[str, Any]) -> None:
    with Watch() as watch:
        list(make_loader(**arguments, seed=0, batch_size=2))
    with seeded(0, 0, "batch", 0):
        assert random.getstate() in watch.states


def test_tensors_that_make_no_batch_and_samples_that_are_not_there_are_told_without_a_seed_too() -> None:
    with pytest.raises(DataError, match=r"^x: torch's collate makes no batch of the samples 0, 1"):
        list(make_loader([torch.zeros(1), torch.zeros(2)], seed=0, batch_size=2, where="x"))
    with pytest.raises(IndexError) as raised:
        list(make_loader(TABLE, seed=0, sampler=[9], where="x"))
    assert raised.value.__notes__ == ["x: raised for sample 9, fetching sample 9 (from place 0 of epoch 0 on)"]


def test_without_a_seed_the_batches_are_those_of_torch(noisy: ModuleType) -> None:
    arguments = {"batch_size": 4, "collate_fn": noisy.noisy_collate}
    seed_generators(1)
    expected = list(DataLoader(noisy.Noisy(10), **arguments))
    seed_generators(1)
    assert list(make_loader(noisy.Noisy(10), seed=None, **arguments)) == expected


def test_samples_that_a_dataset_gives_many_at_once_are_asked_for_so() -> None:
    class AtOnce(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [("at once", index, torch.rand(()).item()) for index in indices]

    batch = next(iter(make_loader(AtOnce(torch.zeros(3)), seed=0, batch_size=3, collate_fn=list)))
    with seeded(0, 0, "batch", 0):
        assert batch == [("at once", index, torch.rand(()).item()) for index in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_batch_size_each_sample_is_seeded_by_its_position(noisy: ModuleType, workers: int) -> None:
    given = list(make_loader(noisy.Noisy(3), seed=0, batch_size=None, num_workers=workers))
    for position, sample in enumerate(given):
        with seeded(0, 0, "batch", position):
            assert sample == [position, *noisy.draws()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_the_users_own_decides_the_order_and_the_draws_are_seeded_all_the_same(
    noisy: ModuleType, workers: int
) -> None:
    weighted = WeightedRandomSampler([1.0] * 10, 6, generator=torch.Generator().manual_seed(4))
    loader = noisy_loader(noisy, shuffle=False, sampler=weighted, num_workers=workers)
    given = list(loader)
    assert loader.sampler is weighted
    expected = list(WeightedRandomSampler([1.0] * 10, 6, generator=torch.Generator().manual_seed(4)))
    assert [index for batch in given for index, *_ in batch[:-1]] == expected
    with seeded(3, 0, "batch", 4):
        assert given[1][0][1:] == noisy.draws()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_from_torch_draws_outside_of_the_batches(noisy: ModuleType, workers: int) -> None:
    seed_generators(1)
    expected = list(DataLoader(range(10), batch_size=4, shuffle=True, collate_fn=list)), torch.rand(())
    seed_generators(1)
    loader = make_loader(noisy.Noisy(10), seed=3, batch_size=4, sampler=RandomSampler(range(10)), collate_fn=list)
    assert ([[sample[0] for sample in batch] for batch in loader], torch.rand(())) == expected


def test_a_batch_sampler_of_the_users_own_decides_the_batches(noisy: ModuleType) -> None:
    own = [[5, 1], [2], [0, 3, 4]]
    given = list(make_loader(noisy.Noisy(6), seed=0, batch_sampler=own, collate_fn=list))
    assert [[sample[0] for sample in batch] for batch in given] == own
    with seeded(0, 0, "batch", 3):
        assert given[2][0] == (0, *noisy.draws())


def test_a_loader_has_the_parts_that_torch_gives_it(noisy: ModuleType) -> None:
    dataset = noisy.Noisy(10)
    loader = make_loader(dataset, seed=0, batch_size=4, drop_last=True, collate_fn=noisy.noisy_collate)
    assert loader.dataset is dataset
    assert loader.collate_fn is noisy.noisy_collate
    assert isinstance(loader.sampler, EpochSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert (loader.batch_size, loader.drop_last, len(loader), loader.num_workers) == (4, True, 2, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_may_draw_from_a_generator_of_its_own(workers: int) -> None:
    class Augmented(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return torch.rand((), generator=sample_generator(index))

    dataset = Augmented(torch.zeros(6))
    alone = torch.cat(list(make_loader(dataset, seed=0, batch_size=1)))
    given = torch.cat(list(make_loader(dataset, seed=0, batch_size=4, num_workers=workers)))
    assert torch.equal(given, alone)
    assert len(set(given.tolist())) == 6


class ToldStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class ToldTable(TensorDataset):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("dataset", [ToldStream(), ToldTable(torch.zeros(3))])
def test_workers_that_would_miss_the_epoch_are_refused(dataset: Any) -> None:
    message = r"persistent_workers: is True, but the workers of Told\w+ have to be told the epoch; remove it"
    with pytest.raises(ConfigError, match=message):
        make_loader(dataset, seed=0, num_workers=1, persistent_workers=True)
