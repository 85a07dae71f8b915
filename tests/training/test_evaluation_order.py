"""The order of the samples in an evaluation, with every way to shuffle or weight them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipeline import GeneralTrainer
from pipeline.slots.reader import ReaderBase
from pipeline.stages import Network

SAMPLES = 10
ALL = list(range(SAMPLES))
X = torch.arange(float(SAMPLES)).unsqueeze(1)
Config = dict[str, Any]


class Recorder(nn.Module):
    """Predicts its input, and records the samples that it gets in evaluation and in training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.evaluated: list[int] = []
        self.trained: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        samples = self.trained if self.training else self.evaluated
        samples += x.flatten().int().tolist()
        return x * self.scale


class Numbers(IterableDataset[Any]):
    """The samples as a stream, which shuffles itself if it is asked to."""

    def __init__(self, shuffle: bool = False) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES) if self.shuffle else torch.arange(SAMPLES)
        return iter([(X[index], X[index]) for index in order])


class Lines(ReaderBase):
    """The samples as lines of a file."""

    def generate_sample(self, line: str) -> Any:
        yield [("x", [float(line)]), ("target", [float(line)])]


class Endless:
    """A sampler that repeats samples, and never ends."""

    def __init__(self, dataset: Any) -> None:
        self.count = len(dataset)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.count).tolist()


class Part:
    """A sampler of four samples in another order, without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter([8, 3, 5, 0])


class Buckets:
    """A batch sampler that leaves two samples out."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[9, 0, 3], [7, 2], [4, 5, 8]])


class Named(Recorder):
    """Takes a batch of slots."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["x"])


class TorchNetwork(Network):
    """Builds loaders of torch's that shuffle."""

    def build_dataset(self, settings: Any, runner: Any, context: Any) -> Any:
        return DataLoader(TensorDataset(X, X), batch_size=4, shuffle=True, drop_last=True)


class OwnOrder:
    """A sampler that is not torch's, and selects four samples."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter([7, 3, 0, 2])


class OwnOrderNetwork(Network):
    """Builds loaders of torch's with a sampler of the user's."""

    def build_dataset(self, settings: Any, runner: Any, context: Any) -> Any:
        return DataLoader(TensorDataset(X, X), batch_size=3, sampler=OwnOrder())


def flat_loss(predictions: Tensor, target: Tensor) -> Tensor:
    return nn.functional.l1_loss(predictions.flatten(), target)


def config(**dataset: Any) -> Config:
    """Train and evaluate on one dataset."""
    data = {"name": "data", "class_path": lambda: TensorDataset(X, X), "batch_size": 4}
    data |= dataset
    return {
        "plugins": [{"progress_bar": False}, {"metric_log": False}],
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.0}},
        "dataset": [{key: value for key, value in data.items() if value is not None}],
        "runner": [
            {"name": "train", "class": "train", "device": "cpu", "epochs": 2},
            {"name": "infer", "class": "infer", "device": "cpu", "predictions": {}},
        ],
        "phase": [
            {
                "name": "line",
                "model": Recorder,
                "loss": nn.functional.l1_loss,
                "dataset_name": "data",
                "valid_dataset_name": "data",
            }
        ],
    }


def rows_of(config: Config) -> list[tuple[int, int]]:
    """The index and the sample of each prediction."""
    run_dir: Path = GeneralTrainer(config).run()["run_dir"]
    lines = (run_dir / "infer" / "line_predictions.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return [(row["index"], int(row["prediction"][0])) for row in rows]


def sampler(name: str, **args: Any) -> Config:
    return {"sampler": {"class_path": f"torch.utils.data:{name}", "args": args}}


WEIGHTS = [1.0] + [0.0] * (SAMPLES - 1)
PART = [7, 2, 5, 9, 1]
ORDERS: dict[str, tuple[Config, list[int]]] = {
    "shuffle": ({"shuffle": True}, ALL),
    "drop_last": ({"shuffle": True, "drop_last": True}, ALL),
    "workers": ({"shuffle": True, "num_workers": 1, "persistent_workers": True}, ALL),
    "subset": (sampler("SubsetRandomSampler", indices=PART), sorted(PART)),
    "weights": (sampler("WeightedRandomSampler", weights=WEIGHTS, num_samples=20), ALL),
    "replacement": (sampler("RandomSampler", replacement=True, num_samples=20), ALL),
    "part": ({"sampler": {"class_path": Part}}, [0, 3, 5, 8]),
    "stream": ({"class_path": Numbers, "shuffle": True}, ALL),
    "buffer": ({"class_path": Numbers, "shuffle_buffer": 5}, ALL),
    "stream_workers": ({"class_path": Numbers, "num_workers": 2}, ALL),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ORDERS)
def test_predictions_have_the_order_of_the_dataset(name: str) -> None:
    """Each line has the index of its sample, and no sample of the selection is missing."""
    dataset, expected = ORDERS[name]

    rows = rows_of(config(**dataset))

    assert rows == [(index, index) for index in expected]


def test_predictions_of_batches_are_sorted_by_index() -> None:
    """A batch sampler keeps its groups, on which padding depends; the file is sorted."""
    rows = rows_of(config(batch_sampler={"class_path": Buckets}, batch_size=None))

    assert rows == [(index, index) for index in [0, 2, 3, 4, 5, 7, 8, 9]]


def test_predictions_of_an_endless_sampler_come_once() -> None:
    data = config(sampler={"class_path": Endless})
    data["runner"][0] |= {"max_steps": 3, "epochs": 1}

    assert rows_of(data) == [(index, index) for index in ALL]


@pytest.mark.parametrize(("network", "expected"), [(TorchNetwork, ALL), (OwnOrderNetwork, [0, 2, 3, 7])])
def test_predictions_of_a_torch_loader_are_in_order(network: type, expected: list[int]) -> None:
    data = config()
    for runner in data["runner"]:
        runner["network_class_path"] = network

    assert rows_of(data) == [(index, index) for index in expected]


def test_predictions_of_shuffled_lines_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{index}\n" for index in ALL))
    data = config(class_path=Lines, data_path=str(path), shuffle=True)
    data["phase"][0] |= {"model": Named, "loss": flat_loss}

    assert rows_of(data) == [(index, index) for index in ALL]


def test_tensors_have_the_indices_of_their_samples() -> None:
    data = config(batch_sampler={"class_path": Buckets}, batch_size=None)
    data["runner"][1]["predictions"] = {"format": "safetensors"}

    run_dir = GeneralTrainer(data).run()["run_dir"]

    tensors = load_file(run_dir / "infer" / "line_predictions.safetensors")
    assert tensors["index"].tolist() == [0, 2, 3, 4, 5, 7, 8, 9]
    assert torch.equal(tensors["prediction"], X[tensors["index"]])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["shuffle", "weights", "stream", "buffer", "subset", "part"])
def test_a_validation_has_the_order_of_the_dataset(name: str) -> None:
    """The same data are still shuffled and weighted in training."""
    dataset, expected = ORDERS[name]
    data = config(**dataset)
    data["mode"] = "train"

    model = GeneralTrainer(data).run()["model"]["line"]["model"]

    assert model.evaluated == expected * 2
    assert model.trained != (expected * 2)
    if name != "weights":
        assert sorted(model.trained) == sorted(expected * 2)


def test_a_validation_keeps_drop_last() -> None:
    data = config(shuffle=True, drop_last=True)
    data["mode"] = "train"

    model = GeneralTrainer(data).run()["model"]["line"]["model"]

    assert model.evaluated == list(range(8)) * 2
