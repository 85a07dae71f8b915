"""The keys of a dataset that decide its order, its batches and its workers: what the loader is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pipeline import GeneralTrainer
from pipeline.data.rng import seeding
from pipeline.errors import ConfigError

Make = Callable[..., Any]


@pytest.fixture
def loader(config: dict[str, Any]) -> Make:
    """The loader of a training, with other keys of its dataset."""

    def make(**keys: Any) -> Any:
        dataset = {**config["dataset"][0], **keys}
        named = {**config, "mode": "train", "dataset": [{k: v for k, v in dataset.items() if v != "out"}]}
        phase = {k: v for k, v in config["phase"][0].items() if k != "valid_dataset_name"}
        named["phase"] = [{**phase, "model": lambda: nn.Linear(3, 1)}]
        return GeneralTrainer(named).run()["dataset"]["train_data"]

    return make


class Order(Sampler[int]):
    """Keeps what it is made with."""

    def __init__(self, dataset: Any, seed: int, shuffle: bool, last: int = 3, batch_size: int = 7) -> None:
        self.arguments, self.epochs = (dataset, seed, shuffle, last, batch_size), list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([5, 1, 2])


def test_a_sampler_is_made_with_what_it_names_and_its_own_arguments(loader: Make, config: dict[str, Any]) -> None:
    config["runner"][0] |= {"seed": 11}
    made = loader(sampler={"class_path": Order, "args": {"last": 9}})
    assert made.sampler.arguments == (made.dataset, 11, True, 9, 4)
    assert (made.sampler.epochs, made.batch_size, made.drop_last) == ([0, 1], 4, False)
    own = loader(sampler={"class_path": Order, "args": {"seed": 1, "batch_size": 2}}, batch_size=2, drop_last=True)
    assert own.sampler.arguments[1:] == (1, True, 3, 2)
    assert [len(x) for x, _ in own] == [2]
    assert [batch[0].shape[0] for batch in loader(sampler={"class_path": Order}, batch_size=2)] == [2, 1]


class Pairs:
    """Two to a batch, without a base class."""

    def __init__(self, data_source: Any, batch_size: int = 2) -> None:
        self.count, self.size = len(data_source), batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, start + self.size)) for start in range(0, self.count, self.size)])


def test_a_batch_sampler_decides_the_batches(loader: Make) -> None:
    made = loader(batch_sampler={"class_path": Pairs}, batch_size=5, shuffle="out")
    assert [batch[0].shape[0] for batch in made] == [5, 5]
    made = loader(batch_sampler={"class_path": lambda dataset: [[1, 0], [7]]}, batch_size="out", shuffle="out")
    assert torch.equal(torch.cat([x for x, _ in made]), made.dataset.tensors[0][[1, 0, 7]])


@pytest.mark.parametrize(
    ("name", "args", "shuffle"),
    [
        ("RandomSampler", {}, "out"),
        ("WeightedRandomSampler", {"weights": [1.0] * 10, "num_samples": 6}, "out"),
        ("distributed.DistributedSampler", {"num_replicas": 2, "rank": 1}, True),
    ],
)
def test_the_samplers_of_torch_give_each_epoch_its_order(
    name: str, args: dict[str, Any], shuffle: Any, loader: Make
) -> None:
    made = loader(sampler={"class_path": f"torch.utils.data.{name}", "args": args}, shuffle=shuffle)
    source = {"dataset": made.dataset, "shuffle": True, "seed": 0} if shuffle is True else {}
    source |= {"data_source": made.dataset} if name == "RandomSampler" else {}
    by_hand = type(made.sampler)(**source, **args)
    for epoch in (0, 3):
        made.set_epoch(epoch)
        if isinstance(by_hand, DistributedSampler):
            by_hand.set_epoch(epoch)
        with seeding(0, epoch, "order"):
            expected = made.dataset.tensors[0][list(by_hand)]
        assert torch.equal(torch.cat([x for x, _ in made]), expected)


def test_what_gives_no_indices_is_refused(loader: Make) -> None:
    message = r"dataset.train_data.sampler.class_path: <lambda> made a int; name a Iterable"
    with pytest.raises(ConfigError, match=message):
        loader(sampler={"class_path": lambda: 3})


class Batches(IterableDataset[Any]):
    """Makes its own."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(size, 3), torch.ones(size, 1)) for size in (2, 5, 1)])


def test_without_a_batch_size_a_stream_makes_its_own_batches_and_a_sample_is_one(loader: Make) -> None:
    made = loader(class_path=Batches, batch_size=None, shuffle="out")
    assert [len(x) for x, _ in made] == [2, 5, 1]
    rows = TensorDataset(torch.ones(4, 2, 3), torch.ones(4, 2, 1))
    made = loader(class_path=lambda: rows, batch_size=None)
    assert [x.shape for x, _ in made] == [(2, 3)] * 4


class Join:
    """A collate function with a state."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [self.scale * torch.stack(column) for column in zip(*samples, strict=True)]


def join(samples: list[tuple[Tensor, Tensor]], scale: float) -> list[Tensor]:
    return Join(scale)(samples)


class Rows(list[Tensor]):
    """Is made of the samples."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
        super().__init__(join(samples, scale))


@pytest.mark.parametrize("collate", [Join, join, Rows])
def test_collate_args_are_those_of_the_function_or_of_its_class(collate: Any, loader: Make) -> None:
    made = loader(collate_fn=collate, collate_args={"scale": 3.0}, shuffle="out")
    assert isinstance(made.collate_fn, partial if collate is not Join else Join)
    assert torch.equal(torch.cat([x for x, _ in made]), 3 * made.dataset.tensors[0])


@pytest.mark.parametrize("collate", [Join, Rows])
def test_a_class_that_is_called_with_samples_is_made_first_and_any_other_of_them(collate: Any, loader: Make) -> None:
    made = loader(collate_fn=collate, shuffle="out")
    assert torch.equal(torch.cat([x for x, _ in made]), made.dataset.tensors[0])


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_keys_about_workers_go_to_the_loader_of_torch(loader: Make, tmp_path: Path) -> None:
    made = loader(
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=3,
        pin_memory=True,
        worker_init_fn=lambda worker: (tmp_path / f"worker {worker}").write_text("x"),
    )
    assert (made.persistent_workers, made.prefetch_factor, made.pin_memory) == (True, 3, True)
    assert [path.name for path in tmp_path.glob("worker *")] == ["worker 0"]
    made = loader()
    plain = DataLoader([0])
    for name in ("persistent_workers", "prefetch_factor", "pin_memory", "num_workers", "timeout"):
        assert getattr(made, name) == getattr(plain, name)
