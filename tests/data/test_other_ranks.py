"""A pass that goes on in the middle of an epoch, on as many ranks or on others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, TensorDataset

from pipeline.data.batch import EmptySlice
from pipeline.data.buckets import LengthBuckets
from pipeline.data.loader import LimitedLoader, SeededLoader, batches_done, make_loader, position_of, remaining_batches
from pipeline.data.rng import mix
from pipeline.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
SAMPLES, EPOCH = 47, 2
TABLE = TensorDataset(torch.arange(float(SAMPLES)))


def with_workers(cases: list[tuple[Any, ...]], *chosen: tuple[Any, ...]) -> list[Any]:
    """The cases, each with 0 workers, and with 2 workers those that are chosen; the others are for a release.

    Two workers of each rank are started for each case and pass.
    """
    two = [pytest.param(2, *case, marks=() if case in chosen else pytest.mark.release) for case in cases]
    return [*((0, *case) for case in cases), *two]


def ranks(size: int, dataset: Any = TABLE, **keywords: Any) -> list[SeededLoader]:
    """The loaders of all ranks, in an epoch that is not the first."""
    made = [make_loader(dataset, **{"seed": 3, **keywords}, rank=rank, size=size) for rank in range(size)]
    for loader in made:
        loader.set_epoch(EPOCH)
    return made


def numbers(batch: Any) -> list[int]:
    """The samples that a rank trains on."""
    part = [] if isinstance(batch, EmptySlice) else batch
    while isinstance(part, list) and part and isinstance(part[0], Tensor):
        part = part[0].int().tolist()
    return part


def batches(parts: list[Any]) -> list[list[int]]:
    """The samples of each iteration, of all ranks."""
    return [list(chain(*map(numbers, together))) for together in zip(*parts, strict=True)]


def order() -> list[int]:
    """The permutation of the epoch, by torch alone."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mix(3, EPOCH))).tolist()


def after(done: int, loaders: list[SeededLoader], position: Any = None, before: int = 0) -> list[dict[str, Any] | None]:
    """The positions of all ranks after so many more batches, and one that is read ahead."""
    positions = []
    for loader in loaders:
        remaining = remaining_batches(loader, before, position)
        first = batches_done(remaining, before)
        given = len(list(islice(iter(remaining), done + 1)))
        # A rank may have no more of a stream.
        positions.append(position_of(remaining, first + min(done, given)))
    return positions


def going_on(loaders: list[SeededLoader], done: int, position: Any) -> list[list[int]]:
    """The samples of the rest of the epoch."""
    return batches([remaining_batches(loader, done, position) for loader in loaders])


GLOBAL = [(*ranks, done) for ranks in [(2, 1), (1, 3), (4, 2), (3, 4), (2, 2)] for done in (1, 3, 6)]


@pytest.mark.parametrize(("workers", "before", "now", "done"), with_workers(GLOBAL, (3, 4, 3)))
def test_a_global_batch_goes_on_with_the_same_batches(workers: int, before: int, now: int, done: int) -> None:
    keywords: dict[str, Any] = {"shuffle": True, "global_batch_size": 7, "num_workers": workers}
    position, *others = after(done, ranks(before, **keywords))
    assert others == [position] * len(others)
    whole = [batch.tolist() for batch in torch.tensor(order()).split(7)]
    assert going_on(ranks(now, **keywords), done, position) == whole[done:]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 3), (4, 2), (3, 4), (2, 3)])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_other_ranks_go_on_after_the_same_samples(before: int, now: int, done: int) -> None:
    position, *_ = after(done, ranks(before, shuffle=True, batch_size=3))
    rest = going_on(ranks(now, shuffle=True, batch_size=3), done, position)
    assert list(chain(*rest)) == order()[3 * before * done :]
    assert set(map(len, rest[1:-1])) <= {3 * now}


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_pass_on_other_ranks_can_be_left_again(more: int) -> None:
    position, *_ = after(2, ranks(2, shuffle=True, batch_size=3))
    # 12 samples are done: one batch of nine, and a third of the next.
    again, *_ = after(more, ranks(3, shuffle=True, batch_size=3), position, before=2)
    assert again is not None
    seen = (12, 18, 27)[more]
    for now in (1, 2, 3, 4):
        rest = going_on(ranks(now, shuffle=True, batch_size=3), 1 + more, again)
        assert list(chain(*rest)) == order()[seen:]


def test_the_number_of_batches_that_are_done_is_that_of_these_ranks() -> None:
    position, *_ = after(6, ranks(2, batch_size=3))
    for now, done in ((3, 4), (1, 12), (2, 6)):
        assert batches_done(remaining_batches(ranks(now, batch_size=3)[0], 6, position), 6) == done


def test_a_pass_whose_samples_are_all_done_has_no_batch_left_on_other_ranks() -> None:
    position, *_ = after(8, ranks(2, batch_size=3))
    for now in (1, 3, 4):
        assert going_on(ranks(now, batch_size=3), 8, position) == []


def test_other_batches_on_other_ranks_are_said_once(log_lines: list[str]) -> None:
    position, *_ = after(3, ranks(2, batch_size=4))
    going_on(ranks(3, batch_size=4), 3, position)
    said = (
        "2 ranks took 8 samples at once, and 3 take 12: the epoch goes on after the same samples; set global_batch_size"
    )
    assert "".join(log_lines).count(said) == 1


def test_the_same_batches_on_other_ranks_need_no_word(log_lines: list[str]) -> None:
    position, *_ = after(3, ranks(2, global_batch_size=8))
    going_on(ranks(3, global_batch_size=8), 3, position)
    assert "ranks took" not in "".join(log_lines)


def test_another_batch_size_on_as_many_ranks_is_refused() -> None:
    position, *_ = after(3, ranks(2, batch_size=4))
    with pytest.raises(DataError, match=r"batch_size: was 8, is 6|batch_size.*8.*6.*middle of an epoch"):
        going_on(ranks(2, batch_size=3), 3, position)


def test_items_that_are_batches_go_on_after_the_same_items() -> None:
    items = [torch.tensor([float(item)]) for item in range(11)]
    position, *_ = after(3, ranks(2, items, batch_size=None))
    rest = going_on(ranks(4, items, batch_size=None), 3, position)
    assert rest == [[6, 7], [8, 9, 10]]


def test_a_state_without_ranks_is_that_of_one_process() -> None:
    state = {"epoch": EPOCH, "taken": 4, "order": make_loader(TABLE, seed=3, batch_size=5, shuffle=True).order()}
    rest = going_on(ranks(2, shuffle=True, batch_size=5), 4, state)
    assert list(chain(*rest)) == order()[20:]


def test_the_state_of_one_process_is_as_before() -> None:
    (position,) = after(2, ranks(1, batch_size=5))
    assert position is not None
    assert list(position) == ["epoch", "taken", "order", "hash"]


def test_buckets_go_on_with_the_same_batches() -> None:
    def buckets() -> LengthBuckets:
        return LengthBuckets(TABLE, 40, lengths=[1 + place % 9 for place in range(SAMPLES)], shuffle=True)

    whole = batches(list(ranks(1, batch_sampler=buckets())))
    position, *_ = after(2, ranks(3, batch_sampler=buckets()))
    assert going_on(ranks(2, batch_sampler=buckets()), 2, position) == whole[2:]


def test_a_batch_sampler_that_has_changed_is_refused_on_other_ranks() -> None:
    position, *_ = after(2, ranks(2, batch_sampler=BatchSampler(SequentialSampler(range(40)), 6, drop_last=False)))
    with pytest.raises(DataError, match=r"hash of the indices.*has changed in the middle of an epoch"):
        going_on(ranks(3, batch_sampler=BatchSampler(SequentialSampler(range(40)), 9, drop_last=False)), 2, position)


def test_the_hash_of_the_indices_is_that_of_all_ranks() -> None:
    def hashed(size: int) -> set[Any]:
        sampler = list(range(40))
        return {
            position["hash"] for position in after(3, ranks(size, sampler=sampler, global_batch_size=8)) if position
        }

    assert len(hashed(1) | hashed(2) | hashed(3)) == 1


def test_a_limit_counts_the_batches_of_these_ranks() -> None:
    position, *_ = after(4, ranks(2, batch_size=3))
    remaining = remaining_batches(LimitedLoader(ranks(1, batch_size=3)[0], 10), 4, position)
    assert batches([remaining]) == [[24, 25, 26], [27, 28, 29]]


def test_workers_that_stay_go_on_and_make_the_next_epoch() -> None:
    keywords: dict[str, Any] = {"shuffle": True, "batch_size": 3, "num_workers": 1, "persistent_workers": True}
    position, *_ = after(2, ranks(2, shuffle=True, batch_size=3))
    loaders = ranks(3, **keywords)
    assert list(chain(*going_on(loaders, 2, position))) == order()[12:]
    assert list(chain(*batches(list(loaders)))) == order()


# Streams.


class Plain(IterableDataset[int]):
    """The numbers below 23."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


class Sized(Plain):
    def __len__(self) -> int:
        return 23


class Blocks(Plain):
    """Shares itself out, and goes on where it was."""

    def __init__(self) -> None:
        self.left = list(range(23))

    def shard(self, rank: int, count: int) -> Blocks:
        del self.left[: 23 * rank // count], self.left[23 * (rank + 1) // count - 23 * rank // count :]
        return self

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left = list(state["left"])


STREAM: dict[str, Any] = {"collate_fn": list, "batch_size": 2}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("workers", "size", "cls"), with_workers([*product((1, 2, 3, 4), (Plain, Blocks))], (3, Plain), (2, Blocks))
)
def test_each_sample_of_a_stream_comes_on_one_rank(workers: int, size: int, cls: type[Plain]) -> None:
    loaders = ranks(size, cls(), **STREAM, num_workers=workers)
    for _ in range(2):
        assert sorted(sample for loader in loaders for batch in loader for sample in batch) == list(range(23))


def test_shares_of_a_stream_are_counted_over_ranks_and_workers() -> None:
    first, second = ranks(2, Plain(), **STREAM, num_workers=2)
    assert list(first)[:2] == [[0, 4], [1, 5]]
    assert list(second)[:2] == [[2, 6], [3, 7]]


def test_a_rank_takes_its_share_of_a_global_batch_from_a_stream() -> None:
    loaders = ranks(3, Plain(), collate_fn=list, global_batch_size=8)
    assert [len(next(iter(loader))) for loader in loaders] == [3, 3, 2]


LENGTHS = [*product((2, 3, 4), (False, True), ("batch_size", "global_batch_size"))]


@pytest.mark.parametrize(
    ("workers", "size", "drop_last", "key"),
    with_workers(LENGTHS, (2, True, "batch_size"), (3, False, "global_batch_size")),
)
def test_the_length_of_a_stream_is_that_of_the_longest_rank(workers: int, size: int, drop_last: bool, key: str) -> None:
    together = {"batch_size": 3} if key == "batch_size" else {"global_batch_size": 5}
    loaders = ranks(size, Sized(), collate_fn=list, **together, drop_last=drop_last, num_workers=workers)
    assert {len(loader) for loader in loaders} == {max(len(list(loader)) for loader in loaders)}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("workers", "cls", "done"), with_workers([*product((Plain, Blocks), (1, 3, 4, 9))], (Plain, 3), (Blocks, 4))
)
def test_each_rank_goes_on_in_its_part_of_a_stream(workers: int, cls: type[Plain], done: int) -> None:
    # Each rank has fewer than nine batches, and may be over when the others are not.
    loaders = ranks(3, cls(), **STREAM, num_workers=workers)
    whole, positions = [list(copy.copy(loader)) for loader in loaders], after(done, loaders)
    again = ranks(3, cls(), **STREAM, num_workers=workers, resume="reread" if cls is Plain else None)
    for loader, position, own in zip(again, positions, whole, strict=True):
        remaining = remaining_batches(loader, min(done, len(own)), position)
        # All ranks count the same batches, although this one may have had fewer.
        assert batches_done(remaining, done) == done
        assert list(remaining) == own[done:]


def test_a_stream_on_other_ranks_is_refused_in_the_middle_of_an_epoch() -> None:
    position, *_ = after(2, ranks(2, Plain(), **STREAM))
    with pytest.raises(DataError, match=r"ranks.*2.*3.*has changed in the middle of an epoch"):
        remaining_batches(ranks(3, Plain(), **STREAM)[0], 2, position)
