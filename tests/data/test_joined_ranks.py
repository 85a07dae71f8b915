"""Loaders on real processes that train together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from pipeline.data.batch import EmptySlice
from pipeline.data.buckets import LengthBuckets
from pipeline.data.loader import dataset_digest, make_loader, remaining_batches, without_state
from pipeline.distributed.world import current_world, joined
from pipeline.errors import ConfigError
from tests.distributed.ranks import Ranks


def table(count: int = 9) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def samples(loader: Any) -> list[float]:
    return [number for batch in loader if type(batch) is not EmptySlice for number in batch[0].tolist()]


def drawn_orders() -> list[list[float]]:
    # Each process draws by chance; the order is one for all of them.
    torch.seed()
    with joined():
        buckets = LengthBuckets(table(), 5, lengths=[1] * 9, shuffle=True, seed=None)
        loaders = [make_loader(table(), seed=None, shuffle=True), make_loader(table(), seed=0, batch_sampler=buckets)]
        return [samples(loader) for loader in loaders]


def test_an_order_drawn_by_chance_is_that_of_all_ranks(two_ranks: Ranks) -> None:
    for first, second in zip(*two_ranks(drawn_orders), strict=True):
        assert sorted([*first, *second]) == list(range(9))


def own_loaders() -> list[str]:
    class Shared(list[Any]):
        num_replicas = 2

    class Stream(IterableDataset[int]):
        num_replicas = 2

        def __iter__(self) -> Iterator[int]:
            return iter(range(current_world().rank, 4, 2))

    refused = []
    with joined():
        ours = make_loader(table(), seed=0)
        shared = [ours, Shared(), DataLoader(Stream()), DataLoader(table(), sampler=DistributedSampler(table()))]
        for loader in [*shared, DataLoader(table()), [torch.ones(2)], make_loader(table(), seed=0, rank=0, size=1)]:
            try:
                remaining_batches(loader, 0)
                without_state(loader)
            except ConfigError as error:
                refused.append(str(error))
    return refused


def test_loaders_that_no_rank_shares_are_refused(two_ranks: Ranks) -> None:
    for refused in two_ranks(own_loaders):
        kinds = ["DataLoader", "list", "SeededLoader"]
        assert refused == [
            f"the training data: a {kind} that was not made for 2 ranks gives all the same batches; make it with"
            " make_loader, in a script after ddp_init_group(run_opts), or with a DistributedSampler"
            for kind in kinds
        ]


def test_one_process_reads_any_loader() -> None:
    assert remaining_batches([1, 2], 0) == [1, 2]


def digests() -> tuple[str, str]:
    with joined() as world:
        same = dataset_digest(make_loader(table(), seed=0, shuffle=True, global_batch_size=4))
        return same, dataset_digest(make_loader(table(9 + world.rank), seed=0))


def test_other_data_on_one_rank_have_another_digest(two_ranks: Ranks) -> None:
    (same, first), (as_before, second) = two_ranks(digests)
    assert same == as_before != ""
    assert first != second
