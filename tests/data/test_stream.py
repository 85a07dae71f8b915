"""Streams, shared out over workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeline.checkpoint.pytree import flatten, unflatten
from pipeline.data.loader import LimitedLoader, make_loader, position_of, remaining_batches, without_state
from pipeline.data.rng import sample_generator, seed_generators
from pipeline.data.stream import BatchWithState, state_of
from pipeline.errors import ConfigError, DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
any_workers = pytest.mark.parametrize(
    "workers", [0, 2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.release)]
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


LENGTHS = [*product((0, 1, 2, 3), (1, 3, 11, 20), (False, True))]
# Two workers: each with a short last batch, which is kept or left out, and none with a whole one.
WITH_WORKERS = {(2, 3, False), (2, 3, True), (2, 20, True)}


@pytest.mark.parametrize(
    ("workers", "batch_size", "drop_last"),
    [
        pytest.param(*case, marks=() if case[0] == 0 or case in WITH_WORKERS else pytest.mark.release)
        for case in LENGTHS
    ],
)
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
    ("workers", "method"), [(1, "fork"), (3, "fork"), pytest.param(1, "spawn", marks=pytest.mark.slow)]
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


Loaders = Callable[[], Any]


class Resumable(IterableDataset[Any]):
    """Noisy samples from a number on; where it ends, it is at its beginning again."""

    def __init__(self, size: int = 11, first: int = 0) -> None:
        self.size, self.first, self.given = size, first, 0

    def __iter__(self) -> Iterator[Any]:
        while self.given < self.size:
            self.given += 1
            yield self.first + self.given - 1, random.random(), torch.rand(()).item()
        self.given = 0

    def state_dict(self) -> Any:
        return {"given": self.given}

    def load_state_dict(self, state: Any) -> None:
        self.given = state["given"]


class Shards(IterableDataset[Any]):
    """Gives each worker a dataset of its own, the later ones more."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Resumable())

    def shard(self, rank: int, count: int) -> Resumable:
        return Resumable(2 + 5 * rank, 100 * rank)


class Endless(Resumable):
    """Remembers where it was, and begins there; it never begins again by itself."""

    def __iter__(self) -> Iterator[Any]:
        while self.given < self.size:
            self.given += 1
            yield self.given - 1


class Plain(IterableDataset[Any]):
    """Has no state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(11))


def noisy_list(samples: list[Any]) -> list[Any]:
    return [*samples, random.random()]


def loaders(dataset: Callable[[], Any], workers: int, epoch: int = 1, **keywords: Any) -> Loaders:
    """Makes the loader of a new process."""

    def make() -> Any:
        chosen = {"seed": 3, "batch_size": 2, "collate_fn": noisy_list, **keywords}
        loader = make_loader(dataset(), num_workers=workers, where="dataset.train", **chosen)
        loader.set_epoch(epoch)
        return loader

    return make


def chosen(places: list[Any], workers: int) -> list[tuple[int, Any]]:
    """How many batches are taken, and the place after them.

    Workers are started for each: theirs are after the first worker's turn, in the middle and at the end.
    """
    numbered = list(enumerate(places, 1))
    return [numbered[0], numbered[3], numbered[-1]] if workers else numbered


def places(make: Loaders) -> tuple[list[Any], list[Any]]:
    """The batches of an epoch, and the place after each of them, as it comes out of a file."""
    reading = remaining_batches(make(), 0)
    pairs = [(batch, unflatten(*flatten(position_of(reading, taken)))) for taken, batch in enumerate(reading, 1)]
    return [batch for batch, _ in pairs], [place for _, place in pairs]


@any_workers
@pytest.mark.parametrize("dataset", [Resumable, Shards])
def test_a_stream_goes_on_at_every_batch_as_if_it_had_not_been_left(
    dataset: type[Any], workers: int, log_lines: list[str]
) -> None:
    make = loaders(dataset, workers)
    batches, there = places(make)
    assert batches == list(make())
    for taken, place in chosen(there, workers):
        assert list(remaining_batches(make(), taken, place)) == batches[taken:]
    # Only one that shares itself out has no state where it need not.
    assert any("again" in line for line in log_lines) == (dataset is Shards and workers < 2)


@any_workers
def test_it_may_be_left_again_and_again(workers: int) -> None:
    make = loaders(lambda: Resumable(23), workers)
    batches, found, place = list(make()), [], None
    for taken in range(0, len(batches), 3):
        reading = remaining_batches(make(), taken, place)
        found += [batch for batch, _ in zip(reading, range(3), strict=False)]
        place = position_of(reading, len(found))
    assert found == batches


@any_workers
def test_the_place_before_the_last_batch_that_was_given_is_known_too(workers: int, log_lines: list[str]) -> None:
    make = loaders(Resumable, workers)
    batches, reading = list(make()), remaining_batches(make(), 0)
    for taken, _ in enumerate(reading):
        # Workers are started for each.
        if not workers or taken in (0, 3):
            assert list(remaining_batches(make(), taken, position_of(reading, taken))) == batches[taken:]
    assert log_lines == []


def test_another_pass_over_the_same_loader_leaves_the_place_alone() -> None:
    make = loaders(Resumable, 2)
    loader, batches = make(), list(make())
    reading = remaining_batches(loader, 0)
    iterator = iter(reading)
    next(iterator)
    assert list(loader) == batches
    assert next(iterator) == batches[1]
    place = position_of(reading, 2)
    assert place is not None
    assert place["states"]
    assert list(remaining_batches(make(), 2, place)) == batches[2:]


@pytest.mark.slow
def test_a_worker_that_is_spawned_goes_on_too(noisy: ModuleType) -> None:
    here, spawned = (
        loaders(lambda: noisy.Resumable(11), workers, collate_fn=noisy.noisy_collate, multiprocessing_context=how)
        for workers, how in ((0, None), (1, "spawn"))
    )
    batches, there = places(here)
    assert list(remaining_batches(spawned(), 3, there[2])) == batches[3:]


@pytest.mark.parametrize("workers", [1, 2])
def test_without_a_seed_each_sample_comes_once_all_the_same(workers: int) -> None:
    class Shuffled(Resumable):
        order: list[int] | None = None

        def __iter__(self) -> Iterator[Any]:
            self.order = self.order or random.sample(range(11), 11)
            while self.given < 11:
                self.given += 1
                yield self.order[self.given - 1]

        def state_dict(self) -> Any:
            return {"order": self.order, "given": self.given}

        def load_state_dict(self, state: Any) -> None:
            self.order, self.given = state["order"], state["given"]

    make = loaders(Shuffled, workers, seed=None, collate_fn=list)
    reading = remaining_batches(make(), 0)
    first = next(iter(reading))
    rest = [sample for batch in remaining_batches(make(), 1, position_of(reading, 1)) for sample in batch]
    assert sorted(first + rest) == list(range(11))


def test_a_limited_pass_ends_where_it_would_have_ended() -> None:
    make = loaders(Resumable, 2)
    reading = remaining_batches(LimitedLoader(make(), 4), 0)
    batches = list(reading)
    place = position_of(reading, 4)
    assert list(remaining_batches(LimitedLoader(make(), 6), 4, place)) == list(make())[4:6]
    assert len(batches) == 4


@any_workers
def test_every_epoch_begins_at_the_beginning_also_where_the_dataset_keeps_its_place(workers: int) -> None:
    loader = make_loader(Endless(), seed=0, batch_size=4, collate_fn=list, num_workers=workers)
    first = list(loader)
    assert sum(map(len, first)) == 11
    assert list(loader) == first
    assert list(remaining_batches(loader, 0)) == first


def test_the_epoch_is_told_after_the_beginning_was_restored(noisy: ModuleType) -> None:
    dataset = noisy.Resumable(3)
    loader = make_loader(dataset, seed=0)
    loader.set_epoch(4)
    list(loader)
    assert dataset.epoch == 4


@pytest.mark.parametrize(("begun", "now"), [(2, 0), (2, 3), (0, 2)])
@pytest.mark.parametrize("dataset", [Resumable, Plain])
def test_another_number_of_workers_is_refused(dataset: type[Any], begun: int, now: int) -> None:
    _, there = places(loaders(dataset, begun))
    message = (
        f"dataset.train.num_workers: {begun or 1} -> {now or 1}: has changed in the middle of an epoch, and .*; set it"
    )
    with pytest.raises(DataError, match=message):
        remaining_batches(loaders(dataset, now)(), 1, there[0])


def test_no_worker_and_one_worker_read_the_same() -> None:
    _, there = places(loaders(Resumable, 0))
    assert list(remaining_batches(loaders(Resumable, 1)(), 2, there[1])) == list(loaders(Resumable, 1)())[2:]


def test_where_batches_are_counted_another_batch_size_is_refused() -> None:
    _, there = places(loaders(Plain, 0))
    message = "batch_size: 2 -> 3: has changed in the middle of an epoch, and samples would come twice"
    with pytest.raises(DataError, match=message):
        remaining_batches(loaders(Plain, 0, batch_size=3)(), 1, there[0])


@any_workers
def test_a_stream_without_a_state_is_read_again(workers: int, log_lines: list[str]) -> None:
    make = loaders(Plain, workers, collate_fn=list)
    loader = make()
    assert list(remaining_batches(make(), 3, position_of(loader, 3))) == list(loader)[3:]
    assert "reading 3 batches of the epoch again" in log_lines[0]
    assert "give its dataset state_dict and load_state_dict to avoid that" in log_lines[0]


class Buffered(Resumable):
    """Shuffles a buffer, with a state that knows nothing of it, as a stream of Hugging Face does."""

    def __iter__(self) -> Iterator[Any]:
        drawn, buffer = random.Random(5), []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 3:
                yield buffer.pop(drawn.randrange(4))
        yield from buffer


@any_workers
@pytest.mark.parametrize("dataset", [Plain, Buffered])
def test_a_stream_may_be_read_again_on_purpose_whatever_its_state(
    dataset: type[Any], workers: int, log_lines: list[str]
) -> None:
    make = loaders(dataset, workers, resume="reread")
    batches, there = places(make)
    assert batches == list(make())
    for taken, place in chosen(there, workers):
        assert list(remaining_batches(make(), taken, place)) == batches[taken:]
    # One line before each reading, and one with its cost after it.
    assert [line[:4] for line in log_lines] == ["INFO"] * 2 * len(chosen(there, workers))
    assert "reading 1 batches of the epoch again" in log_lines[0]


@pytest.mark.quick_cases(2)
@any_workers
@pytest.mark.parametrize("dataset", [Plain, Resumable, Blocks])
def test_a_stream_is_shuffled_within_a_buffer(dataset: type[Any], workers: int, log_lines: list[str]) -> None:
    """Each sample comes once, at most so far ahead of its turn; each epoch has its order; and a pass goes on exactly."""
    make = loaders(dataset, workers, shuffle_buffer=4)
    batches, there = places(make)
    for taken, place in chosen(there, workers):
        assert list(remaining_batches(make(), taken, place)) == batches[taken:]
    assert [line[:4] for line in log_lines] == ["INFO"] * 2 * len(chosen(there, workers))

    def shares(batches: list[list[Any]]) -> list[list[Any]]:
        """The samples of each worker, in their order."""
        turns = [batches[share :: workers or 1] for share in range(workers or 1)]
        return [[sample for batch in turn for sample in batch[:-1]] for turn in turns]

    plain, other = list(loaders(dataset, workers)()), list(loaders(dataset, workers, epoch=2, shuffle_buffer=4)())
    assert shares(batches) not in (shares(plain), shares(other))
    for before, after in zip(shares(plain), shares(batches), strict=True):
        # What the dataset draws for a sample stays with it.
        assert sorted(before) == sorted(after)
        assert all(after.index(sample) > rank - 4 for rank, sample in enumerate(before))


def test_a_buffer_draws_each_of_its_samples_as_often() -> None:
    """Of the 4 that are held first, each is the next one in about a quarter of the epochs; nothing else can be."""
    firsts = [next(iter(loaders(Plain, 0, epoch=epoch, shuffle_buffer=4, batch_size=1)()))[0] for epoch in range(800)]
    lowest = min(firsts)
    counts = [firsts.count(lowest + place) for place in range(4)]
    assert sum(counts) == 800
    # Five standard deviations.
    assert all(abs(count - 200) < 5 * (800 * 0.25 * 0.75) ** 0.5 for count in counts)


def test_another_buffer_in_the_middle_of_an_epoch_is_refused() -> None:
    _, there = places(loaders(Plain, 0, shuffle_buffer=4))
    for other in (0, 5):
        with pytest.raises(DataError, match=rf"shuffle_buffer: 4 -> {other}: has changed in the middle of an epoch"):
            remaining_batches(loaders(Plain, 0, shuffle_buffer=other)(), 1, there[0])
    _, there = places(loaders(Resumable, 0))
    with pytest.raises(DataError, match=r"shuffle_buffer: 0 -> 4: has changed in the middle of an epoch"):
        remaining_batches(loaders(Resumable, 0, shuffle_buffer=4)(), 1, there[0])


def test_what_has_indices_needs_no_buffer() -> None:
    with pytest.raises(
        ConfigError, match=r"^make_loader: shuffle_buffer: 4 is of streams, and list has indices; write"
    ):
        make_loader([1, 2], seed=0, shuffle_buffer=4)


def test_a_state_that_was_saved_before_is_not_loaded_where_a_stream_is_read_again() -> None:
    _, there = places(loaders(Buffered, 0))
    again = loaders(Buffered, 0, resume="reread")
    assert there[1]["states"]
    assert list(remaining_batches(again(), 2, there[1])) == list(again())[2:]


def test_a_pass_that_goes_on_and_has_not_begun_to_read_is_still_at_its_place() -> None:
    make = loaders(Resumable, 2)
    _, there = places(make)
    assert str(position_of(remaining_batches(make(), 2, there[1]), 2)) == str(there[1])


def test_a_pass_that_was_read_again_knows_its_state_from_then_on() -> None:
    make = loaders(Resumable, 2)
    reading, batches = remaining_batches(make(), 2), list(make())
    iterator = iter(reading)
    assert next(iterator) == batches[2]
    place = position_of(reading, 3)
    assert place is not None
    assert place["states"]
    assert list(remaining_batches(make(), 3, place)) == batches[3:]


@any_workers
def test_a_pass_that_nobody_resumes_asks_for_no_state(workers: int) -> None:
    class Refusing(Resumable):
        def state_dict(self) -> Any:
            assert not self.given
            return {"given": 0}

    loader = loaders(Refusing, workers)()
    with pytest.raises(AssertionError):
        list(loader)
    loader = without_state(LimitedLoader(loaders(Refusing, workers)(), 9))
    assert list(loader) == list(loaders(Resumable, workers)())


def test_what_a_state_holds_later_changes_nothing_in_the_one_that_was_taken() -> None:
    class Growing(Resumable):
        buffer: list[int] = []  # noqa: RUF012

        def state_dict(self) -> Any:
            return {"buffer": self.buffer}

    dataset = Growing()
    state = state_of(dataset, "dataset.train")
    dataset.buffer.append(1)
    assert state == {"buffer": []}


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"a": {"b": [0, {1}]}}, r"\['a'\]\['b'\]\[1\]: is a set, which cannot be saved; keep the state in numbers"),
        ({"a": {1.5: 0}}, r"\['a'\]: has the key 1.5, a float, which cannot be saved; use strings and integers"),
        (random.Random(0), ": is a random.Random, which cannot be saved"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_no_checkpoint_can_hold_is_refused_with_its_place(state: Any, what: str, workers: int) -> None:
    class Unplain(Resumable):
        def state_dict(self) -> Any:
            return state

    with pytest.raises(DataError, match=rf"dataset.train: Unplain.state_dict\(\){what}"):
        list(remaining_batches(loaders(Unplain, workers)(), 0))


def test_a_state_may_hold_all_that_a_checkpoint_can() -> None:
    class Rich(Resumable):
        def state_dict(self) -> Any:
            return {"a": (1, 2.5, None, b"x"), 3: Counter("ab"), "t": torch.arange(3)}

    state = state_of(Rich(), "dataset.train")
    assert str(unflatten(*flatten(state))) == str(state)


def test_of_a_marked_batch_only_the_batch_is_pinned() -> None:
    class Batch:
        def pin_memory(self) -> str:
            return "pinned"

    assert BatchWithState(Batch(), 1, {"draws": (1, 2)}).pin_memory() == ("pinned", 1, {"draws": (1, 2)})
