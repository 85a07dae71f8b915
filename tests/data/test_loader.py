"""The same batches with any number of workers."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pipeline.data.loader import EpochSampler, make_loader, set_epoch
from pipeline.data.rng import mix, sample_generator, seed_generators, seeding
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
    order = EpochSampler(range(size), shuffle=True, seed=3)
    order.set_epoch(epoch)
    indices, batches, dataset = list(order), [], noisy.Noisy(size)
    for position in range(0, size, batch_size):
        with seeding(3, epoch, "batch", position):
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
    loader = noisy_loader(noisy, num_workers=1, multiprocessing_context="spawn")
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
    with seeding(0, 0, "batch", 0):
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
    with seeding(0, 0, "batch", 0):
        assert batch == [("at once", index, torch.rand(()).item()) for index in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_batch_size_each_sample_is_seeded_by_its_position(noisy: ModuleType, workers: int) -> None:
    given = list(make_loader(noisy.Noisy(3), seed=0, batch_size=None, num_workers=workers))
    for position, sample in enumerate(given):
        with seeding(0, 0, "batch", position):
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
    with seeding(3, 0, "batch", 4):
        assert given[1][0][1:] == noisy.draws()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_sampler_draws_is_seeded_with_the_epoch(noisy: ModuleType, workers: int) -> None:
    keywords = {"batch_size": 4, "sampler": RandomSampler(range(10)), "collate_fn": list, "num_workers": workers}
    given = epochs(make_loader(noisy.Noisy(10), seed=3, **keywords))
    for epoch, batches in enumerate(given):
        with seeding(3, epoch, "order"):
            assert [sample[0] for batch in batches for sample in batch] == list(RandomSampler(range(10)))


def test_a_batch_sampler_of_the_users_own_decides_the_batches(noisy: ModuleType) -> None:
    own = [[5, 1], [2], [0, 3, 4]]
    given = list(make_loader(noisy.Noisy(6), seed=0, batch_sampler=own, collate_fn=list))
    assert [[sample[0] for sample in batch] for batch in given] == own
    with seeding(0, 0, "batch", 3):
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


TEN = TensorDataset(torch.arange(10))


def batches(seed: int | None = 0, epoch: int = 0, dataset: Any = TEN, **keys: Any) -> list[list[int]]:
    """What a loader gives in an epoch."""
    loader = make_loader(dataset, seed=seed, **keys)
    set_epoch(loader, epoch)
    return [batch[0].tolist() for batch in loader]


def test_without_shuffle_the_samples_come_in_order_with_a_short_last_batch() -> None:
    assert batches(batch_size=4, epoch=3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_drop_last_leaves_out_the_short_last_batch() -> None:
    assert batches(batch_size=4, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_with_shuffle_they_come_in_the_order_of_the_epoch(workers: dict[str, Any]) -> None:
    sampler = EpochSampler(range(10), shuffle=True, seed=7)
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
        (
            Endless(),
            {},
            r"Endless has no length \(.*\); give it a __len__ that returns an int of 0 or more, or make it an Iter",
        ),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_refused_with_its_name_and_what_to_do(
    dataset: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"dataset.train_data: {message}"):
        make_loader(dataset, seed=0, where="dataset.train_data", **keys)


def test_batches_are_made_by_collate_fn_where_there_is_one() -> None:
    loader = make_loader(TEN, seed=0, batch_size=5, collate_fn=lambda samples: sum(int(each[0]) for each in samples))
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


def order(seed: int, epoch: int, length: int = 50) -> list[int]:
    sampler = EpochSampler(range(length), shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_a_shuffled_epoch_has_every_sample_once() -> None:
    assert sorted(order(seed=3, epoch=5)) == list(range(50))
    assert order(seed=3, epoch=5) != list(range(50))


def test_the_order_is_the_permutation_that_torch_makes_from_the_mixed_seed() -> None:
    generator = torch.Generator().manual_seed(mix(3, 5))
    assert order(seed=3, epoch=5) == torch.randperm(50, generator=generator).tolist()


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 70_000, 2**20 + 3])
def test_an_order_of_any_length_is_that_permutation_in_numbers_of_python(length: int) -> None:
    found = order(seed=7, epoch=2, length=length)
    assert found == torch.randperm(length, generator=torch.Generator().manual_seed(mix(7, 2))).tolist()
    assert {type(index) for index in found} <= {int}


def test_a_shuffled_epoch_has_few_numbers_of_python_at_once() -> None:
    sampler = EpochSampler(range(300_000), shuffle=True, seed=0)
    tracemalloc.start()
    try:
        assert sum(sampler) == 300_000 * 299_999 // 2
        # A list of all would be 10 MB.
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = order(seed=3, epoch=5)
    torch.manual_seed(99)
    order(seed=3, epoch=4)
    assert order(seed=3, epoch=5) == first
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_an_order_can_be_asked_for_again_and_draws_nothing_from_torch() -> None:
    sampler, state = EpochSampler(range(50), shuffle=True, seed=0), torch.get_rng_state()
    assert list(sampler) == list(sampler)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_the_order_is_drawn_from_torch() -> None:
    torch.manual_seed(1)
    first, second = EpochSampler(range(50), shuffle=True, seed=None), EpochSampler(range(50), shuffle=True, seed=None)
    torch.manual_seed(1)
    assert list(first) != list(second)
    assert list(EpochSampler(range(50), shuffle=True, seed=None)) == list(first)


def test_a_sampler_is_as_long_as_its_data() -> None:
    assert len(EpochSampler(range(7), shuffle=True, seed=0)) == 7


def test_a_dataset_that_grows_between_two_passes_is_read_to_its_new_end() -> None:
    samples = [0, 1, 2]
    loader = make_loader(samples, seed=0, shuffle=True, batch_size=2)
    assert sorted(torch.cat(list(loader)).tolist()) == [0, 1, 2]
    samples += [3, 4]
    assert len(loader) == 3
    assert sorted(torch.cat(list(loader)).tolist()) == [0, 1, 2, 3, 4]
