"""Batches on their way to a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pipeline.data.batch import count_samples, to_device

META = torch.device("meta")


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class Words(dict[str, Any]):
    def to(self, device: torch.device) -> Words:
        return Words({name: value.to(device) for name, value in self.items()})


def test_every_tensor_in_a_batch_is_moved_and_everything_else_stays_as_it_is() -> None:
    one = torch.ones(2)
    batch = {"a": [one, "text", None], "b": (one, {"c": one}), "d": Pair(one, 5)}
    moved = to_device(batch, META)
    assert [moved["a"][0].device.type, moved["b"][0].device.type, moved["b"][1]["c"].device.type] == ["meta"] * 3
    assert moved["a"][1:] == ["text", None]
    assert isinstance(moved["b"], tuple)
    assert isinstance(moved["d"], Pair)
    assert (moved["d"].left.device.type, moved["d"].right) == ("meta", 5)


def test_a_packed_sequence_is_moved_as_one() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device([packed], META)[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META


@pytest.mark.parametrize("batch", [Graph(torch.ones(2)), Words(nodes=torch.ones(2))])
def test_what_can_move_itself_does_and_keeps_its_class(batch: Any) -> None:
    moved = to_device({"graph": batch}, META)["graph"]
    assert type(moved) is type(batch)
    assert (moved.nodes if isinstance(moved, Graph) else moved["nodes"]).device == META


def test_what_cannot_be_moved_is_the_same_object() -> None:
    opaque = object()
    assert to_device((opaque,), META)[0] is opaque


class Sentences(list[str]):
    def to(self, device: torch.device) -> Sentences:
        return self


class Boxes:
    """As libraries for graphs and detection have them: neither a list nor a mapping."""

    def __init__(self, count: int) -> None:
        self.corners = torch.ones(count, 4)

    def __len__(self) -> int:
        return len(self.corners)

    def to(self, device: torch.device) -> Boxes:
        return self


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (Boxes(3), 3),
        (Boxes(0), 0),
        (Sentences(["a", "b"]), 2),
        ((Boxes(3), torch.ones(5)), 5),
        (["a", "b"], 0),
        (Words(text="no tensor"), 0),
        (Graph(torch.ones(2)), 2),
        (torch.ones(()), 0),
    ],
)
def test_a_batch_that_moves_itself_counts_by_its_length_or_by_the_first_tensor_in_its_attributes(
    batch: Any, samples: int
) -> None:
    assert count_samples(batch) == samples


def test_of_such_a_batch_tensors_are_found_however_deep_in_its_attributes() -> None:
    batch = Graph(torch.ones(()))
    assert count_samples(batch) == 0
    vars(batch)["parts"] = [torch.ones(()), {"x": torch.ones(3, 2)}]
    assert count_samples(batch) == 3


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 0),
        ([torch.zeros(()), torch.zeros(4)], 4),
        ({"a": "text", "b": (torch.zeros(5),)}, 5),
        ("text", 0),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples
