"""Batches that are fetched at once, against those that torch's DataLoader makes sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from pipeline.check.checker import check
from pipeline.data.fetch import can_slice, slice_batch
from pipeline.data.loader import EpochSampler, make_loader, position_of, remaining_batches
from pipeline.errors import ConfigError, DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # where there are fewer processors than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # without an accelerator
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]

DRAWN = torch.randn(11, 3, 4, 5, generator=torch.Generator().manual_seed(0))
TABLE = TensorDataset(
    DRAWN,
    DRAWN.contiguous(memory_format=torch.channels_last),
    DRAWN[..., 0].transpose(1, 2),
    DRAWN[0, 0, 0].expand(11, 5),
    DRAWN[:, 0, 0, 0] > 0,
    DRAWN[:, 0].half(),
    torch.view_as_complex(DRAWN[..., :2].contiguous()),
    torch.arange(22)[::2],
    torch.zeros(11, 0),
)
TABLES = {
    "table": TABLE,
    "subset": Subset(TABLE, [9, 1, 4, -1, 4, 0, 7]),
    "subset of a subset": Subset(Subset(TABLE, range(2, 9)), (6, 0, 3, 3, 5)),
    "subset by a tensor": Subset(TABLE, torch.tensor([3, 1, 2])),  # type: ignore[arg-type]  # torch takes it
}


def same(given: list[Any], expected: list[Any]) -> bool:
    """Whether batches are equal in type, data type, strides and every bit."""
    return repr(list(map(facts, given))) == repr(list(map(facts, expected)))


def facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.tolist()
    parts = value.values() if isinstance(value, Mapping) else value
    return type(value), [facts(part) for part in parts]


def by_torch(dataset: Any, epoch: int, *, shuffle: bool, **keywords: Any) -> list[Any]:
    order = EpochSampler(dataset, shuffle, 3)
    order.set_epoch(epoch)
    return list(DataLoader(dataset, sampler=order, **keywords))


def loader_of(dataset: Any, epoch: int = 1, **keywords: Any) -> Any:
    loader = make_loader(dataset, seed=3, **keywords)
    loader.set_epoch(epoch)
    return loader


# In a worker, the table itself and one with two lists of indices.
WORKERS = [(name, 0) for name in TABLES] + [
    pytest.param(name, 2, marks=() if name in ("table", "subset of a subset") else pytest.mark.slow) for name in TABLES
]


@pytest.mark.parametrize(("name", "workers"), WORKERS)
def test_a_table_gives_the_batches_that_torch_makes(name: str, workers: int) -> None:
    dataset = TABLES[name]
    for shuffle, drop_last in [(True, False), (False, True)]:
        settings: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "batch_size": 4, "num_workers": workers}
        assert same(list(loader_of(dataset, **settings)), by_torch(dataset, 1, **settings))
    assert can_slice(dataset, loader_of(dataset).collate_fn)


@pytest.mark.parametrize(
    ("taken", "workers"),
    [(1, 0), (2, 0), (3, 0), (2, 2), *(pytest.param(taken, 2, marks=pytest.mark.slow) for taken in (1, 3))],
)
def test_a_table_goes_on_in_mid_epoch(taken: int, workers: int) -> None:
    settings: dict[str, Any] = {"shuffle": True, "batch_size": 3, "num_workers": workers}
    reading = remaining_batches(loader_of(TABLE, **settings), 0)
    batches = iter(reading)
    [next(batches) for _ in range(taken)]
    rest = list(remaining_batches(loader_of(TABLE, 0, **settings), taken, position_of(reading, taken)))
    assert same(rest, by_torch(TABLE, 1, **settings)[taken:])


def test_a_batch_shares_no_memory_with_the_table() -> None:
    dataset = TensorDataset(torch.zeros(4))
    for batch in make_loader(dataset, seed=0, batch_size=4):
        batch[0].add_(1)
    assert dataset.tensors[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": TABLE, "collate_fn": list},
        {"dataset": ConcatDataset([TABLE, TABLE])},
        {"dataset": TABLE, "batch_size": None},
        {"dataset": TABLE, "seed": None, "pin_memory": True},
        {"dataset": TensorDataset(torch.zeros(5, requires_grad=True))},
        {"dataset": TensorDataset(torch.eye(3).to_sparse().coalesce().to_dense())},
    ],
    ids=["own collation", "concatenated", "no batches", "no seed", "gradients", "dense"],
)
def test_what_is_no_plain_table_gives_those_of_torch_too(arguments: dict[str, Any]) -> None:
    keywords = {"batch_size": 2, **arguments}
    expected = list(DataLoader(**{name: value for name, value in keywords.items() if name != "seed"}))
    assert same(list(make_loader(**{"seed": 0, **keywords})), expected)


def test_a_way_to_collate_tensors_that_a_user_has_registered_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Tensor, lambda batch, **_: f"{len(batch)} tensors")
    assert list(make_loader(TensorDataset(torch.zeros(3)), seed=0, batch_size=2)) == [["2 tensors"], ["1 tensors"]]


@pytest.mark.parametrize("indices", [[3, 99], [-12], [0.5], [], "ab"])
def test_what_cannot_be_sliced_is_left_to_torch_which_names_the_sample(indices: Any) -> None:
    assert slice_batch(TABLE, indices) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_is_not_there_is_named(workers: int) -> None:
    with pytest.raises(IndexError) as raised:
        list(make_loader(TABLE, seed=0, batch_sampler=[[1, 99, 2]], where="x", num_workers=workers))
    note = "x: raised for sample 99, fetching the samples 1, 99, 2 (from place 0 of epoch 0 on)"
    assert raised.value.__notes__[0].removesuffix(", in worker 0") == note


class Whole(Dataset[Any]):
    """Noisy batches at once; so many of their rows are missing."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return 11

    def __getitems__(self, indices: list[int]) -> Any:
        rows = torch.tensor(indices[self.missing :])
        return {"offsets": torch.zeros(50), "x": (rows, torch.rand(len(rows)))}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_dataset_may_give_whole_batches_which_nothing_collates(taken: int, workers: int) -> None:
    settings: dict[str, Any] = {"shuffle": True, "batch_size": 4, "whole_batches": True}
    expected = list(loader_of(Whole(), **settings))
    assert [batch["x"][0].tolist() for batch in expected] == [
        batch.tolist() for batch in by_torch(torch.arange(11), 1, shuffle=True, batch_size=4)
    ]
    given = list(remaining_batches(loader_of(Whole(), **settings, num_workers=workers), taken))
    assert same(given, expected[taken:])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_whole_batch_of_too_few_samples_is_told(workers: int) -> None:
    what = r"^x: Whole.__getitems__ returned a dict of 2 \(.*\) for 4 of them, the samples 0, 1, 2, 3 \(from place 0"
    with pytest.raises(DataError, match=what):
        list(make_loader(Whole(1), seed=0, batch_size=4, whole_batches=True, where="x", num_workers=workers))


def test_a_whole_batch_without_the_key_is_told() -> None:
    message = "return a sample for each index or, with whole_batches: true, a batch with a row for each$"
    with pytest.raises(DataError, match=message):
        list(make_loader(Whole(), seed=0, batch_size=4))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": TABLE},
        {"dataset": Numbers()},
        {"dataset": Whole(), "collate_fn": list},
        {"dataset": Whole(), "batch_size": None},
    ],
)
def test_whole_batches_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^make_loader: whole_batches: true needs a dataset with __getitems__"):
        make_loader(**{"batch_size": 2, **arguments}, seed=0, whole_batches=True)


DATA = """
    from torch.utils.data import Dataset, IterableDataset, TensorDataset

    class Batches(Dataset):
        def __len__(self): return 3
        def __getitems__(self, indices): return indices

    class Table(TensorDataset):
        def __init__(self): pass

    class Rows(IterableDataset):
        def __iter__(self): return iter(())

    def collate(samples): return samples
"""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("class_path={workspace}/rows.py:Batches whole_batches=true", []),
        (
            "class_path={workspace}/rows.py:Table whole_batches=true",
            ["whole_batches: Table has no __getitems__; define __getitems__(self, indices) to return a batch, or remove it"],
        ),
        (
            "class_path={workspace}/rows.py:Rows whole_batches=true",
            ["whole_batches: would be ignored: an IterableDataset gives its samples one by one; remove it"],
        ),
        (
            "class_path={workspace}/rows.py:Batches whole_batches=true collate_fn={workspace}/rows.py:collate",
            ["collate_fn: would be ignored: whole_batches is true; remove one of the two"],
        ),
        (
            "class_path={workspace}/rows.py:Batches whole_batches=true batch_size=null",
            ["whole_batches: would be ignored: batch_size is null, and samples are asked for one by one; remove it"],
        ),
        ("class_path={workspace}/rows.py:Rows resume=reread", []),
        (
            "class_path={workspace}/rows.py:Table resume=reread",
            ["resume: would be ignored: what has indices goes on exactly; remove it"],
        ),
    ],
)  # fmt: skip
def test_check_says_which_datasets_these_keys_are_for(
    linear: Path, workspace: Any, keys: str, expected: list[str]
) -> None:
    workspace({"rows.py": DATA})
    overrides = ["dataset.train_data.args={}", *(f"dataset.train_data.{key}" for key in keys.split())]
    found = [f"{fault.address}: {fault.message}" for fault in check(linear, overrides)]
    assert found == [f"dataset.train_data.{each}" for each in expected]
