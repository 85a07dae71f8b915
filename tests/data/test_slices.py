"""Each rank gets its slice of a batch that all ranks take at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from pipeline.data.batch import EmptySlice, on_device
from pipeline.data.buckets import LengthBuckets
from pipeline.data.loader import LimitedLoader, SeededLoader, first_batch, make_loader, overfit_batches
from pipeline.data.rng import mix, sample_generator
from pipeline.errors import ConfigError, DataError

SAMPLES = 23


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Sample i is i, and a number drawn for it."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand((), generator=sample_generator(index)).item()])

    def __len__(self) -> int:
        return SAMPLES


def ranks(size: int, dataset: Any = None, **keywords: Any) -> list[SeededLoader]:
    """The loaders of all ranks."""
    dataset = Numbers() if dataset is None else dataset
    return [make_loader(dataset, **{"seed": 3, **keywords}, rank=rank, size=size) for rank in range(size)]


def order(epoch: int, count: int = SAMPLES) -> Tensor:
    """The permutation of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix(3, epoch)))


def indices(batch: Any) -> list[int]:
    """The samples that a rank trains on."""
    return [] if isinstance(batch, EmptySlice) else batch[:, 0].int().tolist()


def slices(loaders: Sequence[Any], epoch: int = 0) -> list[list[list[int]]]:
    """Of each batch of an epoch the samples of each rank."""
    for loader in loaders:
        loader.set_epoch(epoch)
    return [[indices(part) for part in parts] for parts in zip(*loaders, strict=True)]


def expected(epoch: int, size: int, together: int) -> list[list[list[int]]]:
    """The same by torch alone."""
    return [[part.tolist() for part in batch.tensor_split(size)] for batch in order(epoch).split(together)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("together", range(4, 13))
def test_each_rank_gets_its_slice_of_a_global_batch(size: int, together: int) -> None:
    loaders = ranks(size, shuffle=True, global_batch_size=together)
    for epoch in (0, 2):
        assert slices(loaders, epoch) == expected(epoch, size, together)


@pytest.mark.parametrize("size", [2, 3])
def test_workers_make_the_same_slices(size: int) -> None:
    loaders = ranks(size, shuffle=True, global_batch_size=7, num_workers=2)
    assert slices(loaders, 1) == expected(1, size, 7)


def test_batch_size_is_that_of_each_rank() -> None:
    assert slices(ranks(3, shuffle=True, batch_size=2)) == expected(0, 3, 6)


def test_no_rank_has_more_batches_than_another() -> None:
    assert {len(loader) for loader in ranks(4, global_batch_size=5)} == {5}


def test_drop_last_drops_a_batch_that_is_short_over_all_ranks() -> None:
    assert slices(ranks(2, shuffle=True, batch_size=4, drop_last=True)) == expected(0, 2, 8)[:-1]


def test_what_is_drawn_for_a_sample_is_the_same_on_any_number_of_ranks() -> None:
    whole = torch.cat(list(*ranks(1, shuffle=True, global_batch_size=6)))
    parts = [part for parts in zip(*ranks(3, shuffle=True, global_batch_size=6), strict=True) for part in parts]
    assert torch.equal(torch.cat([part for part in parts if not isinstance(part, EmptySlice)]), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_slice_has_the_first_sample_in_its_place(workers: int) -> None:
    loader = ranks(4, torch.arange(9.0), batch_size=2, num_workers=workers)[3]
    last = list(loader)[-1]
    assert isinstance(last, EmptySlice)
    assert last.batch.tolist() == [8]


def test_draws_of_a_slice_are_seeded_by_the_samples_before_it() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(2)

    alone = list(*ranks(1, Draws(), batch_size=2))
    first, second = ranks(2, Draws(), batch_size=2)
    assert torch.equal(torch.cat(list(first)), torch.cat(alone[::2]))
    assert torch.equal(torch.cat(list(second)), torch.cat(alone[1::2]))


def test_a_failure_on_a_rank_without_samples_names_the_stand_in() -> None:
    class Fails(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        next(iter(ranks(2, Fails(), sampler=[5], batch_size=1)[1]))
    assert "raised for sample 5" in "".join(caught.value.__notes__)


def test_batches_that_a_model_is_to_overfit_are_cut() -> None:
    overfit = [overfit_batches(loader, 2) for loader in ranks(2, shuffle=True, batch_size=2)]
    for epoch in (0, 1):
        for loader in overfit:
            loader.set_epoch(epoch)
        assert slices(overfit) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_fewer_samples_than_ranks_cannot_be_overfit() -> None:
    with pytest.raises(
        DataError, match=r"overfit_batches: .*: 2 samples cannot be trained on by 3 ranks at once; start fewer"
    ):
        overfit_batches(ranks(3, torch.arange(2.0), batch_size=1)[0], 1)


def test_a_limit_counts_batches_of_all_ranks() -> None:
    limited = [LimitedLoader(loader, 2) for loader in ranks(3, shuffle=True, global_batch_size=7)]
    assert slices(limited) == expected(0, 3, 7)[:2]


def test_an_empty_slice_moves_to_a_device() -> None:
    loader = ranks(2, TensorDataset(torch.arange(3.0)), batch_size=1)[1]
    *_, last = on_device(loader, torch.device("meta"))
    assert isinstance(last, EmptySlice)
    assert last.batch[0].is_meta


def test_the_first_batch_of_a_rank_without_samples_is_the_stand_in() -> None:
    assert first_batch(ranks(2, torch.arange(1.0), batch_size=1)[1]).tolist() == [0]


@pytest.mark.parametrize("workers", [0, 2])
def test_items_that_are_batches_are_taken_in_turn(workers: int) -> None:
    items = [torch.full((2, 1), float(item)) for item in range(5)]
    loaders = ranks(2, items, batch_size=None, num_workers=workers)
    assert slices(loaders) == [[[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4], []]]
    assert len(loaders[0]) == 3


def test_a_sampler_gives_the_order_of_all_ranks() -> None:
    loaders = ranks(2, sampler=list(range(10, 0, -1)), batch_size=2)
    assert slices(loaders) == [[[10, 9], [8, 7]], [[6, 5], [4, 3]], [[2], [1]]]


def test_the_batches_of_a_batch_sampler_are_cut() -> None:
    batches = BatchSampler(SequentialSampler(range(9)), 7, drop_last=False)
    assert slices(ranks(3, batch_sampler=batches)) == [[[0, 1, 2], [3, 4], [5, 6]], [[7], [8], []]]


def test_a_random_sampler_is_seeded_alike_on_all_ranks() -> None:
    loaders = [
        make_loader(Numbers(), seed=1, sampler=RandomSampler(range(SAMPLES)), rank=rank, size=2) for rank in (0, 1)
    ]
    assert sorted(index for parts in slices(loaders) for part in parts for index in part) == list(range(SAMPLES))


def test_length_buckets_are_cut() -> None:
    buckets = LengthBuckets(Numbers(), 40, lengths=[3] * SAMPLES, width=1, shuffle=True)
    parts = slices(ranks(2, batch_sampler=buckets))
    assert [list(chain(*part)) for part in parts] == list(buckets)
    assert [list(map(len, part)) for part in parts].count([7, 6]) == 1


def test_a_sampler_that_shares_the_samples_out_itself_is_refused() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1)
    with pytest.raises(
        ConfigError, match=r"DistributedSampler asks for rank or num_replicas.*; name one that gives the order of all"
    ):
        ranks(2, sampler=sampler)


def test_one_process_may_have_such_a_sampler() -> None:
    loader = make_loader(Numbers(), seed=1, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1))
    assert len(loader) == 12


def test_an_order_that_is_drawn_by_chance_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"RandomSampler may give another order on each of 2 ranks.*; give the runner"
    ):
        ranks(2, sampler=RandomSampler(range(SAMPLES)), seed=None)


def test_a_global_batch_size_below_the_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size: 3 is less than one for each of 4 ranks; raise it"):
        ranks(4, global_batch_size=3)


def test_both_batch_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size: 8 and batch_size: 4 contradict each other; keep one"):
        ranks(1, global_batch_size=8, batch_size=4)
