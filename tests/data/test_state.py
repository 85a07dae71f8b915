"""The state of a loader in a loop that is not ours: the rest of the pass and the next one, against an unbroken loop."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipeline.checkpoint.pytree import flatten, unflatten
from pipeline.data.loader import EpochSampler, make_loader, remaining_batches
from pipeline.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
]
TABLE = TensorDataset(torch.arange(11.0))


class Plain(IterableDataset[int]):
    """Has no state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


class Resumable(IterableDataset[int]):
    """Goes on where it was."""

    given = 0

    def __iter__(self) -> Iterator[int]:
        while self.given < 11:
            self.given += 1
            yield self.given
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.given = state["given"]


def saved(state: Any) -> bytes:
    """A state in a file of torch.save, by way of a checkpoint of ours."""
    file = io.BytesIO()
    torch.save(unflatten(*flatten(state)), file)
    return file.getvalue()


def loop(loader: Any, epochs: range = range(2)) -> list[tuple[int, str, bytes]]:
    """A training loop by hand: the epoch, the batch, and the loader's state after it."""
    given = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        given += [(epoch, str(batch), saved(loader.state_dict())) for batch in loader]
    return given


def resumed_everywhere(make: Callable[[], Any]) -> None:
    """Compare a loop that goes on after each batch with the unbroken one.

    Workers are started for each: then it is the first batch of an epoch, the second and the last.
    """
    first = make()
    whole = loop(first)
    size = len(whole) // 2
    for count, (epoch, _, state) in enumerate(whole, 1):
        if first.num_workers and count not in (1, 2, size, size + 1):
            continue
        loader = make()
        loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        assert saved(loader.state_dict()) == state
        assert loop(loader, range(epoch, 2)) == whole[count:]


KEYWORDS: list[dict[str, Any]] = [
    {"shuffle": True},
    {"shuffle": True, "drop_last": True},
    {"batch_size": 3, "shuffle": True},
    {"batch_size": None},
    {"batch_size": 1, "batch_sampler": [[3, 1], [0], [4, 2, 7]]},
    {"seed": None},
]
# Each kind of order with one kind of workers.
PAIRS = {(0, 3), (2, 2), (3, 1), (4, 3), (5, 2)}


@pytest.mark.parametrize(
    ("keywords", "workers"),
    [
        *((keywords, WORKERS[0]) for keywords in KEYWORDS),
        *(
            pytest.param(
                KEYWORDS[order],
                WORKERS[kind],
                marks=pytest.mark.slow if (order, kind) in PAIRS else pytest.mark.release,
            )
            for order, kind in product(range(6), (1, 2, 3))
        ),
    ],
)
def test_a_loop_goes_on_after_every_batch_as_if_it_had_not_been_left(
    noisy: ModuleType, keywords: dict[str, Any], workers: dict[str, Any]
) -> None:
    chosen = {"seed": 3, "batch_size": 4, "collate_fn": list, **keywords, **workers}
    draws = noisy.Noisy(11) if chosen["seed"] is not None else list(range(11))
    resumed_everywhere(lambda: make_loader(draws, **chosen))


def test_slices_of_tensors_go_on_too() -> None:
    resumed_everywhere(lambda: make_loader(TABLE, seed=3, shuffle=True, batch_size=2))


@pytest.mark.parametrize("workers", [0, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 2))])
@pytest.mark.parametrize("dataset", [Plain, Resumable])
def test_a_stream_goes_on_after_every_batch(dataset: type[Any], workers: int, log_lines: list[str]) -> None:
    resumed_everywhere(lambda: make_loader(dataset(), seed=3, batch_size=2, num_workers=workers))
    assert any("again" in line for line in log_lines) == (dataset is Plain)


@pytest.mark.parametrize("workers", [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in WORKERS[2:])])
def test_the_rest_of_a_pass_is_that_of_torch_and_the_next_pass_is_whole(workers: dict[str, Any]) -> None:
    expected = [batch.tolist() for batch in DataLoader(range(11), 4)]
    loader = make_loader(range(11), seed=0, batch_size=4, **workers)
    first = [batch.tolist() for batch in islice(loader, 1)]
    state = json.loads(json.dumps(loader.state_dict()))
    other = make_loader(range(11), seed=0, batch_size=4, **workers)
    other.load_state_dict(state)
    passes = [[batch.tolist() for batch in other] for _ in range(2)]
    assert [first + passes[0], passes[1]] == [expected, expected]


def test_with_shuffle_the_rest_is_that_of_the_sampler_by_hand() -> None:
    sampler = EpochSampler(range(11), shuffle=True, seed=5)
    sampler.set_epoch(7)
    loader = make_loader(TABLE, seed=5, shuffle=True, batch_size=4)
    loader.load_state_dict({"epoch": 7, "taken": 1})
    assert torch.cat([batch for (batch,) in loader]).tolist() == list(sampler)[4:]


@pytest.mark.parametrize("dataset", [TABLE, list(range(11)), Plain(), Resumable()])
def test_after_the_last_batch_nothing_is_left_and_after_the_end_of_a_pass_comes_a_whole_one(dataset: Any) -> None:
    loader = make_loader(dataset, seed=0, batch_size=4)
    states = [loader.state_dict() for _ in loader]
    whole, passes = str(list(loader)), []
    for state in (states[-1], loader.state_dict()):
        other = make_loader(copy.deepcopy(dataset), seed=0, batch_size=4)
        other.load_state_dict(state)
        passes.append([str(list(other)), str(list(other))])
    assert passes == [["[]", whole], [whole, whole]]


def test_a_pass_that_is_begun_again_or_left_for_another_epoch_has_its_own_place() -> None:
    loader = make_loader(TABLE, seed=0, batch_size=4)
    next(islice(loader, 1, None))
    assert loader.state_dict()["taken"] == 2
    next(iter(loader))
    assert loader.state_dict()["taken"] == 1
    loader.set_epoch(0)
    assert loader.state_dict()["taken"] == 1
    loader.set_epoch(1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["taken"]) == (1, 0)


def test_a_state_of_one_epoch_is_forgotten_in_another() -> None:
    loader = make_loader(TABLE, seed=0, batch_size=4)
    loader.load_state_dict({"epoch": 2, "taken": 1})
    loader.set_epoch(3)
    assert len(list(loader)) == 3


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_done_is_not_fetched_again(tmp_path: Any, persistent: bool) -> None:
    class Noting(list[int]):
        def __getitem__(self, index: Any) -> int:
            (tmp_path / f"{index}.asked").touch()
            return 0

    workers = {"num_workers": 1, "persistent_workers": True} if persistent else {}
    loader = make_loader(Noting(range(11)), seed=0, batch_size=4, **workers)
    loader.load_state_dict({"taken": 1})
    list(loader)
    assert sorted(int(path.stem) for path in tmp_path.glob("*.asked")) == list(range(4, 11))


def test_an_order_without_a_seed_is_kept() -> None:
    loaders = [make_loader(TABLE, seed=None, shuffle=True, batch_size=4) for _ in range(2)]
    first = [batch for (batch,) in islice(loaders[0], 1)]
    loaders[1].load_state_dict(loaders[0].state_dict())
    rest = [batch for (batch,) in loaders[1]]
    assert sorted(torch.cat(first + rest).tolist()) == list(range(11))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"batch_size": 3},
            r"train.batch_size: 2 -> 3: has changed in the middle of an epoch, and .* set it back until",
        ),
        ({"seed": 4}, "train.seed: 3 -> 4: has changed"),
        ({"shuffle": False}, "train.shuffle: true -> false; train.seed: 3 -> null: has changed"),
        ({"dataset": list(range(12))}, "train.samples: 11 -> 12: has changed"),
    ],
)
def test_a_state_of_other_data_is_refused(changed: dict[str, Any], message: str) -> None:
    chosen = {"dataset": list(range(11)), "seed": 3, "shuffle": True, "batch_size": 2, "where": "train"}
    loader = make_loader(**chosen)
    next(iter(loader))
    with pytest.raises(DataError, match=message):
        make_loader(**chosen | changed).load_state_dict(loader.state_dict())


def test_between_two_passes_other_data_will_do() -> None:
    loader = make_loader(TABLE, seed=0, batch_size=2)
    list(loader)
    other = make_loader(TABLE, seed=0, batch_size=4)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_copy_made_in_the_middle_of_a_pass_begins_at_the_beginning(workers: int) -> None:
    loader = make_loader(list(range(11)), seed=0, batch_size=4, num_workers=workers)
    batches = iter(loader)
    next(batches)
    assert [len(batch) for batch in copy.deepcopy(loader)] == [4, 4, 3]
    assert [len(batch) for batch in batches] == [4, 3]


def test_positions_that_checkpoints_of_before_hold_are_read() -> None:
    shard = {"batches": 2, "ended": False, "seed": 0, "dataset": {"given": 4}, "draws": None}
    stream = {"shares": 1, "batch_size": 2, "taken": 2, "last": 0, "states": [shard]}
    given = [list(remaining_batches(make_loader(Resumable(), seed=0, batch_size=2), 2, stream))]
    given.append(list(remaining_batches(make_loader(list(range(1, 12)), seed=0, batch_size=2), 2, None)))
    assert [torch.cat(batches).tolist() for batches in given] == [list(range(5, 12))] * 2


@pytest.mark.parametrize(("state", "keys"), [({}, "no key"), ({"loader": 1, 2: 3}, "loader, 2")])
def test_what_is_no_state_of_a_loader_is_refused(state: Any, keys: str) -> None:
    with pytest.raises(DataError, match=f"train: a state has {keys} and not 'taken'; load what state_dict"):
        make_loader(TABLE, seed=0, where="train").load_state_dict(state)
